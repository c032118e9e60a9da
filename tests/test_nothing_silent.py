"""Failing commands, one per row: one line names the fault, the exit code is not 0, no partly written file remains.

Other faults of this kind are tested elsewhere: deploy in deployment/test_deploy.py, exported files and signals
in deployment/test_files.py, token_conv's start and statistics under checkpointing in models/test_across.py, tangents
and memory of the kernels in ops/test_ops.py, threads in recorder/test_recording.py, unlike shards in
engine/test_processes.py, odd parts of a batch in engine/test_recipes.py, a second TERM in slurm/test_slurm.py.
"""

import json
import signal

import pytest
import torch
from torch.nn.modules.module import register_module_forward_hook

from ea_vision.__main__ import main
from ea_vision.zoo.loaded import load_model

MODEL = "ea_conv_transformer_cifar"


COMMANDS = pytest.mark.parametrize(
    "line",
    [
        f"predict {MODEL} digits#0 --json FILE.json",
        f"explore --model {MODEL} --layers 1 -o FILE.html digits#0",
        f"heatmap --model {MODEL} --layers 1 -o FILE.png digits#0",
        f"strip --model {MODEL} --layers 1-3 --change -o FILE.png digits#0",
        f"statistics --model {MODEL} --layers 1 -o FILE.pdf digits#0",
        "export cnn_cifar --random -o FILE.pt2",
        f"probe --model {MODEL} --layers 1 --limit 12 --epochs 1 --width 8 --controls none -o FILE",
    ],
    ids=lambda line: line.split()[0],
)


@COMMANDS
def test_a_full_disk(line, tmp_path, capsys):
    """Files are limited to 64 bytes, so that writes fail as on a full disk."""
    resource = pytest.importorskip("resource", reason="needs limits of Unix")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, limits[1]))
    try:
        code = main(line.replace("FILE", f"{tmp_path}/out").split())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    captured = capsys.readouterr().err.splitlines()
    [error] = [line for line in captured if line.startswith("error")]
    assert code == 1
    assert error.startswith(f"error: cannot write {tmp_path}")
    assert "File too large" in error
    assert not any(path.is_file() for path in tmp_path.rglob("*"))


@COMMANDS
def test_ctrl_c_while_a_network_runs(line, tmp_path, capsys):
    before = signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a job in the background ignores it
    hook = register_module_forward_hook(lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        code = main(line.replace("FILE", f"{tmp_path}/out").split())
    finally:
        hook.remove()
        signal.signal(signal.SIGINT, before)
    assert code == 130
    *_, last = capsys.readouterr().err.splitlines()
    assert last == "error: interrupted"
    assert not any(path.is_file() for path in tmp_path.rglob("*"))


def test_an_image_without_a_finite_prediction(monkeypatch, capsys):
    broken = load_model(MODEL)
    weight = next(broken.model.head.parameters())
    weight.data.fill_(torch.nan)
    monkeypatch.setattr("ea_vision.predict.load_model", lambda *_, **__: broken)
    assert main(["predict", MODEL, "digits#0", "--json", "-"]) == 1
    captured = capsys.readouterr()
    assert captured.err == f"error: {MODEL} gives no finite number for digits#0\n"
    assert json.loads(captured.out)[0]["classes"] == []
