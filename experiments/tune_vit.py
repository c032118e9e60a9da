r"""A small vision transformer, trained plain, then tuned with maps that evolve and without.

    python experiments/tune_vit.py experiments/results/tune-vit.csv --cifar10 DIR
    python experiments/tune_vit.py experiments/results/tune-vit-short.csv --cifar10 DIR --epochs 1 --lr 1e-3 \
        --runs runs/short

DIR has train.tar; the first takes 15 minutes on a core.

vit_tiny_patch16_224 with patches of 4, width 64, 4 blocks, 4 heads, images of 24 pixels: 37 tokens. Of CIFAR-10's
training images the first 800 of each class are trained on and the next 400 judge; the test images stay untouched. One
plain network, 16 epochs, is tuned for 4 epochs of 60 updates on the first 300 of each class, judged by 200 of those
400, in four ways, three seeds each, by the trainer's commands:

    plain           as it is
    learn           evolving; alpha and beta learn from 0 on, at 30 times the rate
    ramp 0.5 1.0    evolving; alpha and beta raised from 0 over the first half of the updates to the EA paper's values
    fixed 0.5 1.0   evolving with these values, and untrained convolutions, from the first update on

A run folder that is complete already is not trained again.
"""
import argparse
import tarfile
from pathlib import Path

from ea_vision.base.files import atomic_write, csv_text
from ea_vision.base.networks import create_classifier
from ea_vision.base.processes import join_world
from ea_vision.engine import run_folder, train_cifar
from ea_vision.engine.config import resolve
from ea_vision.engine.evaluate import evaluate
from ea_vision.engine.gates import by_share
from ea_vision.engine.run import seed_everything

TRAINED, JUDGED, TUNED, TUNED_JUDGED, SEEDS = 800, 400, 300, 200, 3  # images of a class
VIT = {"patch_size": 4, "embed_dim": 64, "depth": 4, "num_heads": 4}
SETTINGS = {
    "plain": [],
    "learn": ["--gate-lr", "30"],
    "ramp 0.5 1.0": ["--gate-ramp", "alpha=0.5", "beta=1.0"],
    "fixed 0.5 1.0": ["--model-kwargs", "alpha=0.5", "beta=1.0"],
}


def pick(source: Path, folder: Path, train: slice, test: slice) -> None:
    """Write folder/train.tar and folder/test.tar, parts of each class of the training images in the tar `source`."""
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(source) as tar:
        by_class: dict[str, list[tarfile.TarInfo]] = {}
        for member in sorted((m for m in tar if m.isfile()), key=lambda m: m.name):
            by_class.setdefault(Path(member.name).parent.name, []).append(member)
        for split, part in (("train", train), ("test", test)):
            with tarfile.open(folder / f"{split}.tar", "w") as out:
                for members in by_class.values():
                    for member in members[part]:
                        out.addfile(member, tar.extractfile(member))


def arguments(data: Path, output: Path, model: str, *more: str) -> list[str]:
    """A run of the trainer, AdamW with a cosine."""
    kwargs = [f"{key}={value}" for key, value in VIT.items()]
    return ["--recipe", "none", "--dataset", "folder", "--data-dir", str(data), "--cache-dir", str(data),
            "--img-size", "24", "--crop-padding", "3", "--cutout", "0", "--model", model, "--model-kwargs", *kwargs,
            "--opt", "adamw", "--weight-decay", "0.05", "--sched", "cosine",
            "--warmup-epochs", "10%", "--device", "cpu", "--output", str(output), *more]


def start_of(model: str, weights: Path, data: Path, seed: int, options: list[str]) -> tuple[float, float]:
    """Top-1 in percent and loss on the images to judge by, of the network as its tuning begins."""
    given = {"recipe": "none", "dataset": "folder", "data_dir": str(data), "cache_dir": str(data), "img_size": 24,
             "model": model, "model_kwargs": dict(VIT), "device": "cpu"}
    if "--model-kwargs" in options:
        given["model_kwargs"] |= {key: float(value) for key, value in (word.split("=") for word in options[1:])}
    config, _ = resolve(train_cifar.CifarConfig, given)
    with join_world("cpu") as world:
        images = train_cifar.SmallImages(config, world, training=False)
        seed_everything(seed)
        net, _ = create_classifier(model, config.model_kwargs, num_classes=10, img_size=24, weights=str(weights))
        result = evaluate(net, images.eval_loader(**images.loader_keywords(net)), 10, world)
    return result.top1, result.loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("csv", type=Path, help="the table to write")
    parser.add_argument("--cifar10", type=Path, required=True, help="folder with train.tar of class/name.png")
    parser.add_argument("--runs", type=Path, default=Path("runs/tune-vit"), help="where images and run folders go")
    parser.add_argument("--epochs", type=int, default=4, help="of tuning (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=5e-4, help="of tuning, at its peak (default: %(default)s)")
    given = parser.parse_args()
    data, few, plain = given.runs / "data", given.runs / "few", given.runs / "plain-start"
    for folder, trained, judged in ((data, TRAINED, JUDGED), (few, TUNED, TUNED_JUDGED)):
        if not (folder / "test.tar").exists():
            pick(given.cifar10 / "train.tar", folder, slice(0, trained), slice(TRAINED, TRAINED + judged))
    train_cifar.main(arguments(data, plain, "vit_tiny_patch16_224", "--epochs", "16", "--lr", "1e-3", "--batch-size",
                               "100"))
    weights = plain / run_folder.WEIGHTS
    rows = []
    for seed in range(SEEDS):
        for setting, options in SETTINGS.items():
            model = "vit_tiny_patch16_224" if setting == "plain" else "ea_vit_tiny_patch16_224"
            folder = given.runs / f"{setting.replace(' ', '-')}-{seed}"
            train_cifar.main(arguments(
                few, folder, model, "--epochs", str(given.epochs), "--batch-size", "50", "--lr", str(given.lr),
                "--layer-decay", "0.9", "--pretrained-path", str(weights), "--seed", str(seed), *options))
            top1, loss = start_of(model, weights, few, seed, options)
            metrics = run_folder.read_metrics(folder)
            gates = by_share({name: values[-1] for name, values in run_folder.read_gates(folder).items()})
            rows.append({
                "setting": setting, "seed": seed, "top1_before": round(top1, 2), "loss_before": round(loss, 4),
                "top1": metrics["top1"][-1], "train_loss": metrics["train_loss"][-1],
                "alpha": " to ".join(f"{f(gates['alpha']):.3f}" for f in (min, max)) if gates else "",
                "beta": " to ".join(f"{f(gates['beta']):.3f}" for f in (min, max)) if gates else "",
                "seconds": round(sum(metrics["seconds"]))})
            print(rows[-1], flush=True)
            atomic_write(given.csv, csv_text(rows).encode())


if __name__ == "__main__":
    main()
