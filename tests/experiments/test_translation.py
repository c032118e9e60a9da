"""The smoke test of translation: numbers in words, and the page has the figures of the rows."""

import pytest
import torch

from experiments.text import translation
from tests.experiments.pages import page_says, table


def test_numbers_in_words():
    words = {
        0: "zero",
        40: "forty",
        99: "ninety nine",
        600: "six hundred",
        1205: "one thousand two hundred and five",
        7010: "seven thousand and ten",
        9999: "nine thousand nine hundred and ninety nine",
    }
    assert {number: " ".join(translation.in_words(number)) for number in words} == words
    every = [tuple(translation.in_words(number)) for number in range(translation.NUMBERS)]
    assert len(set(every)) == translation.NUMBERS


@pytest.mark.parametrize("network", translation.NETWORKS)
def test_networks_learn_numbers_and_write_them(network):
    model = translation.create(network)
    assert any("maps." in name for name in model.state_dict()) == (network != "none")
    losses = translation.train(model, torch.arange(8), 60)
    assert losses[-1] < 0.5 * losses[0]
    numbers = [2, 305]
    written = translation.translate(model, numbers, use_cache=network != "EA")
    assert written == translation.translate(model, numbers, use_cache=False)


def test_the_page_has_the_rows():
    rows = table("translation.csv").set_index("network")
    assert list(rows.index) == list(translation.NETWORKS)
    assert (rows["steps"] == translation.STEPS).all()
    assert (rows["last_loss"] < 0.1 * rows["first_loss"]).all()
    percentages = [f"{rows.loc[name, 'right_percent']:.1f}%" for name in translation.NETWORKS]
    page_says("experiments/text/README.md", "", *percentages)
