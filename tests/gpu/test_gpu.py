"""A GPU's paths against the reference, whole networks, the trainers, and speed: `make test-gpu`, at most 25 minutes.

They need only this package, hypothesis and pytest: images are generated. Without a GPU the same tests run on a CPU with
tiny networks, if a CPU has the code path, which checks the tests but says nothing about a GPU. Figures are printed
(`-rP`) and, with EA_VISION_GPU_REPORT=FOLDER, kept there.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import timm
import torch

import ea_vision  # noqa: F401
from ea_vision.ops import use_implementation
from tests.data.photos import make_folder
from tests.ops.oracle import check
from tests.process import python

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
TOLERANCE = 2e-5  # of the norm of outputs and gradients in float32, whose products are of tf32
NETWORKS = {"ea_conv_transformer_cifar": 32}  # with the side of images
if ON_GPU:
    large = ("aa_resnet34", "ea_aa_resnet50", "pa_aa_resnet50", "ea_vit_tiny_patch16_224")
    NETWORKS |= dict.fromkeys(large, 224)
on_gpu = pytest.mark.skipif(not ON_GPU, reason="needs a GPU")

CASES = {  # tests/ops has more, of smaller maps
    "EA": dict(kind="ea", size=(14, 14), D=20, E=3),
    "EA, gates, prefix, 12 heads": dict(
        kind="ea", size=(1, 197), K=12, D=64, E=64, gates="heads", prefix=1
    ),
    "EA, prefix, 577 tokens": dict(kind="ea", size=(1, 577), K=6, D=64, E=64, prefix=1),
    "AA": dict(kind="aa", size=(14, 14), D=20, E=3, need_logits=False, implementation="sdpa"),
}


@pytest.mark.parametrize("dtype", DTYPES if ON_GPU else ["float32"])
@pytest.mark.parametrize("name", CASES)
def test_operators_are_the_reference_in_float64(name, dtype):
    """Compare outputs and every gradient, relative to their norms; on a CPU small maps with the CPU's own path.

    Where rounding would decide the ReLU's sign (float16, larger cases of float32), its argument is positive on a GPU.
    """
    case = {"implementation": "triton", "K": 8, **CASES[name]}
    if not ON_GPU:
        rows = min(case["size"][0], 3)
        case |= {"implementation": "cpu", "size": (rows, 5), "K": 3}
    if dtype == "float32":
        case["K"] = min(case["K"], 8)  # more do not fit into shared memory
    rounded = ON_GPU and (dtype == "float16" or dtype == "float32" and name != "EA")
    check(
        **case,
        B=2,
        bias=6.0 if rounded else 0.0,
        device=DEVICE,
        dtype=DTYPES[dtype],
        relative=case["size"][0] > 1,
        tolerance=TOLERANCE if dtype == "float32" else None,
    )


def made_network(name):
    """Return a network in training mode, and images, channels-last."""
    options = {} if ON_GPU else {"widths": [16, 16, 16, 16]}
    model = timm.create_model(name, **options).to(DEVICE).train()
    images = torch.randn(4, 3, NETWORKS[name], NETWORKS[name], device=DEVICE)
    layout = {"memory_format": torch.channels_last}
    return model.to(**layout), images.contiguous(**layout)


def gradients(y, model):
    """Return the gradients of the mean square of the outputs, in one vector."""
    loss = y.float().square().mean()
    parts = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    return torch.cat([part.flatten() for part in parts if part is not None])


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_are_the_reference(name):
    """Whole networks in float32, forward and backward, on the same device."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    model, images = made_network(name)
    with use_implementation("reference"):
        expected = model(images)
    expected_gradients = gradients(expected, model)
    y = model(images)
    difference = gradients(y, model) - expected_gradients
    assert (y - expected).norm() <= 1e-3 * expected.norm()
    assert difference.norm() <= 1e-2 * expected_gradients.norm()


@on_gpu
@pytest.mark.parametrize("name", ["ea_conv_transformer_cifar", "pa_aa_resnet50"])
def test_compiled_in_one_graph(name):
    model, images = made_network(name)
    torch._dynamo.reset()
    with torch.autocast("cuda", torch.bfloat16):
        y = torch.compile(model, fullgraph=True)(images)
    assert gradients(y, model).isfinite().all()


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """Class folders of small images."""
    train, val = (2048, 256) if ON_GPU else (64, 16)
    return make_folder(tmp_path_factory.mktemp("images"), train, val, classes=4)


def trainer(data, output, options, processes=0):
    """Return Python's words for a training run."""
    start = []
    if processes:
        start = f"-m torch.distributed.run --standalone --nproc-per-node {processes}".split()
    size = "--batch-size 64"
    if not ON_GPU:
        size = "--batch-size 8 --model-kwargs widths=[8,8,16,16]"
    fixed = f"--dataset folder --model ea_conv_transformer_cifar --channels-last {size} {options}"
    places = ["--data-dir", data, "--output", output, "--device", DEVICE.type]
    return [*start, *"-m ea_vision train-cifar".split(), *fixed.split(), *places]


def run(words):
    """Run Python, which must succeed; return its output."""
    done = python(*words)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


ALL_GPUS = max(1, min(torch.cuda.device_count(), 8))


@on_gpu
@pytest.mark.parametrize(
    "options, processes",
    [
        ("--amp bfloat16", 0),
        ("--amp float16", 0),
        ("--amp bfloat16 --compile --model-ema-decay 0.99", 0),
        ("--amp bfloat16", 1),
        ("--amp bfloat16", ALL_GPUS),
    ],
)
def test_the_trainer_in_each_precision_and_on_several_gpus(images, tmp_path, options, processes):
    output = tmp_path / "run"
    run(trainer(images, output, f"--epochs 1 {options}", processes))
    assert (output / "results.json").is_file()


@pytest.mark.slow
def test_a_trainer_that_sigterm_ends_goes_on(images, tmp_path):
    output = tmp_path / "run"
    epochs = 8 if ON_GPU else 4
    command = trainer(images, output, f"--epochs {epochs} --checkpoint-steps 2")
    pipes = dict(stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    process = subprocess.Popen([sys.executable, *command], **pipes)
    until = time.monotonic() + 120
    while not (output / "last.ckpt").exists():
        if process.poll() is not None or time.monotonic() > until:
            break
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
    options = "--amp bfloat16 --channels-last --compile-mode default reduce-overhead --repeats 15"
    words = f"-m experiments.benchmark {options}".split()
    print(run([*words, "--csv", folder / "benchmark.csv"]))
