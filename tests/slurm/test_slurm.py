"""slurm/*.sbatch with fake SLURM commands: success, failure, TERM and requeue, resume, arrays."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from ea_vision.__main__ import main
from ea_vision.engine import checkpoint, run_folder, train_cifar, train_imagenet
from ea_vision.engine.train import Trainer
from experiments import evidence
from tests.data.photos import make_folder
from tests.engine.runner import (
    SignalAfterUpdate,
    arguments,
    around,
    error_of,
    run_world,
    saved,
    train,
    words,
)
from tests.process import ROOT
from tests.slow import unix_only

unix_only()

SECONDS = 240  # that a job may take on a busy machine
COMMANDS = {
    "srun": 'echo $$ > "$PLACE/step"; echo "$@" >> "$PLACE/srun"; echo "$SRUN_CPUS_PER_TASK" >> "$PLACE/cpus"; '
    'exec "$@"',
    "scancel": 'echo "$@" >> "$PLACE/scancel"; kill -TERM "$(cat "$PLACE/step")"; sleep 0.2; '
    'kill -TERM "$(cat "$PLACE/step")" 2>/dev/null || true',
    "scontrol": 'case "$1" in show) printf "node1\\nnode2\\n";; requeue) echo "$2" >> "$PLACE/requeue";; esac',
    "torchrun": 'trap "echo saved >> $PLACE/trainer; exit 143" TERM\n'  # a training: TRAINER says how it goes
    'case "$TRAINER" in hang) touch "$PLACE/began"; while :; do sleep 0.05; done;; esac; exit "$TRAINER"',
    "ea-vision": "exit 0",  # of --check-options
}
REAL = f'#!/bin/bash\nexec {sys.executable} -m ea_vision "$@"\n'


@pytest.fixture
def cluster(tmp_path):
    """A folder whose bin/ has fake commands, which write their arguments into files of the folder."""
    for name, body in COMMANDS.items():
        file = tmp_path / "bin" / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"#!/bin/bash\n{body}\n")
        file.chmod(0o755)
    return tmp_path


def sbatch(cluster, script, *arguments, until=None, **more):
    """Run a batch script as SLURM does; return its exit code and output.

    until: TERM is sent to the script once this file exists.
    """
    env = {
        **os.environ,
        "PATH": f"{cluster / 'bin'}:{os.environ['PATH']}",
        "PLACE": str(cluster),
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "SLURM_JOB_ID": "7",
        "SLURM_NNODES": "2",
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_GPUS_ON_NODE": "4",
        "SLURM_CPUS_PER_TASK": "48",
        **more,
    }
    job = subprocess.Popen(
        ["bash", ROOT / "slurm" / script, *map(str, arguments)],
        env=env,
        cwd=cluster,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if until is not None:
        deadline = time.monotonic() + SECONDS
        while not until.exists() and job.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        job.send_signal(signal.SIGTERM)
    out, _ = job.communicate(timeout=SECONDS)
    return job.returncode, out


def noted(cluster, name):
    file = cluster / name
    return file.read_text().splitlines() if file.exists() else []


@pytest.mark.parametrize("code", [0, 77])
def test_the_job_ends_as_the_training_does(cluster, code):
    assert sbatch(cluster, "imagenet.sbatch", "--data-dir", "a b", TRAINER=str(code))[0] == code
    [line] = noted(cluster, "srun")
    assert line.startswith("torchrun --nnodes 2 --nproc-per-node 4 ")
    assert "--rdzv-id 7-0 " in line
    assert "--rdzv-endpoint node1:29400" in line
    assert line.endswith("-m ea_vision train-imagenet --data-dir a b")
    assert noted(cluster, "cpus") == ["48"], "srun is told of the job's CPUs"
    assert not noted(cluster, "requeue")
    assert not noted(cluster, "scancel")


def test_at_the_time_limit_trainers_are_told_and_the_job_is_put_back(cluster):
    code, _ = sbatch(cluster, "imagenet.sbatch", until=cluster / "began", TRAINER="hang")
    assert code == 143
    assert noted(cluster, "trainer") == ["saved"]
    assert noted(cluster, "scancel") == ["--signal=TERM 7.0"]
    assert noted(cluster, "requeue") == ["7"]
    assert sbatch(cluster, "imagenet.sbatch", SLURM_RESTART_COUNT="1", TRAINER="0")[0] == 0
    assert "--rdzv-id 7-1 " in noted(cluster, "srun")[1]
    assert noted(cluster, "requeue") == ["7"]


def test_a_training_that_completes_after_the_signal_is_not_put_back(cluster):
    (cluster / "bin" / "torchrun").write_text(
        '#!/bin/bash\ntrap "exit 0" TERM\ntouch "$PLACE/began"\nwhile :; do sleep 0.05; done\n'
    )
    assert sbatch(cluster, "imagenet.sbatch", until=cluster / "began")[0] == 0
    assert noted(cluster, "scancel")
    assert not noted(cluster, "requeue")


@pytest.mark.parametrize("script", ["imagenet.sbatch", "seeds.sbatch"])
def test_without_sbatch_one_line_says_how_to_start_it(script, cluster):
    env = {key: value for key, value in os.environ.items() if not key.startswith("SLURM")}
    done = subprocess.run(
        ["bash", ROOT / "slurm" / script], env=env, capture_output=True, text=True
    )
    assert done.returncode != 0
    assert "is run by sbatch" in done.stderr
    assert done.stderr.count("\n") == 1
    lines = (ROOT / "slurm" / script).read_text().splitlines()
    directives = " ".join(line for line in lines if line.startswith("#SBATCH"))
    assert "--signal=B:TERM@120 --requeue --open-mode=append" in directives


@pytest.mark.parametrize(
    "script, before", [("imagenet.sbatch", ()), ("seeds.sbatch", ("sweep", "0", "a=", "--"))]
)
def test_a_typo_is_told_once_before_the_training_starts(cluster, capsys, script, before):
    """The script calls ea-vision with --check-options: the fake command fails, and the real one prints the message."""
    (cluster / "bin" / "ea-vision").write_text('#!/bin/bash\necho "$@" > "$PLACE/asked"; exit 2\n')
    assert (
        sbatch(cluster, script, *before, "--epoch", "3", TRAINER="0", SLURM_ARRAY_TASK_ID="0")[0]
        == 2
    )
    [asked] = noted(cluster, "asked")
    command, *argv = asked.split()
    error = error_of(
        {"train-imagenet": train_imagenet, "train-cifar": train_cifar}[command].main, argv, capsys
    )
    assert error.startswith("unknown argument '--epoch'; did you mean --epochs")
    assert "--check-options" in argv
    assert not noted(cluster, "srun")


@pytest.mark.parametrize(
    "command, line, message",
    [
        ("train-imagenet", "--train-beton /no.beton", "there is no file /no.beton"),
        ("train-detection", "", "no images: --data-dir is required"),
        (
            "train-cifar",
            "--dataset cifar10 --data-dir /nowhere",
            "--data-dir /nowhere does not exist",
        ),
    ],
)
def test_a_wrong_place_or_name_is_told_before_the_training_starts(capsys, command, line, message):
    argv = [command, "--check-options", *line.split()]
    assert message in error_of(main, argv, capsys)


def term_twice():
    """Send this process TERM in update 8 and again while it saves, as scancel and torchrun do, 0.2 seconds apart."""

    def slow(save, trainer, *given, **more):
        if trainer.stop.signal:
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
            time.sleep(0.5)
        save(trainer, *given, **more)

    SignalAfterUpdate(signal.SIGTERM, 8)()
    around(Trainer, "save", slow)


def test_a_second_term_does_not_keep_trainers_from_saving(cluster):
    data, folder = make_folder(cluster / "data"), cluster / "run"
    train(arguments(data, folder, "--batch-size 4"), term_twice, size=2, code=143)
    assert saved(folder)["progress"]["updates"] == 8


VARIANTS = (
    "none=--model conv_transformer_cifar --model-kwargs 'widths=[8, 8, 16, 16]'",
    "EA=--model ea_conv_transformer_cifar --model-kwargs 'widths=[8, 8, 16, 16]'",
)


@pytest.mark.slow
def test_an_array_trains_what_evidence_reads_and_continues_after_its_limit(cluster, capsys):
    """Two variants and two seeds; the first task gets TERM in its first epoch and runs again.

    After that a fake ea-vision writes down the command, and a process that has torch loaded runs it.
    """
    make_folder(cluster / "data", train=24, test=6, side=8)
    command = cluster / "bin" / "ea-vision"

    def array(task, **more):
        return sbatch(
            cluster,
            "seeds.sbatch",
            cluster / "sweep",
            "0,1",
            *VARIANTS,
            "--",
            *words(
                f"--dataset folder --data-dir {cluster / 'data'} --recipe none --epochs 2 --batch-size 8 --img-size 8",
                "--workers 0 --device cpu --holdout 6 --checkpoint-steps 1",
            ),
            SLURM_ARRAY_TASK_ID=str(task),
            **more,
        )

    command.write_text(
        f'#!/bin/bash\n[ "$2" = --check-options ] && exit\n{REAL.partition(chr(10))[2]}'
    )
    first = cluster / "sweep" / "variant=none,seed=0"
    code, out = array(0, until=first / checkpoint.LAST)
    assert code == 143, out
    assert noted(cluster, "requeue") == ["7"], out
    assert run_folder.read_results(first) is None
    command.write_text('#!/bin/bash\nprintf \'%s\\0\' "$@" > "$PLACE/words"\n')
    for task in range(4):
        code, out = array(task, SLURM_RESTART_COUNT="1")
        assert code == 0, out
        argv = (cluster / "words").read_text().split("\0")[:-1]
        assert run_world(1, argv, cluster / "log", main=main) == [0], (cluster / "log").read_text()
    assert "2 variants x 2 seeds: --array=0-3 trains all; this is task 3" in out
    assert evidence.main([str(cluster / "sweep"), "--question", "EA,none"]) == 0
    printed = capsys.readouterr().out
    assert "EA" in printed
    assert "none" in printed
    assert set(noted(cluster, "cpus")) == {"48"}
    code, out = array(4)
    assert code == 2
    assert "error: there is no run for task 4" in out
