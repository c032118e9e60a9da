"""A GPU's paths against the reference, whole networks, the trainers, and speed: `make test-gpu`, at most 25 minutes.

torch, timm, numpy, hypothesis and pytest are all that is needed: images are made. Without a GPU the same tests run on a
CPU with tiny networks, as far as a CPU has the path, so that they are known to work; that says nothing about a GPU.
Figures are printed (`-rP`) and, with EA_VISION_GPU_REPORT=FOLDER, kept there.
"""

import os
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
import timm
import torch

import ea_vision  # noqa: F401
from ea_vision.ops import use_implementation
from tests.engine.runner import make_folder
from tests.ops.oracle import check

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
TOLERANCE = 2e-5  # of the norm of outputs and gradients in float32, whose products are of tf32
NETWORKS = (
    {
        "aa_resnet34": 224,
        "ea_aa_resnet50": 224,
        "pa_aa_resnet50": 224,
        "ea_conv_transformer_cifar": 32,
        "ea_vit_tiny_patch16_224": 224,
    }
    if ON_GPU
    else {"ea_conv_transformer_cifar": 32}
)
on_gpu = pytest.mark.skipif(not ON_GPU, reason="needs a GPU")

CASES = {  # tests/ops has more, of smaller maps
    "EA": dict(kind="ea", size=(14, 14), D=20, E=3),
    "EA, gates, prefix, 12 heads": dict(
        kind="ea", size=(1, 197), K=12, D=64, E=64, gates="heads", prefix=1
    ),
    "EA, prefix, 577 tokens": dict(kind="ea", size=(1, 577), K=6, D=64, E=64, prefix=1),
    "AA": dict(kind="aa", size=(14, 14), D=20, E=3, need_logits=False, implementation="sdpa"),
    "windows": dict(
        kind="aa",
        size=(14, 14),
        K=4,
        D=32,
        E=32,
        need_logits=False,
        window=5,
        implementation="flex",
    ),
}


@pytest.mark.parametrize("dtype", DTYPES if ON_GPU else ["float32"])
@pytest.mark.parametrize("name", CASES)
def test_operators_are_the_reference_in_float64(name, dtype):
    """Outputs and every gradient, relative to their norms; on a CPU small maps by its own path.

    Where rounding decides what passes the ReLU (float16, larger cases of float32), its argument is positive on a GPU.
    """
    case = {"implementation": "triton", "K": 8, **CASES[name]}
    if not ON_GPU:
        case |= {"implementation": "cpu", "size": (min(case["size"][0], 3), 5), "K": 3}
    if dtype == "float32":
        case["K"] = min(case["K"], 8)  # more do not fit into shared memory
    rounded = ON_GPU and (dtype == "float16" or dtype == "float32" and name != "EA")
    check(
        **case,
        B=2,
        bias=6.0 if rounded else 0.0,
        device=DEVICE,
        dtype=DTYPES[dtype],
        relative=case["size"][0] > 1 and name != "windows",
        tolerance=TOLERANCE if dtype == "float32" else None,
    )


def made_network(name: str) -> tuple[torch.nn.Module, torch.Tensor]:
    """Return a network in training mode, and images, channels-last."""
    model = (
        timm.create_model(name, **({} if ON_GPU else {"widths": [16, 16, 16, 16]}))
        .to(DEVICE)
        .train()
    )
    images = torch.randn(4, 3, NETWORKS[name], NETWORKS[name], device=DEVICE)
    return model.to(memory_format=torch.channels_last), images.contiguous(
        memory_format=torch.channels_last
    )


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_are_the_reference(name):
    """Whole networks in float32, forward and backward, on the same device."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    model, images = made_network(name)
    results = []
    for how in ("reference", None):
        model.zero_grad()
        torch.manual_seed(1)
        with use_implementation(how) if how else nullcontext():
            y = model(images)
        y.float().square().mean().backward()
        results.append(
            (y.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None])
        )
    (want, want_grads), (have, have_grads) = results
    assert (have - want).norm() <= 1e-3 * want.norm()
    differences = torch.stack([(a - b).norm() for a, b in zip(have_grads, want_grads, strict=True)])
    assert differences.norm() <= 1e-2 * torch.stack([g.norm() for g in want_grads]).norm()


@on_gpu
@pytest.mark.parametrize("name", ["ea_conv_transformer_cifar", "pa_aa_resnet50"])
def test_compiled_in_one_graph(name):
    model, images = made_network(name)
    torch._dynamo.reset()
    with torch.autocast("cuda", torch.bfloat16):
        y = torch.compile(model, fullgraph=True)(images)
    y.float().square().mean().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> Path:
    """Class folders of small images."""
    return make_folder(
        tmp_path_factory.mktemp("images"), *((2048, 256) if ON_GPU else (64, 16)), classes=4
    )


def trainer(data: Path, output: Path, *options: str, processes: int = 0) -> list[str]:
    """Return the command of a training run."""
    start = (
        ["torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), "-m"]
        if processes
        else []
    )
    size = (
        ["--batch-size", "64"]
        if ON_GPU
        else ["--model-kwargs", "widths=[8,8,16,16]", "--batch-size", "8"]
    )
    return [
        sys.executable,
        "-m",
        *start,
        "ea_vision",
        "train-cifar",
        "--dataset",
        "folder",
        "--data-dir",
        str(data),
        "--model",
        "ea_conv_transformer_cifar",
        *size,
        "--device",
        DEVICE.type,
        "--channels-last",
        "--output",
        str(output),
        *options,
    ]


def run(command: list[str]) -> str:
    """Run a command to its good end; return what it printed."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
    return done.stdout


@on_gpu
@pytest.mark.parametrize(
    "options, processes",
    [
        ("--amp bfloat16", 0),
        ("--amp float16", 0),
        ("--amp bfloat16 --compile --model-ema-decay 0.99", 0),
        *(
            ("--amp bfloat16", count)
            for count in sorted({1, min(torch.cuda.device_count(), 8) or 1})
        ),
    ],
)
def test_the_trainer_in_each_precision_and_on_several_gpus(images, tmp_path, options, processes):
    run(trainer(images, tmp_path / "run", "--epochs", "1", *options.split(), processes=processes))
    assert (tmp_path / "run" / "results.json").is_file()


@pytest.mark.slow
def test_a_trainer_that_sigterm_ends_goes_on(images, tmp_path):
    output = tmp_path / "run"
    command = trainer(images, output, "--epochs", "8" if ON_GPU else "4", "--checkpoint-steps", "2")
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    until = time.monotonic() + 120
    while (
        not (output / "last.ckpt").exists() and process.poll() is None and time.monotonic() < until
    ):
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 143, errors[-1500:]
    run(command)
    assert (output / "results.json").is_file()


@on_gpu
def test_speed_and_memory_of_the_50_layer_networks(tmp_path):
    """The table of ratios: training, inference and memory in bfloat16, eager and compiled."""
    folder = Path(os.environ.get("EA_VISION_GPU_REPORT", tmp_path))
    print(
        run(
            [
                sys.executable,
                "-m",
                "ea_vision",
                "benchmark",
                "--amp",
                "bfloat16",
                "--channels-last",
                "--compile-mode",
                "default",
                "reduce-overhead",
                "--repeats",
                "15",
                "--csv",
                str(folder / "benchmark.csv"),
            ]
        )
    )
