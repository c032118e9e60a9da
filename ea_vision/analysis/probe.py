"""How much an attention map tells of the image: classify images by the maps of a frozen network (EA paper, table 7).

The maps of one query pixel, (K, H, W) for an image and a layer, go into a small DenseNet of their own. Controls:

* `untrained`: the same network as it begins training, its batch statistics measured on images drawn from all the
  training images (without those its logits have no bound and every row is one pixel).
* `shuffled`: the trained network's maps, the pixels of every map in a random order of its own. What is left is how
  often a value occurs in each map; that two heads look at one place is knowledge of space too, and goes.
* `shuffled-together`: one order for all heads of an image. A pixel loses its place and keeps its K values, so what
  the heads agree on is left; the difference to `shuffled` is what that tells.

Paper: `Evolving Attention with Residual Convolutions` (ICML 2021) - https://arxiv.org/abs/2102.12895

Shape letters: M images, L layers, K heads, H x W the map.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import io
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from timm.layers import BatchNormAct2d
from timm.models.densenet import DenseBlock
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from tqdm import tqdm

from ea_vision.analysis.loading import (
    WEIGHTS_HELP,
    LoadedModel,
    load_model,
    parse_layers,
    parse_size,
    positive,
)
from ea_vision.analysis.recording import AttentionLayer, attention_layers, record_attention
from ea_vision.base.errors import RunError, UsageError
from ea_vision.base.figures import figure_bytes
from ea_vision.base.files import atomic_write, write_json
from ea_vision.base.processes import choose_device
from ea_vision.base.provenance import hardware, provenance
from ea_vision.data.small_images import DATASETS, Images, load_dataset

PUBLISHED = {"AA-ResNet-34": {16: 24.50, 17: 31.18, 18: 17.55}, "EA-AA-ResNet-34": {16: 31.02, 17: 31.71, 18: 31.93}}
MAPS_OF = ("trained", "untrained", "shuffled", "shuffled-together")
PLACES = ("data_dir", "cache_dir", "output")  # of this machine: results.json has the data's fingerprint in their place
COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9")
EXAMPLES = """\
examples:
  python -m ea_vision.probe --model runs/aa,runs/ea --dataset cifar10 --data-dir DIR -o probe
  python -m ea_vision.probe --model ea_aa_resnet34 --dataset folder --data-dir imagenet --layers 16,17,18 --device cuda
  python -m ea_vision.probe --model runs/ea --limit 2000 --epochs 5 --width 64 --layers 1-3     # minutes on a CPU
"""


class ProbeNet(nn.Module):
    """A DenseNet of 12 layers for (B, K, H, W) maps.

    Pooled after the 4th and the 7th layer (14x14 -> 7x7 -> 4x4, rounding up), `width` channels before the first layer,
    2 and 4 times as many after the poolings. The paper gives no growth rate: DenseNet's 32.

    Args:
        num_heads: K.
        num_classes: classes.
        width: channels, 256 in the paper.
        growth: channels that a layer adds.
    """

    def __init__(self, num_heads: int, num_classes: int, width: int = 256, growth: int = 32) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(num_heads, width, 3, padding=1, bias=False)]
        for depth, block_width in ((4, width), (3, 2 * width), (5, 4 * width)):
            layers.append(DenseBlock(depth, block_width, bn_size=4, growth_rate=growth))
            channels = block_width + depth * growth
            if block_width < 4 * width:
                layers += [BatchNormAct2d(channels), nn.Conv2d(channels, 2 * block_width, 1, bias=False),
                           nn.AvgPool2d(2, ceil_mode=True)]
        layers.append(BatchNormAct2d(channels))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Linear(channels, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight)

    def forward(self, maps: Tensor) -> Tensor:
        """(B, K, H, W) -> (B, num_classes)."""
        return self.classifier(self.features(maps).mean((2, 3)))


# ---- maps -----------------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class MapSource:
    """What maps to take: those of one query, y,x in pixels of the input (None: the middle), of `layers`."""

    layers: tuple[int, ...]
    query: tuple[int, int] | None = None


def extract_maps(model: LoadedModel, images: Tensor, source: MapSource, folder: Path,
                 batch_size: int = 64) -> list[np.ndarray]:
    """The maps of `source` for all images, kept in `folder` as layerN.npy, float16 (M, K, H, W).

    An interrupted extraction goes on where it was; a finished one is read.

    Args:
        images: uint8 (M, 3, H, W) of the model's input size.
        batch_size: images at a time.

    Returns:
        the maps by layer.

    Raises:
        RunError: the cache cannot be written.
    """
    key = _cache_key(model, images, source)
    state_file = folder / "state.json"
    files = [folder / f"layer{number}.npy" for number in source.layers]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        done = 0
        if state_file.exists():
            state = json.loads(state_file.read_text())
            done = state["done"] if state["key"] == key and all(file.exists() for file in files) else 0
        stores = [np.lib.format.open_memmap(file, mode="r+") for file in files] if done else None
        batches = range(done, len(images), batch_size)
        for first in tqdm(batches, desc=f"maps of {model.label}", unit="batch", disable=not batches):
            maps = query_maps(model, images[first:first + batch_size], source)
            if stores is None:
                stores = [np.lib.format.open_memmap(file, "w+", np.float16, (len(images), *layer_maps.shape[1:]))
                          for file, layer_maps in zip(files, maps, strict=True)]
            for store, layer_maps in zip(stores, maps, strict=True):
                store[first:first + len(layer_maps)] = layer_maps
                store.flush()
            atomic_write(state_file, json.dumps({"key": key, "done": first + len(maps[0])}).encode())
    except OSError as error:
        raise RunError(f"cannot keep maps in {folder}: {error.strerror or error}") from error
    return stores


def query_maps(model: LoadedModel, images: Tensor, source: MapSource) -> list[np.ndarray]:
    """float16 (B, K, H, W) for each layer of `source`; images uint8 (B, 3, H, W) of the model's input size."""
    device = next(model.model.parameters()).device
    with torch.inference_mode(), record_attention(model.model, source.layers) as recorded:
        model.model(model.normalize(images.to(device) / 255))
    H, W = images.shape[-2:]
    y, x = source.query or (H // 2, W // 2)
    maps = []
    for number in source.layers:
        layer = recorded[number]
        row, col = y * layer.feat_size[0] // H, x * layer.feat_size[1] // W
        maps.append(layer.spatial()[:, :, row, col].half().cpu().numpy())
    return maps


def _cache_key(model: LoadedModel, images: Tensor, source: MapSource) -> str:
    """SHA-256 of the weights, the images, the input's statistics and the source."""
    about = [asdict(source), list(model.config["mean"]), list(model.config["std"])]
    digest = hashlib.sha256(json.dumps(about).encode())
    for name, value in model.model.state_dict().items():
        digest.update(name.encode())
        digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    digest.update(images.contiguous().numpy())
    return digest.hexdigest()


def shuffled_in_space(maps: np.ndarray, seed: int, together: bool = False) -> np.ndarray:
    """(M, K, H, W) with the pixels of every map in a random order of its own; `together`: one order for all K heads."""
    generator = np.random.default_rng(seed)
    M, K, H, W = maps.shape
    order = np.argsort(generator.random((M, 1 if together else K, H * W)), axis=-1)
    return np.take_along_axis(maps.reshape(M, K, H * W), order, axis=-1).reshape(maps.shape)


def measure_batch_statistics(model: LoadedModel, images: Tensor, batches: int = 8, batch_size: int = 64,
                             seed: int = 0) -> None:
    """Set the batch statistics of a network that was never trained to those of some images of uint8 (M, 3, H, W).

    The images are drawn by `seed`: those of a folder lie in the order of their classes.
    """
    norms = [m for m in model.model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    momenta = [norm.momentum for norm in norms]
    device = next(model.model.parameters()).device
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # the plain mean over the batches
        norm.train()
    drawn = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))[:batches * batch_size]
    with torch.no_grad():
        for index in drawn.split(batch_size):
            model.model(model.normalize(images[index].to(device) / 255))
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
        norm.eval()


# ---- the probe ------------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class ProbeRecipe:
    """Training of the probe. The paper: 30 epochs, cosine 0.05 -> 0.0001, 256 wide; the rest is ours."""

    epochs: int = 30
    batch_size: int = 128
    lr: float = 0.05
    lr_min: float = 0.0001
    momentum: float = 0.9
    weight_decay: float = 1e-4
    width: int = 256
    seed: int = 0


def train_probe(maps: np.ndarray, targets: Tensor, test_maps: np.ndarray, test_targets: Tensor, num_classes: int,
                recipe: ProbeRecipe, device: str = "cpu", label: str = "probe") -> float:
    """Train a ProbeNet on maps (M, K, H, W); return its top-1 in percent on the test maps after the last epoch.

    Raises:
        RunError: the loss is no finite number.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        net = ProbeNet(maps.shape[1], num_classes, recipe.width)
    net = net.to(device, memory_format=torch.channels_last)  # 1.5 times as fast on a CPU
    mean, std = _head_statistics(maps, device)
    order = torch.Generator().manual_seed(recipe.seed)
    optimizer = torch.optim.SGD(net.parameters(), recipe.lr, recipe.momentum, weight_decay=recipe.weight_decay)
    steps = math.ceil(len(maps) / recipe.batch_size)
    scheduler = CosineAnnealingLR(optimizer, recipe.epochs * steps, recipe.lr_min)
    for epoch in tqdm(range(recipe.epochs), desc=label, unit="epoch"):
        net.train()
        for index in torch.randperm(len(maps), generator=order).split(recipe.batch_size):
            batch = (torch.from_numpy(maps[index.numpy()]).to(device).float() - mean) / std
            loss = F.cross_entropy(net(batch), targets[index].to(device))
            if not math.isfinite(loss.item()):
                raise RunError(f"{label}: the loss is {loss.item()} in epoch {epoch + 1}")
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
    net.eval()
    right = 0
    with torch.inference_mode():
        for index in torch.arange(len(test_maps)).split(4 * recipe.batch_size):
            batch = (torch.from_numpy(test_maps[index.numpy()]).to(device).float() - mean) / std
            right += int((net(batch).argmax(1).cpu() == test_targets[index]).sum())
    return 100 * right / len(test_maps)


def _head_statistics(maps: np.ndarray, device: str) -> tuple[Tensor, Tensor]:
    """Mean and std (K, 1, 1) of the maps (M, K, H, W), taken in pieces."""
    sums, squares = np.zeros(maps.shape[1]), np.zeros(maps.shape[1])
    for first in range(0, len(maps), 4096):
        piece = maps[first:first + 4096].astype(np.float64)
        sums += piece.sum((0, 2, 3))
        squares += (piece ** 2).sum((0, 2, 3))
    count = len(maps) * maps.shape[2] * maps.shape[3]
    mean = sums / count
    std = np.sqrt(np.maximum(squares / count - mean ** 2, 1e-12))
    return tuple(torch.from_numpy(v).float().view(-1, 1, 1).to(device) for v in (mean, std))


@dataclass(frozen=True)
class Result:
    """A row of results.csv. top1 in percent."""

    model: str
    maps: str
    layer: int
    top1: float
    train_images: int
    test_images: int


def results_csv(results: Sequence[Result]) -> str:
    text = io.StringIO()
    rows = csv.DictWriter(text, list(Result.__dataclass_fields__), lineterminator="\n")
    rows.writeheader()
    rows.writerows({**asdict(result), "top1": f"{result.top1:.2f}"} for result in results)
    return text.getvalue()


def results_table(results: Sequence[Result]) -> str:
    """Rows model and maps, columns layers, top-1 in percent."""
    layers = sorted({result.layer for result in results})
    names = list(dict.fromkeys((result.model, result.maps) for result in results))
    found = {(result.model, result.maps, result.layer): result.top1 for result in results}
    width, kind = (max(map(len, column)) for column in zip(("model", "untrained"), *names, strict=True))
    lines = [f"{'model':<{width}}  {'maps':<{kind}}" + "".join(f"{f'layer {layer}':>10}" for layer in layers)]
    for model, maps in names:
        values = ["" if value is None else f"{value:.2f}" for value in (found.get((model, maps, n)) for n in layers)]
        lines.append(f"{model:<{width}}  {maps:<{kind}}" + "".join(f"{value:>10}" for value in values))
    return "\n".join(lines)


def results_figure(results: Sequence[Result], num_classes: int):
    """Bars by layer, a colour a model and kind of maps; beside them the published ones. A matplotlib Figure."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    measured: dict[str, dict[int, float]] = {}
    for result in results:
        measured.setdefault(f"{result.model}, {result.maps}", {})[result.layer] = result.top1
    figure = Figure(figsize=(12, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    columns = max(3, len({result.layer for result in results}))
    panels = figure.subplots(1, 2, width_ratios=(columns * (1 + len(measured) / 6), 4))
    first = results[0]
    titles = (f"{first.train_images} training and {first.test_images} test images",
              "published: EA paper, table 7, ImageNet")
    for axes, bars, title in zip(panels, (measured, PUBLISHED), titles, strict=True):
        layers = sorted({layer for values in bars.values() for layer in values})
        width = 0.8 / len(bars)
        for index, (label, values) in enumerate(bars.items()):
            places = [layers.index(layer) + (index - (len(bars) - 1) / 2) * width for layer in values]
            drawn = axes.bar(places, list(values.values()), width * 0.95, label=label,
                             color=COLORS[index % len(COLORS)], hatch="" if index < len(COLORS) else "//")
            axes.bar_label(drawn, fmt="%.1f", fontsize=7)
        axes.set_xticks(range(len(layers)), [f"layer {layer}" for layer in layers])
        axes.set_ylabel("top-1 of the probe (%)")
        axes.set_title(title, fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].axhline(100 / num_classes, color="0.5", linestyle=":", linewidth=1, label="chance, classes alike")
    for axes in panels:
        axes.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=2)
    return figure


# ---- the command ----------------------------------------------------------------------------------------------------

def make_parser() -> argparse.ArgumentParser:
    recipe = ProbeRecipe()
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0],
                                     epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", required=True, metavar="NAME|RUN[,..]", help=f"{WEIGHTS_HELP}; several separated by commas")
    add("--layers", default="auto", metavar="1,2|3-5|all",
        help="attention layers, counted from 1; auto: 16,17,18, or all of a network that has fewer "
             "(default: %(default)s)")
    add("--query", metavar="Y,X", help="query pixel of the input (default: the middle)")
    add("--controls", default="untrained,shuffled", metavar="A,B|none",
        help="what to compare with, some of: untrained, the network as it begins training; shuffled, the pixels of "
             "every map in a random order of its own; shuffled-together, one order for all heads of an image "
             "(default: %(default)s)")
    add("--dataset", default="digits", choices=DATASETS, help="see train_cifar.py --help (default: %(default)s)")
    add("--data-dir", default="", help="folder of the data set")
    add("--cache-dir", default="", help="where decoded images are kept; none: nowhere (default: the user's cache)")
    add("--download", action="store_true", help="fetch cifar10 or cifar100 if it is not in --data-dir")
    add("--img-size", metavar="N", help="side of the images in pixels (default: the model's)")
    add("--limit", type=positive, metavar="N", help="N training and N test images, drawn by --seed (default: all)")
    add("--epochs", type=positive, default=recipe.epochs, help="of a probe (default: %(default)s)")
    add("--batch-size", type=positive, default=recipe.batch_size, help="images (default: %(default)s)")
    add("--lr", type=float, default=recipe.lr, help="first learning rate; cosine to 0.0001 (default: %(default)s)")
    add("--width", type=positive, default=recipe.width, help="channels of the probe (default: %(default)s)")
    add("--seed", type=int, default=0, help="of the probe, the drawn images and the untrained network (default: 0)")
    add("--workers", type=positive, default=2, help="threads that decode images (default: %(default)s)")
    add("--device", default="auto", choices=("auto", "cpu", "cuda"), help="auto: cuda if there is one")
    add("-o", "--output", default="probe", metavar="DIR",
        help="results.csv, results.json, results.png and the cached maps; the same command continues "
             "(default: %(default)s)")
    return parser


def draw(images: Images, limit: int | None, seed: int) -> Images:
    """At most `limit` images, chosen by `seed`, in their order."""
    if limit is None or limit >= len(images):
        return images
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    return images.select(order[:limit].sort().values)


def choose_layers(text: str, model: LoadedModel) -> list[AttentionLayer]:
    if text == "auto":
        text = "16,17,18" if len(attention_layers(model.model)) >= 18 else "all"
    return parse_layers(text, model)


def parse_query(text: str | None, img_size: tuple[int, int]) -> tuple[int, int] | None:
    if text is None:
        return None
    sides = text.split(",")
    if len(sides) != 2 or not all(side.isdigit() for side in sides) or any(
            int(side) >= size for side, size in zip(sides, img_size, strict=True)):
        raise UsageError(f"--query must be y,x within the {img_size[0]}x{img_size[1]} input, got {text!r}")
    return int(sides[0]), int(sides[1])


def main(argv: Sequence[str] | None = None) -> int:
    options = make_parser().parse_args(argv)
    controls = [] if options.controls == "none" else options.controls.split(",")
    if set(controls) - set(MAPS_OF[1:]):
        raise UsageError(f"--controls must be some of {', '.join(MAPS_OF[1:])}, or none, got {options.controls!r}")
    if not 0 < options.lr < math.inf:
        raise UsageError(f"--lr must be above 0, got {options.lr}")
    recipe = ProbeRecipe(epochs=options.epochs, batch_size=options.batch_size, lr=options.lr, width=options.width,
                         seed=options.seed)
    size, device = parse_size(options.img_size), choose_device(options.device)
    if size and size[0] != size[1]:
        raise UsageError(f"--img-size must be one number here, got {options.img_size!r}")
    output = Path(options.output)
    targets = options.model.split(",")
    models = [load_model(target, img_size=size, device=device) for target in targets]
    layers = [choose_layers(options.layers, model) for model in models]
    queries = [parse_query(options.query, model.img_size) for model in models]

    journal = Journal(output)
    results: list[Result] = []
    classes, fingerprints = 0, {}
    for target, model, chosen, query in zip(targets, models, layers, queries, strict=True):
        data = load_dataset(options.dataset, options.data_dir, options.cache_dir, model.img_size[0], options.download,
                            options.workers)
        train, test = (draw(split, options.limit, options.seed) for split in (data.train, data.test))
        classes, fingerprints[model.label] = len(data.classes), data.fingerprint()
        source = MapSource(tuple(layer.number for layer in chosen), query)

        def maps_of(kind: str, target=target, model=model, source=source, train=train, test=test):
            network = model
            if kind == "untrained":
                network = load_model(target, random=True, img_size=model.img_size, seed=options.seed, device=device)
                measure_batch_statistics(network, train.images, seed=options.seed)
            base = output / "maps" / hashlib.sha256(f"{target} {kind == 'untrained'}".encode()).hexdigest()[:12]
            return [extract_maps(network, split.images, source, base / name)
                    for name, split in (("train", train), ("test", test))]

        for kind in ("trained", *controls):
            results += probe_layers(model.label, kind, source, maps_of, train, test, classes, recipe, device, journal)
    write_results(output, results, classes, recipe, options, device, fingerprints)
    return 0


class Journal:
    """Finished probes of an output folder, so that the same command goes on where it was stopped."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "done.json"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.done = json.loads(self.file.read_text()) if self.file.exists() else {}
        except (OSError, ValueError) as error:
            raise UsageError(f"cannot use {folder} as the output folder: {error}") from error

    def top1(self, key: str, compute: Callable[[], float]) -> float:
        if key not in self.done:
            self.done[key] = compute()
            atomic_write(self.file, json.dumps(self.done, indent=1).encode())
        return self.done[key]


def probe_key(recipe: ProbeRecipe, maps: Sequence[np.ndarray], targets: Sequence[Tensor]) -> str:
    """SHA-256 of all that decides a probe's accuracy: recipe, and maps and classes of the training and test images."""
    digest = hashlib.sha256(json.dumps(asdict(recipe)).encode())
    for part in (*maps, *(classes.numpy() for classes in targets)):
        digest.update(f"{part.dtype} {part.shape}".encode())
        digest.update(np.ascontiguousarray(part))
    return digest.hexdigest()


def probe_layers(label: str, kind: str, source: MapSource,
                 maps_of: Callable[[str], list[list[np.ndarray]]],
                 train: Images, test: Images, classes: int, recipe: ProbeRecipe, device: str,
                 journal: Journal) -> list[Result]:
    """A probe for each layer, on maps of one kind."""
    train_maps, test_maps = maps_of(kind)
    results = []
    for index, number in enumerate(source.layers):
        pair = train_maps[index], test_maps[index]
        if kind.startswith("shuffled"):
            together = kind == "shuffled-together"
            pair = [shuffled_in_space(maps, recipe.seed + split, together) for split, maps in enumerate(pair)]
        key = probe_key(recipe, pair, (train.targets, test.targets))
        name = f"{label}, {kind}, layer {number}"
        top1 = journal.top1(key, lambda pair=pair, name=name: train_probe(
            pair[0], train.targets, pair[1], test.targets, classes, recipe, device, name))
        print(f"{name}: top-1 {top1:.2f}%", flush=True)
        results.append(Result(label, kind, number, top1, len(train), len(test)))
    return results


def write_results(output: Path, results: list[Result], classes: int, recipe: ProbeRecipe, options: argparse.Namespace,
                  device: str, fingerprints: dict[str, str]) -> None:
    told = {name: value for name, value in vars(options).items() if name not in PLACES}
    about = {"results": [asdict(result) for result in results], "recipe": asdict(recipe), "options": told,
             "data_fingerprint": fingerprints, "hardware": hardware(torch.device(device), 1), **provenance()}
    atomic_write(output / "results.csv", results_csv(results).encode())
    write_json(output / "results.json", about)
    atomic_write(output / "results.png", figure_bytes(results_figure(results, classes)))
    print(results_table(results))
    published = "; ".join(f"{name} {' / '.join(f'{top1:.2f}' for top1 in by_layer.values())}"
                          for name, by_layer in PUBLISHED.items())
    print(f"top-1 in percent, one run each; published on ImageNet, layers 16, 17, 18: {published}")
    print("written:", *(output / f"results.{suffix}" for suffix in ("csv", "json", "png")))
