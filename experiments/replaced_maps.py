"""Measure how much a trained network's accuracy depends on its attention maps, and its logits on evolution.

    python experiments/replaced_maps.py FOLDER --model NAME|RUN[,..] --dataset folder --data-dir DIR

writes, in 2 minutes per network,

FOLDER/replaced.csv: top-1 in percent on test images, as trained, and with the maps of all layers replaced. With
--holdout N the images are the training images that a run with this option and seed 0 holds out. Nothing is retrained.

* uniform: every query looks at all keys equally.
* mean: the layer's mean map over these images, so that the map does not depend on the image.
* other: the maps of another of these images.
* none: no map at all; the attention branch returns its projection's bias alone.
* own: the layer's own logits, neither mixed with the previous layer's nor convolved (only in networks that evolve).

FOLDER/logits.csv, per layer, means over images and heads: the standard deviation over keys (the part that the softmax
does not cancel) of the layer's own logits and of the logits that enter the softmax, and the correlation of these two
over the map, after each query's mean is subtracted (0 if a map is constant).
"""

import argparse
import csv
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor, nn

import ea_vision
from ea_vision.base.errors import UsageError, exit_code
from ea_vision.data.small_images import hold_out, load_dataset
from ea_vision.layers import AugmentedConv2d
from ea_vision.recorder.selection import positive
from ea_vision.zoo.loaded import LoadedModel, load_model
from ea_vision.zoo.source import parse_targets

BATCH = 100
KINDS = ("trained", "uniform", "mean", "other", "none", "own")


def attention_modules(model: nn.Module) -> list[AugmentedConv2d]:
    """Return a network's augmented convolutions, in forward order."""
    return [module for module in model.modules() if isinstance(module, AugmentedConv2d)]


def mean_maps(model: nn.Module, batches: list[Tensor]) -> list[Tensor]:
    """Return each layer's mean map, (K, N, N)."""
    sums: dict[int, Tensor] = {}
    for batch in batches:
        with ea_vision.record_attention(model) as maps:
            model(batch)
        for number, layer in maps.items():
            sums[number] = sums.get(number, 0) + layer.attn.sum(0)
    images = sum(len(batch) for batch in batches)
    return [total / images for total in sums.values()]


CHANGES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {  # (maps (B, K, N, N), mean map) -> maps
    "uniform": lambda maps, mean: torch.full_like(maps, 1 / maps.shape[-1]),
    "mean": lambda maps, mean: mean.expand_as(maps),
    "other": lambda maps, mean: maps.roll(1, 0),
    "none": lambda maps, mean: torch.zeros_like(maps),
}


def replace_maps(model: nn.Module, kind: str, means: list[Tensor]) -> ExitStack:
    """Replace the maps of all layers (see the top of this file) until the returned ExitStack is closed."""
    hooks = ExitStack()
    for layer, mean in zip(attention_modules(model), means, strict=True):
        if kind in CHANGES:

            def changed(module, args, mean=mean):
                return (CHANGES[kind](args[0], mean),)

            hooks.enter_context(layer.attn_drop.register_forward_pre_hook(changed))
        elif kind == "own" and layer.evolution is not None:
            own_logits = layer.evolution.register_forward_hook(lambda _, args, output: args[0])
            hooks.enter_context(own_logits)
    return hooks


def top1(model: nn.Module, batches: list[Tensor], targets: Tensor) -> float:
    """Return the accuracy in percent."""
    predicted = torch.cat([model(batch).argmax(1) for batch in batches])
    right = predicted == targets
    return 100 * right.double().mean().item()


def replaced(
    network: LoadedModel, batches: list[Tensor], targets: Tensor
) -> list[tuple[str, str, float, int]]:
    """Return the rows of replaced.csv."""
    means = mean_maps(network.model, batches)
    evolves = any(layer.evolution is not None for layer in attention_modules(network.model))
    rows = []
    for kind in KINDS if evolves else KINDS[:-1]:
        with replace_maps(network.model, kind, means):
            accuracy = top1(network.model, batches, targets)
        rows.append((network.label, kind, round(accuracy, 2), len(targets)))
        print(*rows[-1], flush=True)
    return rows


def logits(
    network: LoadedModel, batches: list[Tensor]
) -> list[tuple[str, int, float, float, float]]:
    """Return the rows of logits.csv."""
    sums: dict[int, Tensor] = {}
    for batch in batches:
        with ea_vision.record_attention(network.model, parts=("logits", "self_logits")) as maps:
            network.model(batch)
        for number, layer in maps.items():
            centred_logits = layer.self_logits - layer.self_logits.mean(-1, keepdim=True)
            entering = layer.logits - layer.logits.mean(-1, keepdim=True)
            likeness = nn.functional.cosine_similarity(
                centred_logits.flatten(2), entering.flatten(2), dim=-1
            )
            figures = torch.stack(
                [deviation(centred_logits), deviation(entering), likeness]
            )  # (3, B, K)
            sums[number] = sums.get(number, 0) + figures.mean(-1).sum(-1)
    images = sum(len(batch) for batch in batches)
    rows = []
    for number, total in sums.items():
        means = [round(figure, 3) for figure in (total / images).tolist()]
        rows.append((network.label, number, *means))
    return rows


def deviation(centred: Tensor) -> Tensor:
    """Return the standard deviation of centred logits over keys, averaged over queries: (B, K, N, N) -> (B, K)."""
    return centred.square().mean(-1).sqrt().mean(-1)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="where the tables are written")
    parser.add_argument("--model", required=True, help="names or run folders, separated by commas")
    parser.add_argument(
        "--dataset", default="cifar10", help="see train_cifar.py --help (default: %(default)s)"
    )
    parser.add_argument("--data-dir", default="", help="folder of the data set")
    parser.add_argument(
        "--holdout",
        type=positive,
        default=None,
        help="use the N training images that the runs held out instead of the test images",
    )
    parser.add_argument(
        "--limit",
        type=positive,
        default=2000,
        help="images, drawn by seed 0 (default: %(default)s)",
    )
    options = parser.parse_args(argv)
    options.folder.mkdir(parents=True, exist_ok=True)
    targets = parse_targets(options.model)
    data = load_dataset(options.dataset, options.data_dir)
    test = hold_out(data.train, options.holdout, seed=0)[1] if options.holdout else data.test
    # In random order, because `other` takes the map of the next image, and neighbours in a folder mostly share a class.
    order = torch.randperm(len(test), generator=torch.Generator().manual_seed(0))
    images = test.select(order[: options.limit])
    tables: dict[str, list[tuple]] = {
        "replaced.csv": [("model", "maps", "top1", "images")],
        "logits.csv": [("model", "layer", "std_own", "std_entering", "correlation")],
    }
    with torch.inference_mode():
        for target in targets:
            network = load_model(target)
            if not attention_modules(network.model):
                raise UsageError(
                    f"networks with layers of AugmentedConv2d are required, and {network.label} has none"
                )
            batches = list(network.preparation.normalize(images.images).split(BATCH))
            tables["replaced.csv"] += replaced(network, batches, images.targets)
            tables["logits.csv"] += logits(network, batches)
    for name, rows in tables.items():
        with (options.folder / name).open("w", newline="", encoding="utf-8") as file:
            csv.writer(file, lineterminator="\n").writerows(rows)
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main))
