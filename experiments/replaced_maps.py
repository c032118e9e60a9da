"""What a trained network's accuracy owes to its attention maps, and its logits to evolution.

    python experiments/replaced_maps.py FOLDER --model NAME|RUN[,..] --dataset folder --data-dir DIR

writes, in 2 minutes a network,

FOLDER/replaced.csv: top-1 in percent of test images (with --holdout N of training images, those that a run with that
option and seed 0 left out), as trained, and with the maps of all layers replaced. Nothing is trained again.

* uniform: every query looks at all keys alike.
* mean: the layer's mean map over these images, so nothing of the image itself.
* other: the maps of another of these images.
* none: no map at all; the attention branch gives its projection's bias alone.
* own: the evolving layers' own logits, neither mixed with the previous layer's nor convolved (of networks that evolve).

FOLDER/logits.csv, by layer, means over the images and heads: the standard deviation over keys (which is what the
softmax sees) of the layer's own logits and of those that enter the softmax, and the correlation of the two over the
map, after each query's mean is taken off (0 where a map is constant).
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
from ea_vision.recorder.loading import LoadedModel, load_model, parse_targets, positive

BATCH = 100
KINDS = ("trained", "uniform", "mean", "other", "none", "own")


def attention_modules(model: nn.Module) -> list[AugmentedConv2d]:
    """In forward order."""
    return [module for module in model.modules() if isinstance(module, AugmentedConv2d)]


def mean_maps(model: nn.Module, batches: list[Tensor]) -> list[Tensor]:
    """Of each layer, (K, N, N)."""
    sums: list[Tensor] = []
    for batch in batches:
        with ea_vision.record_attention(model) as maps:
            model(batch)
        parts = [layer.attn.sum(0) for layer in maps.values()]
        sums = [total + part for total, part in zip(sums, parts, strict=True)] if sums else parts
    return [total / sum(map(len, batches)) for total in sums]


def replace_maps(model: nn.Module, kind: str, means: list[Tensor]) -> ExitStack:
    """Replace the maps (B, K, N, N) of all layers, as the module's page says, until the result is closed."""
    changes: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "uniform": lambda maps, mean: torch.full_like(maps, 1 / maps.shape[-1]),
        "mean": lambda maps, mean: mean.expand_as(maps),
        "other": lambda maps, mean: maps.roll(1, 0),
        "none": lambda maps, mean: torch.zeros_like(maps),
    }
    hooks = ExitStack()
    for layer, mean in zip(attention_modules(model), means, strict=True):
        if kind in changes:
            hooks.enter_context(
                layer.attn_drop.register_forward_pre_hook(
                    lambda _, args, mean=mean: (changes[kind](args[0], mean),)
                )
            )
        elif kind == "own" and layer.evolution is not None:
            hooks.enter_context(
                layer.evolution.register_forward_hook(lambda _, args, output: args[0])
            )
    return hooks


def top1(model: nn.Module, batches: list[Tensor], targets: Tensor) -> float:
    """In percent."""
    predicted = torch.cat([model(batch).argmax(1) for batch in batches])
    return 100 * (predicted == targets).double().mean().item()


def replaced(
    network: LoadedModel, batches: list[Tensor], targets: Tensor
) -> list[tuple[str, str, float, int]]:
    """Rows of replaced.csv."""
    means = mean_maps(network.model, batches)
    evolves = any(layer.evolution is not None for layer in attention_modules(network.model))
    rows = []
    for kind in KINDS if evolves else KINDS[:-1]:
        with replace_maps(network.model, kind, means):
            rows.append(
                (network.label, kind, round(top1(network.model, batches, targets), 2), len(targets))
            )
        print(*rows[-1], flush=True)
    return rows


def logits(
    network: LoadedModel, batches: list[Tensor]
) -> list[tuple[str, int, float, float, float]]:
    """Rows of logits.csv."""
    sums: dict[int, Tensor] = {}
    for batch in batches:
        with ea_vision.record_attention(network.model, parts=("logits", "self_logits")) as maps:
            network.model(batch)
        for layer in maps.values():
            own, entering = (
                part - part.mean(-1, keepdim=True) for part in (layer.self_logits, layer.logits)
            )
            likeness = nn.functional.cosine_similarity(own.flatten(2), entering.flatten(2), dim=-1)
            figures = (
                torch.stack(
                    [
                        own.square().mean(-1).sqrt().mean(-1),
                        entering.square().mean(-1).sqrt().mean(-1),
                        likeness,
                    ]
                )
                .mean(-1)
                .sum(-1)
            )  # of (3, B, K)
            sums[layer.number] = sums.get(layer.number, 0) + figures
    return [
        (
            network.label,
            number,
            *(round(figure, 3) for figure in (total / sum(map(len, batches))).tolist()),
        )
        for number, total in sums.items()
    ]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="of the tables to write")
    parser.add_argument("--model", required=True, help="names or run folders, separated by commas")
    parser.add_argument(
        "--dataset", default="cifar10", help="see train_cifar.py --help (default: %(default)s)"
    )
    parser.add_argument("--data-dir", default="", help="folder of the data set")
    parser.add_argument(
        "--holdout",
        type=positive,
        default=None,
        help="take training images, as many as the runs held out, in place of test images",
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
    # In the order drawn, not the folder's, where an image's neighbour, whose map `other` takes, is mostly of its class.
    images = test.select(
        torch.randperm(len(test), generator=torch.Generator().manual_seed(0))[: options.limit]
    )
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
            batches = list(network.normalize(images.images / 255).split(BATCH))
            tables["replaced.csv"] += replaced(network, batches, images.targets)
            tables["logits.csv"] += logits(network, batches)
    for name, rows in tables.items():
        with (options.folder / name).open("w", newline="", encoding="utf-8") as file:
            csv.writer(file, lineterminator="\n").writerows(rows)
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main))
