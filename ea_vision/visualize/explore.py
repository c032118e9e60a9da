"""One HTML page in which a click on a pixel shows where every head of every layer looks.

The page contains images, maps and program (page_source/), so it needs no server and no network. For every map row (one
query) it stores the smallest value, a step, and 8-bit codes: value = low + step * code, which is off by at most half a
step, (largest - smallest of the row) / 510. In maps with values of -inf, as a mask gives to logits, code HIDDEN stands
for these, and steps are 255 / 254 as large. The mean over all queries is exact. Each image, model and part has one zlib
stream in base64; equal maps are stored once.
"""

import base64
import html
import io
import json
import logging
import math
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from tqdm import tqdm

import ea_vision
from ea_vision.base.errors import UsageError
from ea_vision.base.files import atomic_write
from ea_vision.ops import Size
from ea_vision.recorder.quantities import total_variation
from ea_vision.recorder.recording import PARTS, AttentionLayer, LayerMaps, prefix_names
from ea_vision.visualize.figure_options import DEMO, check_output, make_parser, models_of
from ea_vision.visualize.figure_request import (
    FigureRequest,
    Layers,
    Models,
    as_images,
    only,
    record,
    run_label,
)
from ea_vision.visualize.map_style import CHANGE_MAP, SIGNED_MAP, MapStyle, norm_of
from ea_vision.visualize.rollout import evidence_of
from ea_vision.visualize.strip import add_own_alone, convolved_parts, equation
from ea_vision.visualize.tiles import MEAN, OWN_ALONE, Recording, in_fog
from ea_vision.zoo.inputs import ImageSource, find_images, names_of, read_image
from ea_vision.zoo.loaded import LoadedModel

log = logging.getLogger(__name__)
EXAMPLES = """\
  ea-vision explore --model ea_conv_transformer_cifar -o page.html photo.jpg
  ea-vision explore --model runs/ea --model runs/aa -o page.html cat.png dog.png
  ea-vision explore --model ea_aa_resnet34 --layers 16-18 -o page.html photo.jpg
  ea-vision explore --model runs/ea --through checkpoints -o training.html photo.jpg
"""
MAX_MODELS = 3
SOURCE = Path(__file__).with_name("page_source")
# each module stands after those that it imports
FILES = ("page.html", "page.css", "maps.js", "state.js", "draw.js", "panel.js", "main.js")
STORED_PARTS = (*PARTS, OWN_ALONE)
DESCRIBED = ("imgSize", "prefix", "mixes", "layers")  # of a model, the same in all entries
DIFFERENCE = "difference"  # half the sum of |attention - own alone| of a query, 0 to 1
MEGABYTE = 1_000_000
LARGE = 10  # megabytes of a page
HIDDEN = 255  # the code of -inf
MOST_OBJECTS = 9  # of a detector, shown per image
LEAST_SCORE = 0.3
EVIDENCE_HEIGHT = 96  # pixels of a class's picture


# ---- images ---------------------------------------------------------------------------------------------------------


def data_url(pixels: np.ndarray, size: tuple[int, int] | None = None) -> str:
    """Return (H, W, 3) in 0..1 as a data: URL, small images as PNG, others as JPEG. size: its (width, height), if they
    change."""
    picture = Image.fromarray((pixels * 255).round().astype(np.uint8))
    picture = picture.resize(size or picture.size)
    data = io.BytesIO()
    kind = "png" if picture.width * picture.height <= 128 * 128 else "jpeg"
    picture.save(data, kind, quality=90, optimize=True)
    return f"data:image/{kind};base64,{_text_of(data.getvalue())}"


def _text_of(data: bytes) -> str:
    return base64.b64encode(data).decode()


# ---- maps -----------------------------------------------------------------------------------------------------------


def quantise(maps: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Round (K, T, N) to 256 even steps (255 beside -inf) from the smallest to the largest finite value of each row.

    Returns:
        low, step, float32 (K, T), and codes, uint8 (K, T, N): value = low + step * code, off by at most step / 2. In
        maps with -inf, code HIDDEN stands for it.

    Raises:
        UsageError: NaN or inf among the values.
    """
    hidden = np.isneginf(maps)
    wrong = np.count_nonzero(~np.isfinite(maps) & ~hidden)
    if wrong:
        raise UsageError(f"maps must be finite, got {wrong} values that are not")
    high = np.where(hidden.all(-1), np.float32(0), maps.max(-1))
    low = np.where(hidden, high[..., None], maps).min(-1)
    reach = high.astype(np.float64) - low
    steps = HIDDEN - 1 if hidden.any() else 255
    step = (reach / steps).astype(np.float32)
    divisor = np.where(step > 0, step, 1)
    codes = (maps - low[..., None]) / divisor[..., None]
    codes = codes.round().clip(0, steps)
    codes[hidden] = HIDDEN
    return low, step, codes.astype(np.uint8)


def pack(
    maps: dict[int, dict[str, np.ndarray]], prefix: int = 0
) -> tuple[dict[str, str], dict[int, dict[str, list]]]:
    """Compress maps into one stream per part; return the streams, and the offsets of each layer's maps.

    Args:
        maps: layer number -> part -> float32 (K, T, N), T >= N queries; DIFFERENCE (from `differences_of`) is stored
            without rounding.
        prefix: number of queries before those of the pixels.

    Returns:
        part -> base64 of a zlib stream; layer number -> part -> [part of the stream, offset in bytes], with HIDDEN if
        the map has values of -inf. At the offset stand low, step, the mean over the pixels' queries and the codes,
        padded to a multiple of 4 bytes. A map that equals one of an earlier part or layer refers to that one: EA's
        convolved logits are its logits where beta is 1, and a layer's previous logits are the logits of the layer
        before.
    """
    streams = {}
    places = {number: {} for number in maps}
    stored = {}
    for part in (*STORED_PARTS, DIFFERENCE):
        stream = bytearray()
        for number, parts in maps.items():
            if part not in parts:
                continue
            if part == DIFFERENCE:
                data = parts[part].tobytes()
            else:
                data = _packed(parts[part], prefix)
            if data not in stored:
                stored[data] = [part, len(stream)]
                if np.isneginf(parts[part]).any():
                    stored[data].append(HIDDEN)
                stream += data
            places[number][part] = stored[data]
        if stream:
            streams[part] = _text_of(zlib.compress(stream, 6))
    return streams, places


def _packed(maps: np.ndarray, prefix: int) -> bytes:
    low, step, codes = quantise(maps)
    means = maps[:, prefix:].mean(1, dtype=np.float64)  # (K, N)
    arrays = (low, step, means.astype(np.float32), codes)
    data = b"".join(array.tobytes() for array in arrays)
    return data + bytes(-len(data) % 4)


def differences_of(layer: LayerMaps, heads: Sequence[int], prefix: int) -> np.ndarray:
    """Return by how much a query's attention differs from that of own logits alone, float32 (K + 1, T + 1). The last
    row is the mean over heads, the last column the mean over the pixels' queries.

    Args:
        prefix: number of tokens before the pixels on the page; the layer may lack some, which get 0.
    """
    attn = layer["attn"][0, heads]
    differences = total_variation(attn, layer[OWN_ALONE][0, heads])
    differences = torch.cat([differences, differences.mean(0, keepdim=True)])
    pixel_mean = differences[:, layer.num_prefix_tokens :].mean(1, keepdim=True)
    missing = prefix - layer.num_prefix_tokens
    padded = nn.functional.pad(torch.cat([differences, pixel_mean], 1), (missing, 0))
    return padded.cpu().numpy().astype(np.float32)


# ---- the page's contents --------------------------------------------------------------------------------------------


@dataclass
class Explorer:
    """The models that a page shows, with their layers and heads.

    Attributes:
        models: one to three.
        layers: one list per model; see `recorder.selection.parse_layers`.
        heads: counted from 0; () means all.
    """

    models: Sequence[LoadedModel]
    layers: Sequence[Sequence[AttentionLayer]]
    heads: Sequence[int] = ()

    def view(
        self, name: str, image: Image.Image, models: Sequence[LoadedModel] | None = None
    ) -> dict:
        """Return an image's entry: its name, and for each model the photo, equation, predictions, streams and offsets
        of the maps.

        Args:
            models: the same models at another epoch; default: those of the explorer.

        Raises:
            UsageError: none of a model's layers has any of the parts.
        """
        pairs = zip(models or self.models, self.layers, strict=True)
        return {"name": name, "models": [self._view(image, *pair) for pair in pairs]}

    def _view(
        self, image: Image.Image, model: LoadedModel, chosen: Sequence[AttentionLayer]
    ) -> dict:
        seen = record(model, image, chosen, PARTS)
        add_own_alone(seen)
        prefix = len(prefix_names(model.model))
        layers = seen.maps
        maps = {number: self._arrays(layer, prefix) for number, layer in layers.items()}
        largest = {}
        for number, arrays in maps.items():
            if DIFFERENCE in arrays:
                differences = arrays[DIFFERENCE][:-1, prefix:-1]
                largest[number] = self._largest(seen.img_size, layers[number], differences)
        streams, places = pack(maps, prefix)
        if not model.classifies:
            predictions = _objects(seen.output, model, image)
        elif model.num_classes:
            logits = getattr(seen.output, "logits", seen.output)
            predictions = model.likeliest(logits[0].float().softmax(-1), 3)
            _add_evidence(predictions, seen)
        else:
            predictions = []
        return {
            "photo": data_url(seen.pixels()),
            "imgSize": seen.img_size,
            "equation": equation(model.model, chosen),
            "predictions": predictions,
            "prefix": prefix_names(model.model),
            "mixes": _mixes_own(model.model, chosen),
            "layers": [
                {
                    "number": layer.number,
                    "heads": self.heads_of(layers[layer.number]),
                    "evolves": "prev_logits" in layer.parts,
                }
                for layer in chosen
            ],
            "featSizes": {number: layer.feat_size for number, layer in layers.items()},
            "prefixes": {number: layer.num_prefix_tokens for number, layer in layers.items()},
            "shares": {number: _sums_to_one(layer) for number, layer in layers.items()},
            "keys": {number: _keys_of(layer) for number, layer in layers.items()},
            "largest": largest,
            "places": places,
            "streams": streams,
        }

    def heads_of(self, layer: LayerMaps) -> list[int]:
        """Return the heads of a layer that the page shows."""
        return list(self.heads or layer.heads)

    def _largest(self, img_size: Size, layer: LayerMaps, differences: np.ndarray) -> list[int]:
        """Return [head, y, x]: the head and the cell whose attention the previous map changes most. (y, x) is the
        middle of the cell in pixels of the image.

        Args:
            img_size: (height, width) of the image.
            differences: (K, N), by head and pixel's query.
        """
        index, cell = np.unravel_index(differences.argmax(), differences.shape)
        head = self.heads_of(layer)[index]
        H, W = layer.feat_size
        row, col = divmod(int(cell), W)
        y = (row + 0.5) * (img_size[0] / H)
        x = (col + 0.5) * (img_size[1] / W)
        return [head, int(y), int(x)]

    def _arrays(self, layer: LayerMaps, prefix: int) -> dict[str, np.ndarray]:
        """Return each recorded part as (K, T, N): one row per token, prefix tokens first, over N pixels. A layer that
        runs before a prefix token is added has zeros in the row of that token."""
        missing = prefix - layer.num_prefix_tokens
        heads = self.heads_of(layer)
        arrays = {}
        for part in STORED_PARTS:
            if part in layer.recorded():
                maps = layer.on_queries_grid(part)[0, heads, :, layer.num_prefix_tokens :]
                padded = nn.functional.pad(maps.float(), (0, 0, missing, 0))
                arrays[part] = padded.cpu().numpy()
        if OWN_ALONE in arrays:
            arrays[DIFFERENCE] = differences_of(layer, heads, prefix)
        return arrays


def _sums_to_one(layer: LayerMaps) -> bool:
    """Return whether each query's attention sums to 1: what is missing among the pixels is then the tokens' share."""
    sums = layer.attn.float().sum(-1)
    return bool((sums - 1).abs().max() < 0.01)


def _keys_of(layer: LayerMaps) -> list[int]:
    """Return how many keys each pixel's query sees; [n] if all see n. A reduced key counts once per cell that it
    covers."""
    P = layer.num_prefix_tokens
    cells = math.prod(layer.feat_size) // math.prod(layer.key_size)
    keys = (layer.num_keys().ravel() - P) * cells + P
    return [int(keys[0])] if (keys == keys[0]).all() else keys.tolist()


def _mixes_own(model: nn.Module, layers: Sequence[AttentionLayer]) -> bool:
    """Return whether the convolution's input includes the layer's own logits (EA), or only the previous ones (PA). True
    if no layer convolves."""
    parts = set().union(*(convolved_parts(model, layer) for layer in layers))
    return "self_logits" in parts or not parts


def _add_evidence(predictions: Sequence[dict], seen: Recording) -> None:
    """Add to each class a picture of the photo in fog where there is less of its evidence than on average. If the maps
    have no gradients, log why there is none."""
    norm = norm_of([np.ones(1)], MapStyle(style="fog"))
    height, width = seen.img_size
    size = (round(EVIDENCE_HEIGHT * width / height), EVIDENCE_HEIGHT)
    for prediction in predictions:
        try:
            values = evidence_of(seen, prediction["index"])
        except UsageError as error:
            log.warning("the page shows no evidence of classes: %s", error)
            return
        photo, _ = in_fog(seen.pixels(), values, norm)
        prediction["evidence"] = data_url(photo, size)


def _objects(
    output: Sequence[dict[str, Tensor]], model: LoadedModel, image: Image.Image
) -> list[dict]:
    """Return the objects with the highest scores: name, probability, and box (x1, y1, x2, y2) in pixels of the input,
    clipped to the area that the image fills."""
    [objects_found] = output
    scale = max(model.img_size) / max(image.size)
    corner = torch.tensor([image.width * scale, image.height * scale] * 2)
    objects_found = {**objects_found, "boxes": objects_found["boxes"].cpu().minimum(corner)}
    columns = [objects_found[key].tolist() for key in ("boxes", "scores", "labels")]
    objects = []
    for box, score, label in zip(*columns, strict=True):
        if score >= LEAST_SCORE and box[2] > box[0] and box[3] > box[1]:
            sides = [round(side, 2) for side in box]
            name = model.classes[label]
            objects.append({"name": name, "probability": round(score, 6), "box": sides})
    return objects[:MOST_OBJECTS]


# ---- the page -------------------------------------------------------------------------------------------------------


def json_script(value: Any, attributes: str) -> str:
    """Return a script element that holds `value` as JSON; < is escaped, so the data cannot close the element."""
    text = json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")
    return f'<script type="application/json" {attributes}>{text}</script>'


def table_of(name: str) -> str:
    """Return 256 colours of a matplotlib colour map, RGB, in base64."""
    colours = matplotlib.colormaps[name](range(256), bytes=True)
    return _text_of(colours[:, :3].tobytes())


def build_page(explorer: Explorer, entries: Sequence[dict], epochs: bool = False) -> str:
    """Return the whole page as text.

    Args:
        explorer: the models.
        entries: images, from `Explorer.view`.
        epochs: whether the entries show one image at several epochs of a run.
    """
    title = "Attention of " + ", ".join(model.label for model in explorer.models)
    models = []
    for model, view in zip(explorer.models, entries[0]["models"], strict=True):
        models.append({"label": model.label, **{name: view[name] for name in DESCRIBED}})
    about = {
        "models": models,
        "colours": table_of("viridis"),
        "signed": table_of(SIGNED_MAP),
        "changes": table_of(CHANGE_MAP),
        "epochs": epochs,
        "version": ea_vision.__version__,
    }
    scripts = [json_script(about, 'id="about"')]
    scripts += [json_script(entry, 'class="image"') for entry in entries]
    texts = [(SOURCE / name).read_text(encoding="utf-8") for name in FILES]
    template, style, *modules = texts
    # the modules become one program: imports between them are removed
    imports_and_exports = r'^(import [^;]*? from "\./[a-z]+\.js";\n|export )'
    program = re.sub(imports_and_exports, "", "\n".join(modules), flags=re.MULTILINE)
    fields = {
        "title": html.escape(title),
        "style": style,
        "data": "\n".join(scripts),
        "program": program,
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: fields[match[1]], template)


# ---- the command, notebooks -----------------------------------------------------------------------------------------


def make_explorer(
    models: Models, image: ImageSource, layers: Layers = None, heads: str = "all", **preprocessing
) -> Explorer:
    """Return an explorer of the given layers and heads.

    image: an image of the page, on which the models run, to find their heads and the layers whose queries are pixels.
    """
    request = FigureRequest(models, layers, heads, style_fields=(), **preprocessing)
    check_count(request.models)
    recordings = request.record(image)
    numbers = () if heads == "all" else request.heads(recordings)
    if MEAN in numbers:
        raise UsageError(f"--heads must be numbers or all (the page adds the mean), got {heads!r}")
    return Explorer(request.models, request.layers, numbers)


def check_count(models: Sequence[str | LoadedModel]) -> None:
    """Raise UsageError if a page has no room for so many models."""
    if len(models) > MAX_MODELS:
        raise UsageError(f"a page takes at most {MAX_MODELS} models, got {len(models)}")


@dataclass
class PageInNotebook:
    """A page that notebooks display.

    Attributes:
        text: the HTML.
        height: in pixels.
    """

    text: str = field(repr=False)
    height: int

    def _repr_html_(self) -> str:
        return (
            f'<iframe srcdoc="{html.escape(self.text)}" title="attention" style="width: 100%; border: 0; height: '
            f'{self.height}px"></iframe>'
        )


def show_page(
    models: Models,
    images: ImageSource | Sequence[ImageSource],
    layers: Layers = None,
    *,
    height: int = 720,
    **preprocessing,
) -> PageInNotebook:
    """Return the page of models and images, which a notebook displays inline.

    Args:
        models, layers: see `ea_vision.visualize.figure_request`.
        images: one or several: paths, PIL images or arrays.
        height: of the page in the notebook, in pixels.
        **preprocessing: mean, std, processor; see `ea_vision.visualize.figure_request`.

    Raises:
        UsageError: more than three models, or no image.
    """
    image_list = as_images(images)
    pictures = [read_image(image) for image in image_list]
    explorer = make_explorer(models, pictures[0], layers, **preprocessing)
    jobs = list(zip(names_of(image_list), pictures, strict=True))
    return PageInNotebook(_page_of(explorer, jobs), height)


def _page_of(explorer: Explorer, jobs: Sequence[tuple], epochs: bool = False) -> str:
    """Return the page of several images, or of one at several epochs, with a progress bar in a terminal.

    jobs: arguments of `Explorer.view`.
    """
    progress = tqdm(jobs, unit="image", disable=len(jobs) == 1 or None)
    return build_page(explorer, [explorer.view(*job) for job in progress], epochs)


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser(
        __doc__,
        EXAMPLES,
        output="attention.html",
        heads="all",
        queries=False,
        style=(),
        suffixes=(".html", ".htm"),
    )
    parser.add_argument(
        "--through",
        default="models",
        choices=("models", "checkpoints"),
        help="checkpoints: the *.ckpt and snapshots of one run, by a slider over its epochs (default: "
        "%(default)s)",
    )
    options = parser.parse_args(argv)
    output = check_output(Path(options.output), options.suffixes)
    paths = find_images(options.images)
    epochs = options.through == "checkpoints"
    if epochs:
        only(paths, "image")
    else:
        check_count(options.model or DEMO)
    pictures = [read_image(path) for path in paths]
    jobs = list(zip(names_of(paths), pictures, strict=True))
    models = models_of(options)
    if epochs:
        run = only(list(dict.fromkeys(map(run_label, models))), "run")
        jobs = [(f"epoch {model.epoch}", *pictures, [model]) for model in models]
        models = [replace(models[0], label=run)]
    explorer = make_explorer(models, pictures[0], options.layers, options.heads)
    page = _page_of(explorer, jobs, epochs).encode()
    atomic_write(output, page)
    size = len(page) / MEGABYTE
    hint = "; fewer --layers, --heads or images make it smaller" if size > LARGE else ""
    print(f"written: {output} ({size:.1f} MB{hint})")
    return 0
