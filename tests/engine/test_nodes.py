"""Two nodes: two torchrun agents with separate addresses, in two network namespaces if this process may create them.
`pytest -s -m slow` of this file prints the table of faults and their outcomes in experiments/others.md.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from ea_vision.engine import checkpoint, run, run_folder, train_imagenet
from tests.engine import runner
from tests.engine.runner import around, same_result
from tests.process import ROOT
from tests.slow import unix_only

unix_only()

JOIN_SECONDS = 20  # that an agent waits for the other one, which torchrun takes for 600 otherwise


# Of five updates of four times two images, a checkpoint in every update.
TEN_EPOCHS = (
    "--recipe none --model-kwargs drop_rate=0.2 --epochs 10 --batch-size 2 --workers 0 --lr 0.01 "
    "--log-steps 0 --checkpoint-steps 1"
)


train = partial(runner.train, size=2, main=train_imagenet.main)


# ---- in every run of the tests: what processes of different nodes say of themselves ----------------------------------


def of_the_second(argv, what, empty):
    """Give the second process this command line and, depending on `what`, another commit or an empty run folder."""
    if os.environ["RANK"] == "1":
        around(run, "parse", lambda parse, parser, _: parse(parser, argv))
        if what == "commit":
            around(run, "provenance", lambda provenance: {**provenance(), "git_commit": "0" * 40})
        if what == "folder":
            around(checkpoint, "newest_checkpoint", lambda newest, *_: newest(empty))


@pytest.mark.parametrize("what", ["commit", "data", "lr", "folder"])
def test_nodes_that_differ_are_refused(photos, imagenet, folder, tmp_path, what):
    other = tmp_path / "other"
    argv = second = imagenet(folder, TEN_EPOCHS, "--epochs 2")
    message = f"all processes must have the same {what}: process 1 on"
    if what == "data":
        shutil.copytree(photos, other)
        next((other / "train").rglob("*.jpg")).unlink()
        second = [*argv, "--data-dir", str(other)]
    elif what == "lr":
        second = [*argv, "--lr", "0.02"]
    elif what == "folder":
        train([*argv, "--epochs", "1"])
        message = "must be on a disk that all processes share"
    assert message in train(argv, partial(of_the_second, second, what, other), code=2)
    assert (folder / checkpoint.LAST).exists() == (what == "folder")


# ---- two agents ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def nodes():
    """For each node: the prefix of its commands, its address, and its environment."""
    if os.geteuid() != 0 or not shutil.which("ip"):
        yield [([], f"127.0.0.{number}", {}) for number in (1, 2)]
        return
    names = [f"ea{os.getpid()}a", f"ea{os.getpid()}b"]
    commands = [f"netns add {name}" for name in names]
    commands.append(f"link add veth0 netns {names[0]} type veth peer name veth0 netns {names[1]}")
    nodes = []
    for number, name in enumerate(names, start=1):
        address = f"10.77.0.{number}"
        for command in (f"addr add {address}/24 dev veth0", "link set veth0 up", "link set lo up"):
            commands.append(f"-n {name} {command}")
        nodes.append((["ip", "netns", "exec", name], address, {"GLOO_SOCKET_IFNAME": "veth0"}))
    try:
        for command in commands:
            subprocess.run(["ip", *command.split()], check=True, capture_output=True)
        yield nodes
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


class Agents:
    """Two torchrun agents with two processes each; `start(n)` may be called again after node n has died."""

    def __init__(self, nodes, photos, place):
        self.nodes = nodes
        self.folder = place / "run"
        self.log = place / "log"
        self.argv = runner.imagenet(photos, self.folder, TEN_EPOCHS)
        self.running = {}
        self.port = runner.free_port()

    def start(self, *numbers):
        for number in numbers:
            prefix, address, environment = self.nodes[number]
            is_host = "false" if number else "true"
            rendezvous = runner.words(
                "--nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-id run --max-restarts 3",
                f"--rdzv-endpoint {self.nodes[0][1]}:{self.port} --local-addr {address}",
                f"--rdzv-conf is_host={is_host},join_timeout={JOIN_SECONDS}",
            )
            torchrun = [sys.executable, "-m", "torch.distributed.run", *rendezvous]
            launch = [*prefix, *torchrun, str(ROOT / "train_imagenet.py"), *self.argv]
            environment = {
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": str(ROOT),
                # else an agent that comes back waits for an address that the other one gave out only once
                "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
                **environment,
            }
            with open(self.log, "a") as file:
                self.running[number] = subprocess.Popen(
                    launch, stdout=file, stderr=file, start_new_session=True, env=environment
                )

    def updates(self):
        """How many updates of the weights are saved."""
        newest = checkpoint.newest_checkpoint(self.folder)
        return newest[1]["progress"]["updates"] if newest else 0

    def start_and_wait(self):
        """Start both nodes and wait until twelve updates are saved."""
        self.start(0, 1)
        deadline = time.monotonic() + 300
        while self.updates() < 12:
            running = any(process.poll() is None for process in self.running.values())
            assert running, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.05)

    def kill(self, *numbers):
        """End agents and their trainers at once, as when machines die."""
        for number in numbers:
            process = self.running.pop(number)
            for pid in self.trainers(process) + [process.pid]:
                os.kill(pid, signal.SIGKILL)
            process.wait()

    def trainers(self, process):
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
        commands = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children.split()}
        return [int(pid) for pid, command in commands.items() if b"train_imagenet" in command]

    def wait(self):
        return [self.running[number].wait(400) for number in sorted(self.running)]

    def close(self):
        left = [number for number, process in self.running.items() if process.poll() is None]
        self.kill(*left)


@pytest.fixture
def agents(nodes, photos, tmp_path):
    with closing(Agents(nodes, photos, tmp_path)) as agents:
        yield agents


@pytest.fixture(scope="module")
def whole(nodes, photos, tmp_path_factory):
    """The undisturbed run and its seconds."""
    begun = time.monotonic()
    with closing(Agents(nodes, photos, tmp_path_factory.mktemp("whole"))) as agents:
        agents.start(0, 1)
        assert agents.wait() == [0, 0], agents.log.read_text()
    seconds = time.monotonic() - begun
    print(f"\n| nothing | | {seconds:.0f} s in all |")
    return agents.folder, seconds


@pytest.mark.slow  # 20 s each
@pytest.mark.parametrize("fault", ["process", "second node", "first node", "TERM to all"])
def test_processes_and_nodes_that_die_and_return_change_nothing(whole, agents, fault):
    begun = time.monotonic()
    agents.start_and_wait()
    if fault == "process":
        os.kill(agents.trainers(agents.running[1])[0], signal.SIGKILL)
    elif fault == "second node":
        agents.kill(1)
        time.sleep(2)
        agents.start(1)
    elif (
        fault == "first node"
    ):  # where the agents meet: the other one ends, and the job is started anew
        agents.kill(0)
        assert agents.running[1].wait(120) != 0
        agents.start(0, 1)
    else:  # as at a time limit; then the job comes back from the queue
        for agent in agents.running.values():
            agent.send_signal(signal.SIGTERM)
        assert 0 not in agents.wait()
        agents.start(0, 1)
    assert agents.wait() == [0, 0], agents.log.read_text()
    seconds = time.monotonic() - begun - whole[1]
    how = "" if "TERM" in fault else "killed "
    print(f"| {fault} {how}| finished, weights as undisturbed | {seconds:.0f} s more |")
    assert "resumed from" in agents.log.read_text()
    same_result(agents.folder, whole[0])


@pytest.mark.slow  # 20 s each
def test_a_node_that_does_not_come_back_ends_the_job_and_loses_nothing(whole, agents):
    agents.start_and_wait()
    begun = time.monotonic()
    agents.kill(1)
    code = agents.running[0].wait(300)
    assert code
    assert "RendezvousTimeoutError" in agents.log.read_text()
    print(
        f"| a node gone for good | the other agent ends with code {code} | after {time.monotonic() - begun:.0f} s, "
        f"{JOIN_SECONDS} of them join_timeout |"
    )
    assert agents.updates() >= 12
    assert run_folder.read_results(agents.folder) is None
    agents.start(0, 1)
    assert agents.wait() == [0, 0], agents.log.read_text()
    same_result(agents.folder, whole[0])
