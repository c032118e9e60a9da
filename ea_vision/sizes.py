"""Names, weights, parameters, arithmetic and attention maps of networks.

    ea-vision models                                # our networks: name, input, weights, description
    ea-vision models 'ea_*' --weights               # by pattern; one row per file of weights, with its origin
    ea-vision models --sizes ea_aa_resnet50 resnet50 --csv sizes.csv      # parameters, GMACs, maps; timm's too
    ea-vision models --layers aa_resnet50           # every attention branch (the AA paper's table 9)

A pattern has *, ? or [...]; a plain word is a network's name or any part of one of our names. Weights from a hub are
timm's: the network starts with the outputs of timm's network and has not been fine-tuned.

GMACs are the multiply-adds for one image, each counted once. --layers lists the maps of an image in bfloat16 as dense
attention keeps them (our kernels keep fewer), and parameters with the biases of the projections. The papers' ways of
counting FLOPs are in experiments/counting.py.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from functools import cache, partial
from pathlib import Path
from typing import Any

import timm
import torch
from timm.models import PretrainedCfg
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from ea_vision.base.errors import CommandParser, UsageError, near_matches
from ea_vision.base.files import atomic_write, check_output, csv_text
from ea_vision.base.tables import markdown
from ea_vision.layers import AugmentedConv2d, MapsAttention
from ea_vision.models import get_network, list_networks
from ea_vision.models.inputs import built_size
from ea_vision.models.modes import evaluating
from ea_vision.ops import Size, use_implementation
from ea_vision.zoo.create import create
from ea_vision.zoo.source import is_target, source_of

BFLOAT16 = 2  # bytes of a number
BMM = torch.ops.aten.bmm
SHIPPED = "comes with ea_vision"  # of weights


@dataclass(frozen=True)
class BranchCount:
    """An attention branch: an augmented convolution without its convolution, or a vision transformer's attention.

    Attributes:
        layer: name of the module.
        num_heads: K.
        feat_size: (H, W) of the map; (1, tokens) in a transformer.
        evolves: whether it uses the previous layer's maps.
        map_bytes: of K maps of N x N numbers in bfloat16, or of the part of them in a window.
        params: weights, including the evolution's.
    """

    layer: str
    num_heads: int
    feat_size: Size
    evolves: bool
    map_bytes: int
    params: int


@dataclass(frozen=True)
class Counts:
    """What a network has and computes for one image.

    Attributes:
        params: of the network.
        macs: all multiply-adds.
        attention_macs: those of the attention products.
        branches: the attention branches, in order.
    """

    params: int
    macs: int
    attention_macs: int
    branches: tuple[BranchCount, ...]


@dataclass(frozen=True)
class Operations:
    """The operations of a network in reference code, 2 for a multiply-add, as torch counts them.

    Attributes:
        modules: module, with its class's name in front -> kind of operation -> number; "Global" has all.
        tokens: number of tokens by name of a vision transformer's attention.
    """

    modules: dict[str, dict]
    tokens: dict[str, int]


def count(model: nn.Module, input_size: tuple[int, int, int]) -> Counts:
    """Run the model on one image of (C, H, W), the size that it is built for, in reference code, and count.

    On the meta device only shapes are computed, and the counts are the same.

    Attention of other packages has no branch here; its batched products count as attention products.
    The reference multiplies whole maps even for windows; the products of windows are counted instead.
    """
    return summarise(model, count_operations(model, input_size))


def summarise(model: nn.Module, operations: Operations) -> Counts:
    """Return the counts of a model with these operations."""
    branches = []
    missed = 0
    for name, layer in model.named_modules():
        if isinstance(layer, AugmentedConv2d):
            size = layer.feat_size
            elements = layer.map_elements(size)
            params = count_weights(layer)
            if layer.conv is not None:
                params -= layer.conv.weight.numel()
            missed += missed_operations(layer, operations.modules[f"{type(model).__name__}.{name}"])
        elif isinstance(layer, MapsAttention):
            size = (1, operations.tokens[name])
            elements = layer.num_heads * size[1] ** 2
            params = count_weights(layer)
        else:
            continue
        evolves = layer.evolution is not None
        branch = BranchCount(name, layer.num_heads, size, evolves, BFLOAT16 * elements, params)
        branches.append(branch)
    whole = operations.modules["Global"]
    return Counts(
        params=count_weights(model),
        macs=(sum(whole.values()) + missed) // 2,
        attention_macs=(whole.get(BMM, 0) + missed) // 2,
        branches=tuple(branches),
    )


def count_operations(model: nn.Module, input_size: tuple[int, int, int]) -> Operations:
    """Run a model on one image of (C, H, W) in reference code; return its operations."""
    tokens: dict[str, int] = {}
    hooks = []
    for name, layer in model.named_modules():
        if isinstance(layer, MapsAttention):
            note = partial(_note_tokens, tokens, name)
            hooks.append(layer.register_forward_pre_hook(note))
    image = next(model.parameters()).new_zeros(1, *input_size)
    counter = FlopCounterMode(display=False)
    # The counter does not know fused attention on a CPU nor, without gradients, that of nn.MultiheadAttention. It knows
    # the products of the plain form.
    plain = sdpa_kernel(SDPBackend.MATH)
    reference = use_implementation("reference")
    try:
        with reference, plain, torch.enable_grad(), evaluating(model), counter:
            model(image)
    finally:
        for hook in hooks:
            hook.remove()
    return Operations(counter.get_flop_counts(), tokens)


def _note_tokens(tokens: dict[str, int], name: str, layer: nn.Module, args: tuple) -> None:
    tokens[name] = args[0].shape[1]


def count_weights(module: nn.Module) -> int:
    """Return the number of a module's parameters."""
    return sum(parameter.numel() for parameter in module.parameters())


def position_operations(layer: AugmentedConv2d) -> int:
    """Return the operations of the relative position products, 2 for a multiply-add."""
    if layer.height_rel is None:
        return 0
    H, W = layer.feat_size
    offsets = len(layer.height_rel) + len(layer.width_rel)
    return 2 * H * W * offsets * layer.dim_qk


def missed_operations(layer: AugmentedConv2d, counted: dict) -> int:
    """Return how many operations of attention products torch does not count; negative if it counts too many."""
    H, W = layer.feat_size
    if layer.local and layer.evolution is None and not layer.need_logits:  # the window alone
        elements = layer.map_elements((H, W))
        products = 2 * elements * (layer.dim_head_qk + layer.dim_head_v)
        return position_operations(layer) + products - counted.get(BMM, 0)
    # torch multiplies heads of width 1 elementwise, which does not count as a product
    if layer.height_rel is not None and layer.dim_head_qk == 1:
        return 2 * H * W * (H + W) * layer.dim_qk
    return 0


@cache
def count_network(name: str) -> tuple[tuple[int, int, int], Counts]:
    """Build a network, by a name or a path that `source_of` knows, and count it.

    Returns:
        its input (C, H, W), and what was counted.

    Raises:
        UsageError: no such model, or a detector.
    """
    source = source_of(name)
    source.check_kind()
    with torch.device("meta"):
        model = create(source, random=True)
    size = model.default_cfg["input_size"]
    if source.kwargs:
        size = (size[0], *(built_size(model) or size[1:]))
    return size, count(model, size)


def names_of(words: Sequence[str]) -> list[str]:
    """Return the networks that match patterns, parts of names, names or paths; without any of these, all of ours.

    Raises:
        UsageError: a word that matches none.
    """
    names = []
    for word in words or ["*"]:
        if is_target(word):
            names.append(word)
            continue
        pattern = word if set(word) & set("*?[") else f"*{word}*"
        fitting = [name for name in list_networks() if fnmatch(name, pattern)]
        if not fitting:
            near = near_matches(word, list_networks(), "networks")
            raise UsageError(f"no network fits {word!r}; {near}")
        names += fitting
    return list(dict.fromkeys(names))


def list_models(names: Sequence[str], weights: bool = False) -> list[dict[str, str]]:
    """Return one row per network or, with `weights`, per file of weights with its origin. Rows of weights that come
    with the package are first.

    Raises:
        UsageError: no such weights; a run, a file or a hub's model, which --sizes and --layers alone take.
    """
    tagged_names = defaultdict(list)
    for full in timm.list_pretrained():
        tagged_names[full.partition(".")[0]].append(full)
    ours = list_networks()
    rows = []
    for name in names:
        if not timm.is_model(name):
            raise UsageError(f"the list is of networks by name; {name} needs --sizes or --layers")
        plain, _, tag = name.partition(".")
        tagged = tagged_names[plain]
        if tag:
            if name not in tagged:
                near = near_matches(name, tagged, "weights")
                raise UsageError(f"{plain} has no weights {tag!r}; {near}")
            tagged = [name]
        for full in tagged if weights else [name]:
            cfg = timm.get_pretrained_cfg(full)
            _, height, width = cfg.input_size
            about = "of timm"
            if plain in ours:
                of_weights = cfg.description if weights else None  # how to use a plain network's
                about = of_weights or get_network(plain).about
            row = {
                "model": full,
                "input": f"{height}x{width}",
                "weights": _source_of(cfg) if weights else _first_of(tagged),
                "what it is": about,
            }
            rows.append(row)
    return sorted(rows, key=lambda row: row["weights"] != SHIPPED)


def _source_of(cfg: PretrainedCfg) -> str:
    """Return the origin of weights."""
    return SHIPPED if cfg.file else f"hub: {cfg.hf_hub_id or cfg.url}"


def _first_of(tagged: Sequence[str]) -> str:
    """Return the tag of a network's first weights, and how many more there are."""
    if not tagged:
        return ""
    tag = tagged[0].partition(".")[2]
    return tag if len(tagged) == 1 else f"{tag} and {len(tagged) - 1} more"


def sizes_of(name: str) -> dict:
    """Return a row of --sizes; maps are layers x heads x (height x width) of each shape of map, in order."""
    (_, height, width), counts = count_network(name)
    shapes = Counter((branch.num_heads, *branch.feat_size) for branch in counts.branches)
    maps = [f"{number} x {K} x ({H}x{W})" for (K, H, W), number in shapes.items()]
    return {
        "model": name,
        "input": f"{height}x{width}",
        "params M": round(counts.params / 1e6, 4),
        "GMACs": round(counts.macs / 1e9, 4),
        "layers": len(counts.branches),
        "maps": " + ".join(maps),
    }


def layers_of(name: str) -> list[dict]:
    """Return the rows of --layers: a network's attention branches, their maps in bytes of bfloat16."""
    _, counts = count_network(name)
    rows = []
    for branch in counts.branches:
        height, width = branch.feat_size
        rows.append({"model": name, **asdict(branch), "feat_size": f"{height}x{width}"})
    return rows


def table(rows: Sequence[dict]) -> str:
    """Return rows as a Markdown table; floats have two decimals, and None becomes -."""
    lines = [list(rows[0])]
    for row in rows:
        lines.append([_shown(value) for value in row.values()])
    return markdown(lines)


def _shown(value: Any) -> str:
    """Return the text of a cell."""
    if value is None:
        return "-"
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table of networks that the arguments ask for."""
    parser = CommandParser(description=__doc__)
    parser.add_argument(
        "models", nargs="*", metavar="NAME", help="names or patterns (default: all of ours)"
    )
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--weights", action="store_true", help="one row per file of weights")
    kind.add_argument(
        "--sizes", action="store_true", help="parameters, arithmetic and attention maps"
    )
    kind.add_argument("--layers", action="store_true", help="one row per attention branch")
    parser.add_argument(
        "--csv",
        metavar="FILE",
        help="also write the rows to FILE ('-': to standard output instead of the table)",
    )
    args = parser.parse_args(argv)
    if args.csv not in (None, "-"):
        check_output(Path(args.csv))
    names = names_of(args.models)
    if args.layers:
        rows = []
        for name in names:
            rows += layers_of(name)
    elif args.sizes:
        rows = [sizes_of(name) for name in names]
    else:
        rows = list_models(names, args.weights)
    if not rows:
        missing = "weights" if args.weights else "our attention"
        raise UsageError(f"none of the {len(names)} networks has {missing}")
    if args.csv == "-":
        print(csv_text(rows), end="")
        return 0
    print(table(rows))
    if args.csv:
        atomic_write(Path(args.csv), csv_text(rows).encode())
        print(f"\nwritten: {args.csv}")
    return 0
