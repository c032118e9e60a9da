"""How much an attention map tells of the image: classify images by the maps of a frozen network (EA paper, table 7).

The maps of one query, a pixel or a vision transformer's class token, (K, H, W) for an image and a layer, go into a
small DenseNet of their own. Controls:

* `untrained`: the same network as it begins training, its batch statistics measured on images drawn from all
  that the probe learns from (without those its logits have no bound and every row is one pixel).
* `shuffled`: the trained network's maps, the pixels of every map in a random order of its own. What is left is how
  often a value occurs in each map; that two heads look at one place is knowledge of space too, and goes.
* `shuffled-together`: one order for all heads of an image. A pixel loses its place and keeps its K values, so what
  the heads agree on is left; the difference to `shuffled` is what that tells.

The network may know the images that the probe learns from, since it was trained on them, and its maps of them may
differ from those of others. With `--unseen` the probe learns and is measured on images that the network was not trained
on: four fifths and one fifth of the test images.

Paper: `Evolving Attention with Residual Convolutions` (ICML 2021) - https://arxiv.org/abs/2102.12895
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ea_vision.base.errors import UsageError
from ea_vision.base.figures import figure_bytes
from ea_vision.base.files import atomic_write, csv_text, write_json
from ea_vision.base.processes import choose_device
from ea_vision.base.provenance import hardware, provenance
from ea_vision.data.small_images import DATASETS, Images, hold_out, load_dataset
from ea_vision.recorder.loading import (
    WEIGHTS_HELP,
    LoadedModel,
    add_options,
    check_classifies,
    load_model,
    parse_layers,
    parse_queries,
    parse_size,
    parse_targets,
    positive,
)
from ea_vision.recorder.probe_maps import extract_maps, shuffled_in_space, untrained_network
from ea_vision.recorder.probe_network import ProbeRecipe, train_probe
from ea_vision.recorder.probe_results import PUBLISHED, Result, results_figure, results_table
from ea_vision.recorder.recording import prefix_names, recordable_layers

MAPS_OF = ("trained", "untrained", "shuffled", "shuffled-together")
PLACES = ("data_dir", "output")  # of this machine: results.json has the data's fingerprint in their place
EXAMPLES = """\
examples:
  ea-vision probe --model runs/aa,runs/ea --dataset cifar10 --data-dir DIR -o probe
  ea-vision probe --model ea_aa_resnet34 --dataset folder --data-dir imagenet --layers 16,17,18 --device cuda
  ea-vision probe --model runs/ea --limit 2000 --epochs 5 --width 64 --layers 1-3     # minutes on a CPU
"""


class Journal:
    """Finished probes of an output folder, so that the same command goes on where it was stopped."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "done.json"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.done: dict[str, float] = json.loads(self.file.read_text()) if self.file.exists() else {}
        except (OSError, ValueError) as error:
            raise UsageError(f"cannot use {folder} as the output folder: {error}") from error

    def top1(self, key: str, compute: Callable[[], float]) -> float:
        if key not in self.done:
            self.done[key] = compute()
            atomic_write(self.file, json.dumps(self.done, indent=1).encode())
        return self.done[key]


def probe_key(recipe: ProbeRecipe, maps: Sequence[np.ndarray], targets: Sequence[Tensor]) -> str:
    """Return SHA-256 of all that decides a probe's accuracy: recipe, maps and classes of the training and test
    images."""
    digest = hashlib.sha256(json.dumps(asdict(recipe)).encode())
    for part in (*maps, *(classes.numpy() for classes in targets)):
        digest.update(f"{part.dtype} {part.shape}".encode())
        digest.update(np.ascontiguousarray(part))
    return digest.hexdigest()


def sample(images: Images, limit: int | None, seed: int) -> Images:
    """Return at most `limit` images, chosen by `seed`, in their order."""
    if limit is None or limit >= len(images):
        return images
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    return images.select(order[:limit].sort().values)


class Subject(NamedTuple):
    """A model whose maps are probed: what `load_model` takes and gave, the layers, and the query, None: the middle."""

    target: str
    model: LoadedModel
    layers: tuple[int, ...]
    query: tuple[int, int] | str | None


def probe(subject: Subject, splits: Sequence[Images], num_classes: int, kind: str, recipe: ProbeRecipe,
          journal: Journal, device: torch.device) -> Iterator[Result]:
    """Probe each layer on maps of one kind, some of MAPS_OF; yield the results.

    Args:
        splits: the images to learn from and to measure on.
        recipe: its seed is of all that is drawn but the images.
    """
    model, (train, test) = subject.model, splits
    if kind == "untrained":
        model = untrained_network(subject.target, model, train.images, recipe.seed)
    both = [extract_maps(model, split.images, subject.layers, subject.query) for split in splits]
    for number, *pair in zip(subject.layers, *both, strict=True):
        if kind.startswith("shuffled"):
            pair = [shuffled_in_space(maps, recipe.seed + split, kind == "shuffled-together")
                    for split, maps in enumerate(pair)]
        name = f"{subject.model.label}, {kind}, layer {number}, seed {recipe.seed}"

        def compute(pair: list[np.ndarray] = pair, name: str = name) -> float:
            return train_probe(pair[0], train.targets, pair[1], test.targets, num_classes, recipe, device, name)

        top1 = journal.top1(probe_key(recipe, pair, (train.targets, test.targets)), compute)
        print(f"{name}: top-1 {top1:.2f}%", flush=True)
        yield Result(subject.model.label, kind, number, recipe.seed, top1, len(train), len(test))


def make_parser() -> argparse.ArgumentParser:
    recipe = ProbeRecipe()
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0],
                                     epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", required=True, metavar="NAME|RUN[,..]", help=f"{WEIGHTS_HELP}; several separated by commas")
    add("--layers", default="auto", metavar="1,2|3-5|all",
        help="attention layers, counted from 1; auto: 16,17,18, or all of a network that has fewer "
             "(default: %(default)s)")
    add("--query", metavar="Y,X|cls", help="query pixel of the input, or of a vision transformer a token before its "
                                           "patches: cls, dist, reg1, ... (default: the middle)")
    add("--controls", default="untrained,shuffled", metavar="A,B|none",
        help="what to compare with, some of: untrained, the network as it begins training; shuffled, the pixels of "
             "every map in a random order of its own; shuffled-together, one order for all heads of an image "
             "(default: %(default)s)")
    add("--dataset", default="digits", choices=DATASETS, help="see train_cifar.py --help (default: %(default)s)")
    add("--data-dir", default="", help="folder of the data set")
    add("--download", action="store_true", help="fetch cifar10 or cifar100 if it is not in --data-dir")
    add("--img-size", metavar="N", help="side of the images in pixels (default: the model's)")
    add("--limit", type=positive, metavar="N",
        help="N images to learn from and N to measure on, drawn by the first of --seeds (default: all)")
    add("--workers", type=positive, default=2, help="threads that decode images (default: %(default)s)")
    add_options(parser, "--device")
    add("--unseen", action="store_true",
        help="learn from four fifths of the test images, drawn by the first of --seeds, and measure on the others, in "
             "place of training and test images")
    add("--epochs", type=positive, default=recipe.epochs, help="of a probe (default: %(default)s)")
    add("--batch-size", type=positive, default=recipe.batch_size, help="images (default: %(default)s)")
    add("--lr", type=float, default=recipe.lr, help="first learning rate; cosine to 0.0001 (default: %(default)s)")
    add("--width", type=positive, default=recipe.width, help="channels of the probe (default: %(default)s)")
    add("--seeds", type=numbers, default=(0,), metavar="N[,..]",
        help="of the probe, the shuffling and the untrained network; the mean of several is shown (default: 0)")
    add("-o", "--output", default="probe", metavar="DIR",
        help="results.csv, results.json and results.png; finished probes are not repeated (default: %(default)s)")
    return parser


def numbers(text: str) -> tuple[int, ...]:
    """Return different whole numbers, separated by commas."""
    words = text.split(",")
    if not all(word.isdigit() for word in words) or len(set(words)) < len(words):
        raise argparse.ArgumentTypeError(f"different whole numbers, separated by commas, required, got {text!r}")
    return tuple(map(int, words))


def subject_of(options: argparse.Namespace, target: str, model: LoadedModel) -> Subject:
    """Return a model with the layers and the query asked for.

    Raises:
        UsageError: the model lacks a layer, or the query is outside the input.
    """
    layers = options.layers
    if layers == "auto":
        layers = "16,17,18" if len(recordable_layers(model.model)) >= 18 else "all"
    chosen, tokens = tuple(layer.number for layer in parse_layers(layers, model)), prefix_names(model.model)
    [query] = [None] if options.query is None else parse_queries([options.query], model.img_size)
    if isinstance(query, str) and query not in tokens:
        raise UsageError(f"--query must be y,x{''.join(f' or {name}' for name in tokens)}, got {query!r}")
    return Subject(target, model, chosen, query)


def subjects_of(options: argparse.Namespace, device: torch.device) -> list[Subject]:
    """Load the models that --model names."""
    size, found = parse_size(options.img_size), []
    if size and size[0] != size[1]:
        raise UsageError(f"--img-size must be one number here, got {options.img_size!r}")
    for target in parse_targets(options.model):
        model = load_model(target, img_size=size, device=device)
        check_classifies(model)
        found.append(subject_of(options, target, model))
    return found


def main(argv: Sequence[str] | None = None) -> int:
    options = make_parser().parse_args(argv)
    controls = [] if options.controls == "none" else options.controls.split(",")
    if set(controls) - set(MAPS_OF[1:]):
        raise UsageError(f"--controls must be some of {', '.join(MAPS_OF[1:])}, or none, got {options.controls!r}")
    if not 0 < options.lr < math.inf:
        raise UsageError(f"--lr must be above 0, got {options.lr}")
    recipe = ProbeRecipe(epochs=options.epochs, batch_size=options.batch_size, lr=options.lr, width=options.width,
                         seed=options.seeds[0])
    device, folder = choose_device(options.device), Path(options.output)
    subjects = subjects_of(options, device)
    journal, results, fingerprints = Journal(folder), [], {}
    for subject in subjects:
        data = load_dataset(options.dataset, options.data_dir, subject.model.img_size[0],
                            options.download, options.workers)
        fingerprints[subject.model.label] = data.fingerprint()
        splits = hold_out(data.test, len(data.test) // 5, recipe.seed) if options.unseen else (data.train, data.test)
        splits = [sample(split, options.limit, recipe.seed) for split in splits]
        for kind in ("trained", *controls):
            for seed in options.seeds:
                results += probe(subject, splits, len(data.classes), kind, replace(recipe, seed=seed), journal, device)
    rows = [asdict(result) for result in results]
    told = {name: value for name, value in vars(options).items() if name not in PLACES}
    atomic_write(folder / "results.csv", csv_text([{**row, "top1": f"{row['top1']:.2f}"} for row in rows]).encode())
    write_json(folder / "results.json", {
        "results": rows, "recipe": asdict(recipe), "data_fingerprint": fingerprints, "options": told,
        "hardware": hardware(device, 1), **provenance()})
    atomic_write(folder / "results.png", figure_bytes(results_figure(results, len(data.classes))))
    print(results_table(results))
    runs = "one run each"
    if len(options.seeds) > 1:
        runs = f"mean ± standard deviation of seeds {', '.join(map(str, options.seeds))}"
    print(f"top-1 in percent, {runs}; published on ImageNet, layers 16, 17, 18: {PUBLISHED}")
    print("written:", *(folder / f"results.{suffix}" for suffix in ("csv", "json", "png")))
    return 0
