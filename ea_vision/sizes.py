"""Names, weights, parameters, arithmetic and attention maps of networks.

    ea-vision models                                # our networks: name, input, weights, description
    ea-vision models ea_aa resnet50.a1_in1k         # those with a part of their name; weights of timm's by their tag
    ea-vision models --sizes ea_aa_resnet50 resnet50                      # parameters, GMACs, maps; timm's too

A word is a network's name or any part of one of our names, with *, ? or [...]. Weights from a hub are timm's: the
network starts with the outputs of timm's network and has not been fine-tuned.

GMACs are the multiply-adds for one image, each counted once. The papers' ways of counting FLOPs, and every
attention branch by itself, are in experiments/counting.py.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache, partial

import timm
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from ea_vision.base.errors import CommandParser, UsageError, near_matches
from ea_vision.base.tables import markdown
from ea_vision.layers import AugmentedConv2d, MapsAttention
from ea_vision.models import get_network, list_networks
from ea_vision.models.inputs import built_size
from ea_vision.models.modes import evaluating
from ea_vision.ops import use_implementation
from ea_vision.zoo.create import create
from ea_vision.zoo.source import is_target, source_of

BMM = torch.ops.aten.bmm


@dataclass(frozen=True)
class Counts:
    """What a network has and computes for one image.

    Attributes:
        params: of the network.
        macs: all multiply-adds.
        attention_macs: those of the attention products.
        maps: (K, H, W) of each attention layer of ours, by its name; (K, 1, tokens) in a vision transformer.
        operations: module, with its class's name in front -> kind of operation -> number, 2 for a multiply-add, as
            torch counts them in reference code; "Global" has all.
    """

    params: int
    macs: int
    attention_macs: int
    maps: dict[str, tuple[int, int, int]]
    operations: dict[str, dict]


def count(model: nn.Module, input_size: tuple[int, int, int]) -> Counts:
    """Run the model on one image of (C, H, W), the size that it is built for, in reference code, and count.

    On the meta device only shapes are computed, and the counts are the same.

    Attention of other packages has no maps here; its batched products count as attention products.
    The reference multiplies whole maps even for windows; the products of windows are counted instead.
    """
    maps: dict[str, tuple[int, int, int]] = {}
    hooks = []
    for name, layer in model.named_modules():
        if isinstance(layer, AugmentedConv2d):
            maps[name] = (layer.num_heads, *layer.feat_size)
        elif isinstance(layer, MapsAttention):
            hooks.append(layer.register_forward_pre_hook(partial(_note_tokens, maps, name)))
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
    operations = counter.get_flop_counts()
    missed = 0
    for name, layer in model.named_modules():
        if isinstance(layer, AugmentedConv2d):
            missed += missed_operations(layer, operations[f"{type(model).__name__}.{name}"])
    whole = operations["Global"]
    return Counts(
        params=sum(parameter.numel() for parameter in model.parameters()),
        macs=(sum(whole.values()) + missed) // 2,
        attention_macs=(whole.get(BMM, 0) + missed) // 2,
        maps=maps,
        operations=operations,
    )


def _note_tokens(maps: dict, name: str, layer: nn.Module, args: tuple) -> None:
    maps[name] = (layer.num_heads, 1, args[0].shape[1])


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
    """Return the networks that words name, or of whose names they are a part; without a word, all of ours.

    Raises:
        UsageError: a word that fits none.
    """
    names = []
    for word in words or [""]:
        if is_target(word):
            names.append(word)
            continue
        fitting = [name for name in list_networks() if fnmatch(name, f"*{word}*")]
        if not fitting:
            near = near_matches(word, list_networks(), "networks")
            raise UsageError(f"no network fits {word!r}; {near}")
        names += fitting
    return list(dict.fromkeys(names))


def list_models(names: Sequence[str]) -> list[dict[str, str]]:
    """Return one row per network.

    Raises:
        UsageError: no such weights; a run, a file or a hub's model, which --sizes alone takes.
    """
    tags = defaultdict(list)
    for full in timm.list_pretrained():
        name, _, tag = full.partition(".")
        tags[name].append(tag)
    rows = []
    for name in names:
        if not timm.is_model(name):
            raise UsageError(f"the list is of networks by name; {name} needs --sizes")
        plain, _, tag = name.partition(".")
        if tag and tag not in tags[plain]:
            near = near_matches(tag, tags[plain], "weights") if tags[plain] else "it has none"
            raise UsageError(f"{plain} has no weights {tag!r}; {near}")
        _, height, width = timm.get_pretrained_cfg(name).input_size
        first, *others = [tag] if tag else tags[plain] or [""]
        row = {
            "model": name,
            "input": f"{height}x{width}",
            "weights": f"{first} and {len(others)} more" if others else first,
            "what it is": get_network(plain).about if plain in list_networks() else "of timm",
        }
        rows.append(row)
    return rows


def sizes_of(name: str) -> dict[str, str]:
    """Return a row of --sizes; maps are layers x heads x (height x width) of each shape of map, in order."""
    (_, height, width), counts = count_network(name)
    shapes = Counter(counts.maps.values())
    maps = [f"{number} x {K} x ({H}x{W})" for (K, H, W), number in shapes.items()]
    return {
        "model": name,
        "input": f"{height}x{width}",
        "params M": f"{counts.params / 1e6:.2f}",
        "GMACs": f"{counts.macs / 1e9:.2f}",
        "layers": str(len(counts.maps)),
        "maps": " + ".join(maps),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table of networks that the arguments ask for."""
    parser = CommandParser(description=__doc__)
    parser.add_argument(
        "models", nargs="*", metavar="NAME", help="names or parts of names (default: all of ours)"
    )
    parser.add_argument(
        "--sizes", action="store_true", help="parameters, arithmetic and attention maps"
    )
    args = parser.parse_args(argv)
    names = names_of(args.models)
    rows = list(map(sizes_of, names)) if args.sizes else list_models(names)
    print(markdown([list(rows[0]), *(list(row.values()) for row in rows)]))
    return 0
