"""The example over CPython's own text, experiments/next_character.py: it learns, and no character reads a later one."""
from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch

example = runpy.run_path(str(Path(__file__).parents[2] / "experiments" / "next_character.py"))


@pytest.mark.parametrize("beta", [None, 0.5])
def test_no_character_reads_a_later_one_or_padding(beta):
    torch.manual_seed(0)
    model = example["Decoder"](20, beta, width=16, depth=2, num_heads=2).double()
    text = torch.randint(20, (2, 12))
    whole = model(text)
    for t in range(12):
        other = text.clone()
        other[:, t] = (other[:, t] + 7) % 20
        changed = (model(other) - whole).abs().amax((0, 2)) > 0
        assert not changed[:t].any() and changed[t]
    for more in (1, 5):
        longer = torch.cat([text, torch.randint(20, (2, more))], 1)
        padding = torch.arange(12 + more) >= torch.tensor([[12], [12]])
        torch.testing.assert_close(model(longer, padding)[:, :12], whole)


def test_decoders_learn_text_and_are_judged_by_each_character_once():
    text, held_out, characters = example["load_text"]()
    assert len(held_out) > 10 and 60 < characters < 200 and text.max() < characters
    torch.manual_seed(0)
    model = example["Decoder"](characters, 0.5, width=16, depth=1, num_heads=2)
    losses = example["train"](model, text[:20_000], seed=0, updates=40)
    assert sum(losses[-5:]) / 5 < 0.85 * losses[0]
    window, one = example["WINDOW"], held_out[0][:250]
    with torch.no_grad():
        by_hand = [torch.nn.functional.cross_entropy(model(part[None, :-1])[0], part[1:], reduction="sum")
                   for part in one.split(window)]
    expected = sum(by_hand).item() / (250 - len(by_hand)) / torch.log(torch.tensor(2.0)).item()
    assert example["bits"](model, [one]) == pytest.approx(expected, rel=1e-5)
