"""The table of docs/record.md: whether the recorder and `evolve` take each architecture of timm, one network each.

    python -m experiments.architectures    # prints the table anew, with architectures that it lacks

Networks are on the device "meta": shapes are sufficient here, and weights take no memory.
"""

import re
import warnings
from collections import defaultdict
from pathlib import Path

import timm
import torch

from ea_vision.models.any_transformer import reason_against
from ea_vision.recorder.recording import LayerMaps, record_attention, recordable_layers

PAGE = Path(__file__).resolve().parents[1] / "docs" / "record.md"
ROW = re.compile(r"^\| ([^|]+) \| (yes|no) \| (`[^|]+`) \|$", re.MULTILINE)
REASONS = {  # part of the error message -> text in the table
    "and forms several": "refused: a layer forms several maps",
    "must attend over": "refused: its tokens form no grid over the image",
    "must form maps of": "refused: its maps are not (images, heads, queries, keys)",
    "no map went through": "refused: no softmax over keys (linear attention)",
}


def of_class(layer: LayerMaps) -> bool:
    return not (layer.channels or layer.pixels_ask or layer.layout.query_names)


def verdict(name: str) -> str:
    """Record a network; return a description of its maps, or why it is refused; "" without attention layers."""
    with torch.device("meta"):
        model = timm.create_model(name).eval()
    recordable = recordable_layers(model)
    if not recordable:
        return ""
    size = timm.data.resolve_model_data_config(model)["input_size"]
    try:
        with torch.no_grad(), record_attention(model) as maps:
            model(torch.empty(1, *size, device="meta"))
    except (ValueError, RuntimeError) as error:
        [reason] = [text for said, text in REASONS.items() if said in str(error)]
        return reason
    assert list(maps) == [layer.number for layer in recordable]
    layers = maps.values()
    if any(layer.layout.placeless for layer in layers):
        return "tokens without places"
    applies = {
        "in windows": any(layer.layout.windows is not None for layer in layers),
        "of channels": any(layer.channels for layer in layers),
        "reduced keys": any(layer.key_size != layer.feat_size for layer in layers),
        "talking heads": any("mixed_attn" in layer.parts for layer in recordable),
        "class attention": any(of_class(layer) for layer in layers),
        "pooling": any(layer.pools for layer in recordable),
    }
    return ", ".join(text for text in applies if applies[text]) or "of all tokens"


def evolves(name: str) -> str:
    """Return whether `evolve` takes a network."""
    with torch.device("meta"):
        return "no" if reason_against(timm.create_model(name)) else "yes"


def architectures() -> dict[str, str]:
    """Return a small model's name for each of timm's modules."""
    names = {}
    for module in timm.list_modules():
        architecture_names = []
        for name in timm.list_models(module=module):
            if timm.model_entrypoint(name).__module__.startswith("timm."):
                architecture_names.append(name)
        small = [
            name for name in architecture_names if re.search(r"tiny|nano|small|_xxs|_s\b", name)
        ]
        if architecture_names:
            names[module] = min(small or architecture_names, key=lambda name: (len(name), name))
    return names


def on_page() -> dict[str, tuple[str, str]]:
    """Return the table: both verdicts by name."""
    table = {}
    for said, takes, names in ROW.findall(PAGE.read_text(encoding="utf-8")):
        for name in names.split(", "):
            table[name.strip("`")] = (said, takes)
    return table


def known(table: dict[str, tuple[str, str]]) -> list[str]:
    """Return the table's names that the installed timm has."""
    return [name for name in table if timm.is_model(name)]


def lacking() -> list[str]:
    """Return one name for each architecture that the table lacks."""
    modules = [timm.model_entrypoint(name).__module__ for name in known(on_page())]
    listed = {module.rpartition(".")[2] for module in modules}
    return [name for module, name in architectures().items() if module not in listed]


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    groups = defaultdict(list)
    for name in sorted([*on_page(), *lacking()]):
        if said := verdict(name):
            groups[said, evolves(name)].append(f"`{name}`")
    for (said, takes), names in sorted(groups.items()):
        print(f"| {said} | {takes} | {', '.join(names)} |")
