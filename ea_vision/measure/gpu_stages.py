"""The stages of `ea-vision gpu-check`, each in a process of its own: `python -m ea_vision.measure.gpu_stages STAGE`.

A stage is a function that yields (what, figures) pairs; figures with a "fault" are a failure, and the stage goes on.
On a CPU, for a rehearsal, networks and images are tiny and the Triton kernels run in Triton's interpreter.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from PIL import Image

from ea_vision.base.files import create, write_json
from ea_vision.base.networks import create_classifier, image_statistics
from ea_vision.base.processes import World
from ea_vision.data.augment import Augmentation
from ea_vision.data.on_device import TrainLoader
from ea_vision.data.small_images import Images
from ea_vision.engine.classification import ClassificationTrainer
from ea_vision.engine.config import resolve
from ea_vision.engine.run_folder import RESULTS, read_finished
from ea_vision.engine.signals import StopRequest
from ea_vision.engine.train_cifar import CifarConfig
from ea_vision.measure import kernel_figures
from ea_vision.ops import evolving_attention, triton_attention, use_implementation

Pairs = Iterator[tuple[str, dict[str, Any]]]
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
TOLERANCE = {"float32": 2e-5, "float16": 4e-3, "bfloat16": 8e-2}  # of the norm of outputs and gradients


def attempt(run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the result of `run`, or its error under "fault": one path that breaks does not stop the others."""
    try:
        return run()
    except Exception as error:
        return {"fault": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()[-3000:]}


# ---- operators ------------------------------------------------------------------------------------------------------

CASES: dict[str, dict[str, Any]] = {  # heads, size, width of q and v, then what differs
    "EA": {"shape": (8, (14, 14), 20, 3)},
    "EA, beta 0.6": {"shape": (4, (7, 9), 20, 6), "beta": 0.6},
    "EA, kernel 5": {"shape": (8, (7, 7), 20, 6), "kernel": 5},
    "EA, gates, prefix, 12 heads": {"shape": (12, (1, 197), 64, 64), "gates": True, "prefix": 1, "relative": False},
    "EA, prefix, 577 tokens": {"shape": (6, (1, 577), 64, 64), "prefix": 1, "relative": False},
    "PA": {"shape": (8, (14, 14), 20, 3), "predict": True},
    "PA, gates": {"shape": (4, (8, 8), 64, 64), "predict": True, "gates": True},
    "first": {"shape": (8, (14, 14), 20, 3), "prev": False},
    "AA": {"shape": (8, (14, 14), 20, 3), "prev": False, "need_logits": False},
    "windows": {"shape": (4, (14, 14), 32, 32), "prev": False, "need_logits": False, "window": 5, "relative": False},
    "EA, dropout": {"shape": (4, (8, 8), 64, 64), "dropout_p": 0.2},
}
BY_CASE = {"AA": ("sdpa",), "windows": ("flex",)}


def leaves(case: dict[str, Any], batch: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Random arguments of a case, in float64."""
    K, (H, W), D, E = case["shape"]
    N, kernel = H * W, case.get("kernel", 3)
    made = {"q": (batch, K, N, D), "k": (batch, K, N, D), "v": (batch, K, N, E)}
    if case.get("relative", True):
        made |= {"height_rel": (2 * H - 1, D), "width_rel": (2 * W - 1, D)}
    if case.get("prev", True):
        made |= {"prev_logits": (batch, K, N, N), "weight": (K, K, kernel, kernel), "bias": (K,)}
    if case.get("gates"):
        made |= {"alpha": (K,), "beta": (K,)}
    generator = torch.Generator().manual_seed(0)
    x = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in made.items()}
    for name, factor in (("height_rel", D ** -0.5), ("width_rel", D ** -0.5), ("weight", 0.1), ("bias", 0.1)):
        if name in x:
            x[name] *= factor
    return {name: t.to(device) for name, t in x.items()}


def outputs_and_gradients(case: dict[str, Any], x: dict[str, torch.Tensor], dtype: torch.dtype,
                          implementation: str) -> dict[str, torch.Tensor]:
    """The operator's outputs and the gradients of a weighted sum of them; maps and q, k, v in `dtype`."""
    wide = ("q", "k", "v", "prev_logits")
    small = torch.float64 if dtype == torch.float64 else torch.float32
    x = {name: t.to(dtype if name in wide else small).requires_grad_() for name, t in x.items()}
    options = {name: case[name] for name in ("beta", "predict", "need_logits", "window", "dropout_p") if name in case}
    torch.manual_seed(1)
    out, logits = evolving_attention(
        **x, **options, feat_size=case["shape"][1], num_prefix_tokens=case.get("prefix", 0),
        implementation=implementation)
    generator = torch.Generator().manual_seed(2)
    given = {"out": out} if logits is None else {"out": out, "logits": logits}
    loss = sum((t.double() * torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t.device)).sum()
               for t in given.values())
    grads = torch.autograd.grad(loss, list(x.values()), allow_unused=True)
    return given | {f"d_{name}": grad for name, grad in zip(x, grads, strict=True) if grad is not None}


def compare(case: dict[str, Any], dtype: str, implementation: str, batch: int, device: torch.device) -> dict[str, Any]:
    """The largest relative error of an output or gradient against the reference in float64 on the same device."""
    x = {name: t.to(DTYPES[dtype]).double() if name in ("q", "k", "v", "prev_logits") else t
         for name, t in leaves(case, batch, device).items()}
    have = outputs_and_gradients(case, x, DTYPES[dtype], implementation)
    if case.get("dropout_p"):  # the output is linear in v: with one mask in forward and backward v's gradient says so
        torch.manual_seed(1)
        v = x["v"].to(DTYPES[dtype]).requires_grad_()
        rest = {name: t.to(DTYPES[dtype] if name in ("q", "k", "prev_logits") else torch.float32)
                for name, t in x.items() if name != "v"}
        out, _ = evolving_attention(**rest, v=v, feat_size=case["shape"][1], dropout_p=case["dropout_p"],
                                    implementation=implementation)
        up = torch.randn_like(out)
        forward = (out.double() * up.double()).sum()
        backward = (torch.autograd.grad(out, v, up)[0].double() * v.double()).sum()
        errors = {"mask": ((forward - backward).abs() / (out.double() * up.double()).norm()).item()}
    else:
        want = outputs_and_gradients(case, x, torch.float64, "reference")
        errors = {}
        for name, truth in want.items():
            error = (have[name].double() - truth).norm() / truth.norm().clamp_min(
                max(1e-3, truth.numel() ** 0.5) if name in ("d_alpha", "d_beta") else 1e-3)
            errors[name] = error.item()
    worst = max(errors, key=lambda name: float("inf") if errors[name] != errors[name] else errors[name])
    found = {"worst": worst, "error": errors[worst]}
    if not errors[worst] <= TOLERANCE[dtype]:
        found["fault"] = f"{worst} differs by {errors[worst]:.1e} from the reference, at most {TOLERANCE[dtype]:.0e}"
    return found


def operators(device: torch.device, tiny: bool, folder: Path) -> Pairs:
    """Every implementation of this device against the reference in float64: outputs and gradients, three precisions."""
    for name, case in CASES.items():
        if tiny:
            K, (H, W), D, E = case["shape"]
            case = case | {"shape": (min(K, 3), (min(H, 3), min(W, 5)), min(D, 8), min(E, 6))}
            case = case | ({"window": 3} if "window" in case else {})
        for implementation in BY_CASE.get(name, ("triton",)):
            for dtype in ("float32",) if tiny else DTYPES:
                if device.type == "cpu" and implementation == "flex":
                    continue  # it has no backward pass there
                yield (f"{name}, {implementation}, {dtype}",
                       attempt(lambda: compare(case, dtype, implementation, 1 if tiny else 2, device)))  # noqa: B023


# ---- networks -------------------------------------------------------------------------------------------------------

NETWORKS = {"aa_resnet34": 224, "ea_aa_resnet50": 224, "pa_aa_resnet50": 224, "ea_conv_transformer_cifar": 32,
            "ea_vit_tiny_patch16_224": 224}
TINY_NETWORKS = {"ea_conv_transformer_cifar": 32}
TINY_KWARGS = {"widths": [16, 16, 16, 16]}


def made_network(name: str, size: int, tiny: bool, device: torch.device, batch: int) -> tuple[Any, torch.Tensor]:
    """A network in training mode, and images, channels-last."""
    torch.manual_seed(0)
    model = timm.create_model(name, **(TINY_KWARGS if tiny else {})).to(device).train()
    images = torch.randn(batch, 3, size, size, device=device)
    return model.to(memory_format=torch.channels_last), images.contiguous(memory_format=torch.channels_last)


def networks(device: torch.device, tiny: bool, folder: Path) -> Pairs:
    """Whole networks in float32, forward and backward, against the reference on the same device."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False

    def run(name: str, size: int) -> dict[str, Any]:
        model, images = made_network(name, size, tiny, device, 4)
        results = []
        for how in ("reference", None):
            model.zero_grad()
            torch.manual_seed(1)
            if how is None:
                y = model(images)
            else:
                with use_implementation(how):
                    y = model(images)
            y.float().square().mean().backward()
            results.append((y.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]))
        (want, want_grads), (have, have_grads) = results
        out = ((have - want).norm() / want.norm()).item()
        total = torch.stack([g.norm() for g in want_grads]).norm()
        grads = (torch.stack([(a - b).norm() for a, b in zip(have_grads, want_grads, strict=True)]).norm() / total)
        found = {"output": out, "gradients": grads.item()}
        if not (out <= 1e-3 and grads <= 1e-2):
            found["fault"] = "differs from the reference by more than 1e-3 (output) or 1e-2 (gradients)"
        return found

    for name, size in (TINY_NETWORKS if tiny else NETWORKS).items():
        yield name, attempt(lambda: run(name, size))  # noqa: B023


def compiled(device: torch.device, tiny: bool, folder: Path) -> Pairs:
    """torch.compile in one graph, bfloat16 autocast, forward and backward."""
    def run(name: str, size: int) -> dict[str, Any]:
        model, images = made_network(name, size, tiny, device, 4)
        torch._dynamo.reset()
        began = time.perf_counter()
        one = torch.compile(model, fullgraph=True, backend="aot_eager" if tiny else "inductor")
        with torch.autocast(device.type, torch.bfloat16):
            y = one(images)
        y.float().square().mean().backward()
        finite = all(p.grad.isfinite().all().item() for p in model.parameters() if p.grad is not None)
        found = {"seconds": round(time.perf_counter() - began, 1)}
        return found if finite else found | {"fault": "gradients are not finite"}

    names = TINY_NETWORKS if tiny else {n: NETWORKS[n] for n in ("ea_conv_transformer_cifar", "pa_aa_resnet50")}
    for name, size in names.items():
        yield name, attempt(lambda: run(name, size))  # noqa: B023


# ---- trainers -------------------------------------------------------------------------------------------------------


def make_images(folder: Path, tiny: bool) -> Path:
    """Class folders of small images, made of stripes and noise: train and test."""
    random = np.random.default_rng(0)
    for split, count in (("train", 16 if tiny else 512), ("test", 4 if tiny else 64)):
        for label in range(4):
            create(folder / split / f"class{label}")
            for number in range(count):
                image = random.integers(0, 120, (32, 32, 3), dtype=np.uint8)
                (image[::label + 2] if number % 2 else image[:, ::label + 2])[..., label % 3] += 120
                Image.fromarray(image).save(folder / split / f"class{label}" / f"{number}.png")
    return folder


def trainer(device: torch.device, tiny: bool, data: Path, output: Path, *options: str, processes: int = 0) -> list[str]:
    """The command of a training run on made images."""
    start = [sys.executable, "-m"]
    if processes:
        start += ["torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), "-m"]
    model = ["--model-kwargs", "widths=[16,16,16,16]", "--batch-size", "8"] if tiny else ["--batch-size", "64"]
    return [*start, "ea_vision", "train-cifar", "--dataset", "folder", "--data-dir", str(data), "--model",
            "ea_conv_transformer_cifar", *model, "--device", device.type, "--channels-last", "--output", str(output),
            *options]


def finished(command: list[str], output: Path) -> dict[str, Any]:
    """Run a trainer; its results, or a fault."""
    began = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True)
    found: dict[str, Any] = {"seconds": round(time.perf_counter() - began, 1)}
    if done.returncode:
        return found | {"fault": f"exit code {done.returncode}: {(done.stderr or done.stdout)[-1500:]}"}
    run = read_finished(output)
    if run is None:
        return found | {"fault": f"the run left no {RESULTS}"}
    return found | {"epochs": run.epochs, "train_loss": run.metrics["train_loss"][-1]}


def trainers(device: torch.device, tiny: bool, folder: Path) -> Pairs:
    """The CIFAR trainer: bfloat16, compiled with a moving average, float16."""
    data = make_images(folder / "images", tiny)
    kinds = {"bfloat16": ["--amp", "bfloat16"]}
    if not tiny:
        kinds |= {"compiled, EMA": ["--amp", "bfloat16", "--compile", "--model-ema-decay", "0.99"],
                  "float16": ["--amp", "float16"]}
    for name, options in kinds.items():
        output = folder / name.replace(", ", "-")
        command = trainer(device, tiny, data, output, "--epochs", "1", *options)
        yield name, attempt(lambda: finished(command, output))  # noqa: B023


def updates(device: torch.device, tiny: bool, folder: Path) -> Pairs:
    """Updates of the CIFAR trainer in which torch makes every wait for the GPU an error, the time of one, and one that
    is not finite, which --on-nan skip must leave out: as they are, and compiled to CUDA graphs."""
    def run(**options: Any) -> dict[str, Any]:
        trainer = made_trainer(device, tiny, folder, **options)
        trainer.net.train()
        batches = trainer.train_loader.batches(0)
        faults: list[str] = []

        def make(count: int, under_way: int = trainer.results_after) -> None:
            for _ in range(count):
                trainer._update([next(batches)])
                results = trainer.results.collect(under_way)
                faults.extend(str(fault) for result in results if (fault := trainer.fault_of(result)) is not None)

        make(3, 0)  # the optimiser's tensors are made, the model is compiled
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("error")
        try:
            make(4 if tiny else 12)
        finally:
            if device.type == "cuda":
                torch.cuda.set_sync_debug_mode("default")
        make(1, 0)
        count = 4 if tiny else 40
        began = time.perf_counter()
        make(count - 1)
        make(1, 0)
        found = {"milliseconds": round(1000 * (time.perf_counter() - began) / count, 3)}
        trainer.config.on_nan = "skip"
        before = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
        images, targets, ids = next(batches)
        trainer._update([(images * float("nan"), targets, ids)])
        result, = trainer.results.collect()
        after = trainer.model.state_dict()
        if trainer.fault_of(result) is None or not all(torch.equal(after[name], before[name]) for name in before):
            faults.append(f"an update on images of NaN (loss {result.loss}) was not reported, or changed the network")
        return found | ({"fault": "; ".join(faults)} if faults else {})

    yield "as they are", attempt(run)
    if tiny:
        yield "CUDA graphs", {"not run": "needs a GPU"}
        return
    yield "CUDA graphs", attempt(lambda: run(compile=True, compile_mode="reduce-overhead"))


def made_trainer(device: torch.device, tiny: bool, folder: Path, **options: Any) -> ClassificationTrainer:
    """A trainer of a CIFAR network on made images in the memory of the device; bfloat16, channels-last, EMA."""
    batch, count = (4, 80) if tiny else (64, 64 * 64)
    kwargs = {"widths": [16, 16, 16, 16]} if tiny else {}
    given = {"recipe": "none", "model": "ea_conv_transformer_cifar", "model_kwargs": kwargs, "batch_size": batch,
             "amp": "bfloat16", "channels_last": True, "model_ema_decay": 0.99, "clip_grad": 1.0, "lr": 0.01,
             "warmup_epochs": 0,
             **options}
    config, _ = resolve(CifarConfig, given)
    model, _ = create_classifier(config.model, kwargs, num_classes=10, img_size=32)
    mean, std = image_statistics(model)
    images = torch.randint(256, (count, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    split = Images(images, torch.arange(count) % 10, [str(number) for number in range(count)])
    loader = TrainLoader(split, batch_size=batch, augmentation=Augmentation(cutout=8), seed=0, mean=mean, std=std,
                         device=device)
    return ClassificationTrainer(config, model.to(device), loader, loader, num_classes=10, world=World(0, 1, device),
                                 folder=folder,
                   stop=StopRequest(), data_fingerprint="", describe=str)


def ranks(device: torch.device, tiny: bool, folder: Path) -> Pairs:
    """The trainer under torchrun (DDP) with one process, and with one a GPU, at most 8, where there are more."""
    data = make_images(folder / "images", tiny)
    most = 2 if device.type == "cpu" else min(torch.cuda.device_count(), 8)
    for processes in sorted({1, most}):
        output = folder / f"ranks{processes}"
        command = trainer(device, tiny, data, output, "--epochs", "1", "--amp", "bfloat16", processes=processes)
        yield f"{processes} process(es)", attempt(lambda: finished(command, output))  # noqa: B023
    if device.type == "cuda" and most == 1:
        yield "several GPUs", {"not run": "one GPU"}


def resumed(device: torch.device, tiny: bool, folder: Path) -> Pairs:
    """A trainer that SIGTERM ends after its first checkpoint, and the same command again."""
    data = make_images(folder / "images", tiny)
    output = folder / "resumed"
    command = trainer(device, tiny, data, output, "--epochs", "4" if tiny else "8", "--checkpoint-steps", "2")

    def killed() -> dict[str, Any]:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        until = time.monotonic() + 120
        while not (output / "last.ckpt").exists() and process.poll() is None and time.monotonic() < until:
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
        found = {"exit code": process.returncode}
        return found if process.returncode == 143 else found | {"fault": f"143 expected: {errors[-1500:]}"}

    yield "SIGTERM", attempt(killed)
    yield "the same command again", attempt(lambda: finished(command, output))


# ---- speed and memory -----------------------------------------------------------------------------------------------

RATIOS = {"50": ("resnet50", "aa_resnet50", "pa_aa_resnet50", "ea_aa_resnet50")}
BRIEFLY = ("--batch-size", "2", "--repeats", "1", "--threads", "1", "--no-memory", "--system-malloc")  # a rehearsal


def _benchmark(groups: dict[str, tuple[str, ...]], options: list[str], folder: Path) -> Pairs:
    """`ea-vision benchmark` for each group, its table in the report: speed, memory, ratios to timm's ResNet."""
    def run(group: str, models: tuple[str, ...]) -> dict[str, Any]:
        table = folder / f"ratios-{group}.csv"
        done = subprocess.run(
            [sys.executable, "-m", "ea_vision", "benchmark", "--models", *models, *options, "--csv", str(table)],
            capture_output=True, text=True)
        if done.returncode:
            return {"fault": f"exit code {done.returncode}: {(done.stderr or done.stdout)[-1500:]}"}
        return {"csv": table.read_text().splitlines()}

    for group, models in groups.items():
        yield group, attempt(lambda: run(group, models))  # noqa: B023


def ratios(device: torch.device, tiny: bool, folder: Path) -> Pairs:
    """Training and inference speed, memory: 50-layer networks, bfloat16, channels-last, compiled, as ratios."""
    options = ["--amp", "bfloat16", "--channels-last", "--device", device.type]
    if tiny:
        tiny_network = {"tiny": ("ea_conv_transformer_cifar",)}
        yield from _benchmark(tiny_network, [*options, "--img-size", "32", *BRIEFLY], folder)
    else:
        yield from _benchmark(RATIOS, [*options, "--batch-size", "256", "--repeats", "15", "--compile"], folder)


def tiles(device: torch.device, tiny: bool, folder: Path) -> Pairs:
    """Tiles, warps, stages and register limits of each kernel at the networks' shapes, by triton.autotune."""
    if device.type == "cpu" and not triton_attention.INTERPRETING:
        yield "tiles", {"not run": "needs a GPU, or Triton's interpreter (TRITON_INTERPRET=1)"}
        return
    layers = {"tiny": kernel_figures.Layer(2, (2, 3), 4, 2)} if tiny else {
        name: kernel_figures.LAYERS[name] for name in ("ea50", "pa-cifar", "ea50-7", "first", "ea-vit-base")}
    for name, layer in layers.items():
        big = layer.heads * (layer.size[0] * layer.size[1]) ** 2
        batch = 1 if tiny else max(1, min(256, 80_000_000 // big))
        launches = kernel_figures.launches_of(layer, torch.float32 if tiny else torch.bfloat16, device=device,
                                              batch=batch)
        for number, launch in enumerate(launches):
            yield (f"{name}, {number}: {kernel_figures.label_of(launch)}",
                   attempt(lambda: timed_tiles(launch)))  # noqa: B023


def timed_tiles(launch: triton_attention.Launch) -> dict[str, Any]:
    """Return milliseconds by tile and the fastest, which Triton keeps."""
    if "J" not in launch.constants:
        return {"not run": "nothing to choose"}
    tuner = launch.run_tuned()
    timings = getattr(tuner, "configs_timings", {})
    found = {"milliseconds": {str(config): ms[0] for config, ms in timings.items()}, "best": str(tuner.best_config)}
    return found if any(ms[0] < float("inf") for ms in timings.values()) else found | {"fault": "no tile runs"}


STAGES: dict[str, tuple[Callable[[torch.device, bool, Path], Pairs], int]] = {  # with seconds that it may take
    "operators": (operators, 150), "networks": (networks, 90), "compiled": (compiled, 120),
    "updates": (updates, 75), "trainers": (trainers, 120), "ranks": (ranks, 90), "resumed": (resumed, 90),
    "ratios": (ratios, 330), "tiles": (tiles, 120),
}
INTERPRETED = ("operators", "tiles")  # on a CPU


def main(argv: list[str] | None = None) -> int:
    """Run one stage; write what it has found so far into --result after each finding."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("stage", choices=STAGES)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--folder", type=Path, required=True, help="for what the stage leaves")
    parser.add_argument("--result", type=Path, required=True, help="JSON file")
    args = parser.parse_args(argv)
    found: dict[str, Any] = {}
    create(args.folder)
    if args.device == "cpu":
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    for what, figures in STAGES[args.stage][0](torch.device(args.device), args.device == "cpu", args.folder):
        found[what] = figures
        write_json(args.result, found)
        print(what, {k: v for k, v in figures.items() if k not in ("csv", "table", "traceback")}, flush=True)
    return 1 if any("fault" in figures for figures in found.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
