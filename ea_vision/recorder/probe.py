"""Measure what attention maps reveal about images: classify images by a frozen network's maps (EA paper, table 7).

A probe, a small DenseNet, takes the maps of one layer for one query (a pixel, or a vision transformer's class token),
(K, H, W) per image. Controls:

* `untrained`: the same network before training, with batch statistics measured on images drawn from those that the
  probe learns from (without them the logits grow without bound, and each row attends to one pixel).
* `shuffled`: the trained network's maps, with the pixels of each map in its own random order. This leaves only how
  often each value occurs in a map. That two heads attend to the same place is spatial information, too, and is lost.

The network may know the images that the probe learns from, since it was trained on them, and its maps of them may
differ from those of other images. With `--unseen` the probe learns and is measured on images that the network was not
trained on: four fifths and one fifth of the test images.

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
from ea_vision.base.errors import CommandParser, UsageError
from ea_vision.base.files import atomic_write, check_output, csv_text, write_json
from ea_vision.base.provenance import hardware, provenance
from ea_vision.base.tables import markdown
from ea_vision.data.small_images import DATASETS, Images, hold_out, load_dataset
from ea_vision.layers.inspect_attention import prefix_names
from ea_vision.recorder.maps import Query
from ea_vision.recorder.probe_network import ProbeRecipe, in_batches, train_probe
from ea_vision.recorder.recording import record_attention, recordable_layers
from ea_vision.recorder.selection import (
    add_options,
    numbered,
    parse_layers,
    parse_queries,
    positive,
)
from ea_vision.zoo.loaded import LoadedModel, check_classifies, load_model
from ea_vision.zoo.source import TARGET_HELP, parse_targets

CONTROLS = ("untrained", "shuffled")
# layers 16 / 17 / 18
PUBLISHED = "AA-ResNet-34 24.50 / 31.18 / 17.55; EA-AA-ResNet-34 31.02 / 31.71 / 31.93"
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
        images: (M, 3, H, W) of the model's input size, uint8 or in 0..1.
        query: y,x in pixels of the input, or a token before a transformer's patches.
    """
    batches_of_layers: list[list[Tensor]] = [[] for _ in layers]
    batches = images.split(batch_size)
    for batch in tqdm(batches, desc=f"maps of {model.label}", unit="batch", disable=None):
        inputs = model.preparation.normalize(batch.to(model.device))
        with torch.no_grad(), record_attention(model.model, layers) as maps:
            model.model(inputs)
        for kept, number in zip(batches_of_layers, layers, strict=True):
            _, patches = maps[number].of_query(query)
            kept.append(patches.half().cpu())
    return list(map(torch.cat, batches_of_layers))


def shuffled_in_space(maps: Tensor, seed: int) -> Tensor:
    """Return maps (M, K, H, W) with the pixels of each map in its own random order."""
    flat = maps.flatten(2)
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(flat.shape, generator=generator).argsort(-1)
    return flat.gather(2, order).view(maps.shape)


def untrained_network(
    target: str,
    model: LoadedModel,
    images: Tensor,
    seed: int,
    count: int = 512,
    batch_size: int = 64,
) -> LoadedModel:
    """Return the network of `target` before training, for images of `model`'s size. Its batch statistics are those of
    `count` of the uint8 images (M, 3, H, W), drawn by `seed`, since folders are read class by class."""
    network = load_model(
        target, random=True, img_size=model.img_size, seed=seed, device=model.device
    )
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(images), generator=generator)
    drawn = in_batches(images[order[:count]], batch_size)
    inputs = (network.preparation.normalize(batch.to(model.device)) for batch in drawn)
    update_bn(inputs, network.model)
    return network


# ---- probing ---------------------------------------------------------------------------------------------------------


def layers_and_query(options: argparse.Namespace, model: LoadedModel) -> tuple[list[int], Query]:
    """Return the layers and the query from the options; the default query is the middle.

    Raises:
        UsageError: the model lacks a layer, or the query is outside the input.
    """
    check_classifies(model, without_classes=True)
    layers = options.layers
    if layers == "auto":
        layers = "16,17,18" if len(recordable_layers(model.model)) >= 18 else "all"
    numbers = [layer.number for layer in parse_layers(layers, model)]
    texts = [options.query] if options.query else []
    [query] = parse_queries(texts, model.img_size, default=[(0.5, 0.5)])
    tokens = prefix_names(model.model)
    if isinstance(query, str) and query not in tokens:
        accepted = " or ".join(["y,x", *tokens])
        raise UsageError(f"--query must be {accepted}, got {query!r}")
    return numbers, query


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
        target: the argument from which `load_model` made the network.
        splits: the images to learn from and to measure on.
    """
    layers, query = layers_and_query(options, model)

    def maps_of(network: LoadedModel) -> list[list[Tensor]]:
        return [extract_maps(network, split.images, layers, query) for split in splits]

    learnt, measured = splits
    trained = maps_of(model)
    for kind, seed in product(("trained", *options.controls), options.seeds):
        layers_of_splits = trained
        if kind == "untrained":
            layers_of_splits = maps_of(untrained_network(target, model, learnt.images, seed))
        for number, maps, test_maps in zip(layers, *layers_of_splits, strict=True):
            if kind == "shuffled":
                maps = shuffled_in_space(maps, seed)
                test_maps = shuffled_in_space(test_maps, seed + 1)
            name = f"{model.label}, {kind}, layer {number}, seed {seed}"
            top1 = train_probe(
                maps,
                learnt.targets,
                test_maps,
                measured.targets,
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
                "train_images": len(learnt),
                "test_images": len(measured),
            }


# ---- results ---------------------------------------------------------------------------------------------------------


def results_table(results: Sequence[dict]) -> str:
    """Return a table with one row per model and kind of maps, one column per layer: top-1 in percent, or if there are
    several seeds mean ± standard deviation."""
    batches_of_layers = defaultdict(lambda: defaultdict(list))
    layers = sorted({one["layer"] for one in results})
    for one in results:
        accuracies = batches_of_layers[one["model"], one["maps"]]
        accuracies[one["layer"]].append(one["top1"])
    rows = [["model", "maps", *(f"layer {layer}" for layer in layers)]]
    for (model, kind), accuracies in batches_of_layers.items():
        row = [model, kind]
        for layer in layers:
            values = accuracies[layer]
            if not values:  # another model's layer
                row.append("")
                continue
            deviation = f" ± {stdev(values):.2f}" if len(values) > 1 else ""
            row.append(f"{mean(values):.2f}{deviation}")
        rows.append(row)
    return markdown(rows)


# ---- the command -----------------------------------------------------------------------------------------------------


def seeds(text: str) -> tuple[int, ...]:
    """Return whole numbers, separated by commas, for argparse."""
    return tuple(int(word) for word in text.split(","))


def make_parser() -> argparse.ArgumentParser:
    recipe = ProbeRecipe()
    parser = CommandParser(description=__doc__.split("\n")[0], epilog=EXAMPLES)
    add = parser.add_argument
    add(
        "--model",
        required=True,
        metavar="NAME|RUN[,..]",
        help=f"{TARGET_HELP}; several separated by commas",
    )
    add(
        "--layers",
        default="auto",
        metavar="1,2|3-5|all",
        help="attention layers, counted from 1; auto: 16,17,18, or all if the network has fewer "
        "(default: %(default)s)",
    )
    add(
        "--query",
        metavar="Y,X|cls",
        help="query pixel of the input, or a token before a vision transformer's "
        "patches: cls, dist, reg1, ... (default: the middle)",
    )
    add(
        "--controls",
        default="untrained,shuffled",
        metavar="A,B|none",
        help="controls to compare with: untrained, the network before training; shuffled, each map with its "
        "pixels in its own random order (default: %(default)s)",
    )
    add(
        "--dataset",
        default="digits",
        choices=DATASETS,
        help="see ea-vision train-cifar --help (default: %(default)s)",
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
        help="use N images to learn from and N to measure on, drawn by the first of --seeds (default: all)",
    )
    add_options(parser, "--device")
    add(
        "--unseen",
        action="store_true",
        help="learn from four fifths of the test images, drawn by the first of --seeds, and measure on the others",
    )
    for flag, default, about in (
        ("--epochs", recipe.epochs, "epochs per probe"),
        ("--batch-size", recipe.batch_size, "images per update"),
        ("--width", recipe.width, "channels of the probe"),
    ):
        add(flag, type=positive, default=default, help=f"{about} (default: %(default)s)")
    add(
        "--seeds",
        type=seeds,
        default=(0,),
        metavar="N[,..]",
        help="seeds of the probe, the shuffling and the untrained network; their mean is shown (default: 0)",
    )
    add(
        "-o",
        "--output",
        type=Path,
        default="probe",
        metavar="DIR",
        help="folder for results.csv, which grows with each finished probe, and results.json (default: %(default)s)",
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command: probe models."""
    options = make_parser().parse_args(argv)
    options.controls = [] if options.controls == "none" else options.controls.split(",")
    if set(options.controls) - set(CONTROLS):
        raise UsageError(
            f"--controls must be some of {', '.join(CONTROLS)}, or none, got {options.controls}"
        )
    device = choose_device(options.device)
    first = options.seeds[0]
    recipe = ProbeRecipe(options.epochs, options.batch_size, width=options.width, seed=first)
    size = options.img_size and (options.img_size,) * 2
    models = {
        target: load_model(target, img_size=size, device=device)
        for target in parse_targets(options.model)
    }
    # folders of runs may have equal names
    labels = numbered([model.label for model in models.values()])
    for model, label in zip(models.values(), labels, strict=True):
        layers_and_query(options, model)
        model.label = label
    csv = check_output(options.output / "results.csv")
    about = check_output(options.output / "results.json")
    results = []
    fingerprints = {}
    for target, model in models.items():
        data = load_dataset(options.dataset, options.data_dir, model.preparation)
        fingerprints[model.label] = data.fingerprint()
        splits = [data.train, data.test]
        if len(data.classes) < 2:
            raise UsageError(
                f"images of at least 2 classes are required, got {', '.join(data.classes) or 'none'}"
            )
        if options.unseen:
            if len(data.test) < 5:
                raise UsageError(f"--unseen needs at least 5 test images, got {len(data.test)}")
            splits = hold_out(data.test, len(data.test) // 5, first)
        if options.limit:
            splits = [
                hold_out(split, options.limit, first)[1] if options.limit < len(split) else split
                for split in splits
            ]
        for one in probe(target, model, options, recipe, splits, len(data.classes)):
            results.append(one)
            rows = [{**row, "top1": f"{row['top1']:.2f}"} for row in results]
            atomic_write(csv, csv_text(rows).encode())
    places = ("data_dir", "output")
    probe_options = {name: value for name, value in vars(options).items() if name not in places}
    write_json(
        about,
        {
            "results": results,
            "recipe": asdict(recipe),
            "data_fingerprint": fingerprints,
            "options": probe_options,
            "hardware": hardware(device, 1),
            **provenance(),
        },
    )
    runs = "one run each"
    if len(options.seeds) > 1:
        runs = f"mean ± standard deviation of seeds {', '.join(map(str, options.seeds))}"
    print(results_table(results))
    print(f"top-1 in percent, {runs}; published on ImageNet, layers 16, 17, 18: {PUBLISHED}")
    print("written:", csv, about)
    return 0
