"""The table of docs/record.md: what the recorder and `evolve` make of each architecture in timm, one name each.

`python -m tests.recorder.test_architectures` prints the table anew, names of architectures that it lacks included.
Networks lie on the device "meta": shapes say all that is asked here, and no weight takes memory.
"""
import re
import warnings
from pathlib import Path

import pytest
import timm
import torch

from ea_vision.models.any_transformer import reason_against
from ea_vision.recorder.recording import record_attention, recordable_layers

PAGE = Path(__file__).parents[2] / "docs" / "record.md"
ROW = re.compile(r"^\| (\w+) \| `([\w.]+)` \| ([^|]+) \| ([^|]+) \|$", re.MULTILINE)
NONE = re.compile(r"^No attention map: (.*)\.$", re.MULTILINE)
REASONS = {  # what the error says: what the table says
    "and forms several": "refused: a layer forms several maps",
    "must attend over": "refused: its tokens are no grid over the image",
    "must form maps of": "refused: what it forms is not (images, heads, queries, keys)",
    "no map went through": "refused: no softmax over keys (linear attention)",
}


def verdict(name: str) -> str:
    """Record a network; return what its maps are, or why it is refused; "" for one without attention layers."""
    with torch.device("meta"):
        model = timm.create_model(name).eval()
    found = recordable_layers(model)
    if not found:
        return ""
    size = timm.data.resolve_model_data_config(model)["input_size"]
    try:
        with torch.no_grad(), record_attention(model) as maps:
            model(torch.empty(1, *size, device="meta"))
    except (ValueError, RuntimeError) as error:
        [reason] = [text for said, text in REASONS.items() if said in str(error)]
        return reason
    assert list(maps) == [layer.number for layer in found]
    layers, said = list(maps.values()), [f"{len(maps)} layers" if len(maps) > 1 else "1 layer"]
    for text, applies in (
            ("in windows", any(layer.layout.windows is not None for layer in layers)),
            ("of channels", any(layer.channels for layer in layers)),
            ("reduced keys", any(layer.key_size != layer.feat_size for layer in layers)),
            ("talking heads", any("mixed_attn" in layer.parts for layer in found)),
            ("class attention", any(not (layer.channels or layer.pixels_ask or layer.layout.query_names)
                                    for layer in layers)),
            ("pooling", any(layer.pools for layer in found))):
        said += [text] if applies else []
    prefix = max((layer.prefix_names for layer in layers), key=len)
    return ", ".join([*said, *prefix])


def evolves(name: str) -> str:
    """Return whether `evolve` takes a network, or "no" and the class that it refuses."""
    with torch.device("meta"):
        model = timm.create_model(name)
    return f"no: {type(model).__name__}" if reason_against(model) else "yes"


def architectures() -> dict[str, str]:
    """Return a small model's name for each of timm's modules."""
    names = {}
    for module in timm.list_modules():
        own = [name for name in timm.list_models(module=module)
               if timm.model_entrypoint(name).__module__.startswith("timm.")]
        if own:
            small = [name for name in own if re.search(r"tiny|nano|small|_xxs|_s\b", name)] or own
            names[module] = min(small, key=lambda name: (len(name), name))
    return names


def on_page() -> tuple[dict[str, tuple[str, str, str]], set[str]]:
    """Return the table, module and both verdicts by name, and the names of the modules that have no map."""
    text = PAGE.read_text()
    rows = {name: (module, said, takes) for module, name, said, takes in ROW.findall(text)}
    return rows, set(NONE.search(text)[1].split(", "))


@pytest.mark.slow
def test_the_table_of_architectures_is_what_the_recorder_does():
    table, without = on_page()
    known, listed = architectures(), {module for module, *_ in table.values()}
    assert not set(known) - listed - without and not listed & without and len(listed) > 40
    wrong = {name: found for name, (_, *said) in table.items() if timm.is_model(name) and
             (found := [verdict(name), evolves(name)]) != said}
    assert not wrong
    assert not {module: found for module in without & set(known) if (found := verdict(known[module]))}


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    names = {name: module for name, (module, *_) in on_page()[0].items()}
    names |= {name: module for module, name in architectures().items() if module not in names.values()}
    verdicts = {name: verdict(name) for name in names}
    print(*sorted(f"| {names[name]} | `{name}` | {said} | {evolves(name)} |"
                  for name, said in verdicts.items() if said), sep="\n")
    print(f"\nNo attention map: {', '.join(sorted(names[name] for name, said in verdicts.items() if not said))}.")
