"""Measure what attention maps tell of images: classify these by the maps of a frozen network (EA paper, table 7).

The maps of one query, a pixel or a vision transformer's class token, (K, H, W) for an image and a layer, go into a
small DenseNet of their own. Controls:

* `untrained`: the same network as it begins training, its batch statistics measured on images drawn from all
  that the probe learns from (without those its logits have no bound and every row is one pixel).
* `shuffled`: the trained network's maps, the pixels of every map in a random order of its own. What is left is how
  often a value occurs in each map; that two heads look at one place is knowledge of space too, and goes.

The network may know the images that the probe learns from, since it was trained on them, and its maps of them may
differ from those of others. With `--unseen` the probe learns and is measured on images that the network was not trained
on: four fifths and one fifth of the test images.

Paper: `Evolving Attention with Residual Convolutions` (ICML 2021) - https://arxiv.org/abs/2102.12895
Shape letters: M images, B a batch of them, K heads, H x W the map.
"""

import argparse
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from statistics import mean, stdev

import torch
from torch import Tensor
from torch.optim.swa_utils import update_bn
from tqdm import tqdm

from ea_vision.base.devices import choose_device
from ea_vision.base.errors import UsageError
from ea_vision.base.files import atomic_write, check_output, csv_text, write_json
from ea_vision.base.provenance import hardware, provenance
from ea_vision.base.tables import markdown
from ea_vision.data.small_images import DATASETS, Images, hold_out, load_dataset
from ea_vision.recorder.layouts import prefix_names
from ea_vision.recorder.loading import (
    WEIGHTS_HELP,
    LoadedModel,
    add_options,
    check_classifies,
    load_model,
    parse_layers,
    parse_queries,
    parse_targets,
    positive,
)
from ea_vision.recorder.maps import Query
from ea_vision.recorder.probe_network import ProbeRecipe, train_probe
from ea_vision.recorder.recording import record_attention, recordable_layers

CONTROLS = ("untrained", "shuffled")
PUBLISHED = "AA-ResNet-34 24.50 / 31.18 / 17.55; EA-AA-ResNet-34 31.02 / 31.71 / 31.93"  # layers 16 / 17 / 18
EXAMPLES = """\
examples:
  ea-vision probe --model runs/aa,runs/ea --dataset cifar10 --data-dir DIR -o probe
  ea-vision probe --model ea_aa_resnet34 --dataset folder --data-dir imagenet --layers 16,17,18 --device cuda
  ea-vision probe --model runs/ea --limit 2000 --epochs 5 --width 64 --layers 1-3     # minutes on a CPU
"""


# ---- what a probe sees -----------------------------------------------------------------------------------------------


def extract_maps(
    model: LoadedModel, images: Tensor, layers: Sequence[int], query: Query, batch_size: int = 64
) -> list[Tensor]:
    """Return the maps of one query, float16 (M, K, H, W) on the CPU, for each layer.

    Args:
        images: uint8 (M, 3, H, W) of the model's input size.
        query: y,x in pixels of the input, or a token before a transformer's patches.
    """
    height, width = images.shape[-2:]
    found: list[list[Tensor]] = [[] for _ in layers]
    for batch in tqdm(
        images.split(batch_size), desc=f"maps of {model.label}", unit="batch", disable=None
    ):
        with torch.no_grad(), record_attention(model.model, layers) as maps:
            model.model(model.normalize(batch.to(model.device) / 255))
        for kept, number in zip(found, layers, strict=True):
            H, W = maps[number].feat_size
            cell = (
                query if isinstance(query, str) else (query[0] * H // height, query[1] * W // width)
            )
            kept.append(maps[number].of_query(cell)[1].half().cpu())
    return list(map(torch.cat, found))


def shuffled_in_space(maps: Tensor, seed: int) -> Tensor:
    """Return (M, K, H, W), the pixels of every map in a random order of its own."""
    order = torch.rand(
        maps.flatten(2).shape, generator=torch.Generator().manual_seed(seed)
    ).argsort(-1)
    return maps.flatten(2).gather(2, order).view(maps.shape)


def untrained_network(
    target: str,
    model: LoadedModel,
    images: Tensor,
    seed: int,
    count: int = 512,
    batch_size: int = 64,
) -> LoadedModel:
    """Return the network of `target` as it begins training, for images of the size that `model` takes; its batch
    statistics are those of `count` images of uint8 (M, 3, H, W), drawn by `seed`: folders lie class by class."""
    network = load_model(
        target, random=True, img_size=model.img_size, seed=seed, device=model.device
    )
    drawn = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))[
        :count
    ].split(batch_size)
    update_bn(
        (network.normalize(images[index].to(model.device) / 255) for index in drawn), network.model
    )
    return network


# ---- probing ---------------------------------------------------------------------------------------------------------


def layers_and_query(options: argparse.Namespace, model: LoadedModel) -> tuple[list[int], Query]:
    """Return the layers and the query that are asked for, by default the middle.

    Raises:
        UsageError: the model lacks a layer, or the query is outside the input.
    """
    check_classifies(model)
    layers, tokens = options.layers, prefix_names(model.model)
    if layers == "auto":
        layers = "16,17,18" if len(recordable_layers(model.model)) >= 18 else "all"
    chosen = [layer.number for layer in parse_layers(layers, model)]
    [query] = parse_queries(
        [options.query] if options.query else [], model.img_size, default=[(0.5, 0.5)]
    )
    if isinstance(query, str) and query not in tokens:
        raise UsageError(
            f"--query must be y,x{''.join(f' or {name}' for name in tokens)}, got {query!r}"
        )
    return chosen, query


def probe(
    target: str,
    model: LoadedModel,
    options: argparse.Namespace,
    recipe: ProbeRecipe,
    splits: Sequence[Images],
    num_classes: int,
) -> Iterator[dict]:
    """Probe each layer on the maps of a network and on its controls; yield the rows of results.csv, top1 in percent.

    Args:
        target: what `load_model` made the network from.
        splits: the images to learn from and to measure on.
    """
    layers, query = layers_and_query(options, model)

    def maps_of(network: LoadedModel) -> list[list[Tensor]]:
        return [extract_maps(network, split.images, layers, query) for split in splits]

    trained = maps_of(model)
    for kind, seed in product(("trained", *options.controls), options.seeds):
        untrained = kind == "untrained" and untrained_network(target, model, splits[0].images, seed)
        for number, *maps in zip(
            layers, *(maps_of(untrained) if untrained else trained), strict=True
        ):
            if kind == "shuffled":
                maps = [
                    shuffled_in_space(of_split, seed + split) for split, of_split in enumerate(maps)
                ]
            name = f"{model.label}, {kind}, layer {number}, seed {seed}"
            top1 = train_probe(
                maps[0],
                splits[0].targets,
                maps[1],
                splits[1].targets,
                num_classes,
                replace(recipe, seed=seed),
                model.device,
                name,
            )
            print(f"{name}: top-1 {top1:.2f}%", flush=True)
            yield {
                "model": model.label,
                "maps": kind,
                "layer": number,
                "seed": seed,
                "top1": top1,
                "train_images": len(splits[0]),
                "test_images": len(splits[1]),
            }


# ---- results ---------------------------------------------------------------------------------------------------------


def results_table(results: Sequence[dict]) -> str:
    """Return rows model and maps, columns layers: top-1 in percent, of several seeds the mean ± the deviation."""
    found = defaultdict(list)
    for one in results:
        found[one["model"], one["maps"], one["layer"]].append(one["top1"])
    models, kinds, layers = (dict.fromkeys(names) for names in zip(*found, strict=True))
    rows = [["model", "maps", *(f"layer {layer}" for layer in sorted(layers))]]
    for series in product(models, kinds):
        several = [
            found[(*series, layer)] for layer in sorted(layers)
        ]  # of one run there is no deviation
        rows.append(
            [
                *series,
                *(
                    " ± ".join(f"{number(values):.2f}" for number in (mean, stdev)[: len(values)])
                    for values in several
                ),
            ]
        )
    return markdown(rows)


# ---- the command -----------------------------------------------------------------------------------------------------


def seeds(text: str) -> tuple[int, ...]:
    """Return whole numbers, separated by commas, for argparse."""
    return tuple(int(word) for word in text.split(","))


def make_parser() -> argparse.ArgumentParser:
    recipe = ProbeRecipe()
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0],
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--model",
        required=True,
        metavar="NAME|RUN[,..]",
        help=f"{WEIGHTS_HELP}; several separated by commas",
    )
    add(
        "--layers",
        default="auto",
        metavar="1,2|3-5|all",
        help="attention layers, counted from 1; auto: 16,17,18, or all of a network that has fewer "
        "(default: %(default)s)",
    )
    add(
        "--query",
        metavar="Y,X|cls",
        help="query pixel of the input, or of a vision transformer a token before its "
        "patches: cls, dist, reg1, ... (default: the middle)",
    )
    add(
        "--controls",
        default="untrained,shuffled",
        metavar="A,B|none",
        help="what to compare with, some of: untrained, the network as it begins training; shuffled, the pixels of "
        "every map in a random order of its own (default: %(default)s)",
    )
    add(
        "--dataset",
        default="digits",
        choices=DATASETS,
        help="see train_cifar.py --help (default: %(default)s)",
    )
    add("--data-dir", default="", help="folder of the data set")
    add(
        "--img-size",
        type=positive,
        metavar="N",
        help="side of the images in pixels (default: the model's)",
    )
    add(
        "--limit",
        type=positive,
        metavar="N",
        help="N images to learn from and N to measure on, drawn by the first of --seeds (default: all)",
    )
    add_options(parser, "--device")
    add(
        "--unseen",
        action="store_true",
        help="learn from four fifths of the test images, drawn by the first of --seeds, and measure on the others, in "
        "place of training and test images",
    )
    add("--epochs", type=positive, default=recipe.epochs, help="of a probe (default: %(default)s)")
    add(
        "--batch-size",
        type=positive,
        default=recipe.batch_size,
        help="images (default: %(default)s)",
    )
    add(
        "--width",
        type=positive,
        default=recipe.width,
        help="channels of the probe (default: %(default)s)",
    )
    add(
        "--seeds",
        type=seeds,
        default=(0,),
        metavar="N[,..]",
        help="of the probe, the shuffling and the untrained network; the mean of several is shown (default: 0)",
    )
    add(
        "-o",
        "--output",
        type=Path,
        default="probe",
        metavar="DIR",
        help="results.csv, which grows with each finished probe, and results.json (default: %(default)s)",
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Probe the models as the arguments say."""
    options = make_parser().parse_args(argv)
    options.controls = [] if options.controls == "none" else options.controls.split(",")
    if set(options.controls) - set(CONTROLS):
        raise UsageError(
            f"--controls must be some of {', '.join(CONTROLS)}, or none, got {options.controls}"
        )
    device, first = choose_device(options.device), options.seeds[0]
    recipe = ProbeRecipe(options.epochs, options.batch_size, width=options.width, seed=first)
    size = options.img_size and (options.img_size,) * 2
    models = {
        target: load_model(target, img_size=size, device=device)
        for target in parse_targets(options.model)
    }
    for model in models.values():
        layers_and_query(options, model)
    csv, about = (check_output(options.output / f"results.{suffix}") for suffix in ("csv", "json"))
    results, fingerprints = [], {}
    for target, model in models.items():
        data = load_dataset(options.dataset, options.data_dir, model.img_size[0])
        fingerprints[model.label] = data.fingerprint()
        splits = (
            hold_out(data.test, len(data.test) // 5, first)
            if options.unseen
            else (data.train, data.test)
        )
        if options.limit:
            splits = [
                hold_out(split, options.limit, first)[1] if options.limit < len(split) else split
                for split in splits
            ]
        for one in probe(target, model, options, recipe, splits, len(data.classes)):
            results.append(one)
            atomic_write(
                csv, csv_text([{**row, "top1": f"{row['top1']:.2f}"} for row in results]).encode()
            )
    given = {
        name: value for name, value in vars(options).items() if name not in ("data_dir", "output")
    }  # no places
    write_json(
        about,
        {
            "results": results,
            "recipe": asdict(recipe),
            "data_fingerprint": fingerprints,
            "options": given,
            "hardware": hardware(device, 1),
            **provenance(),
        },
    )
    runs = f"mean ± standard deviation of seeds {', '.join(map(str, options.seeds))}"
    print(results_table(results))
    print(
        f"top-1 in percent, {runs if len(options.seeds) > 1 else 'one run each'}; published on ImageNet, layers 16, "
        f"17, 18: {PUBLISHED}"
    )
    print("written:", csv, about)
    return 0
