"""Faithfulness of rankings: patches of known weights, ties, and the script from end to end."""

from functools import partial

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from ea_vision.recorder.probe import untrained_network
from ea_vision.zoo.loaded import load_model
from experiments import faithfulness
from experiments.faithfulness import centre_source, gradient_source, main, measure, order_of
from tests.refused import refused


def test_patches_by_hand():
    """On a 2x2 grid with known probabilities: the class's logit is the sum of the weights of the visible patches."""
    weights = torch.tensor([[3.0, -1.0], [0.5, 2.0]])

    def predict(batch):
        shown = F.adaptive_avg_pool2d(batch.mean(1, keepdim=True), 2)[:, 0]
        logit = (shown * weights).sum((1, 2))
        return torch.stack([logit, torch.zeros_like(logit)], dim=1)

    def by_weights(*_):
        return {"weights": weights[None]}

    gradient_ranking = partial(gradient_source, predict, (0, 0, 0), (2, 2))
    images = torch.full((2, 3, 4, 6), 255, dtype=torch.uint8)
    options = dict(mean=(0, 0, 0), steps=4, batch_size=1)
    curves, same = measure(predict, images, [by_weights, gradient_ranking], (2, 2), **options)
    assert torch.equal(curves.removed, same.removed), "a linear network's gradient is its weights"
    assert curves.counts == (1, 2, 3)
    assert curves.bins == (1, 1, 1, 1, 2)
    p = torch.sigmoid(torch.tensor([4.5, 1.5, -0.5, -1.0, 0.0]))  # 3, 2, 0.5, -1 are removed
    q = torch.sigmoid(torch.tensor([0.0, 3.0, 5.0, 5.5, 4.5]))  # they are added
    assert_close(curves.curve("deletion"), p.expand(2, -1))
    assert_close(curves.curve("insertion"), q.expand(2, -1))
    expected = {
        "comprehensiveness": p[0] - (4 * p[1] + p[2]) / 5,
        "sufficiency": p[0] - (4 * q[1] + q[2]) / 5,
        "deletion": torch.trapezoid(p, dx=1 / 4),
        "insertion": torch.trapezoid(q, dx=1 / 4),
    }
    first_image = {name: score[0] for name, score in curves.scores().items()}
    assert_close(first_image, expected)


def test_orders_and_ties():
    ties = torch.tensor([[2, 0, 3, 1]])
    ranking = torch.tensor([[[1.0, 5.0], [1.0, 1.0]]])
    assert order_of(ranking, (2, 2), ties).tolist() == [[1, 2, 0, 3]]
    finer = torch.arange(16.0).view(1, 4, 4)  # it is reduced to the grid
    assert order_of(finer, (2, 2), ties).tolist() == [[3, 2, 1, 0]]
    centre = centre_source((3, 3), torch.zeros(2, 3, 9, 9), None)["centre"]
    highest = centre.flatten(1).argmax(1)
    assert highest.tolist() == [4, 4]


def test_the_script(tmp_path, capsys, monkeypatch):
    load_narrow = partial(load_model, random=True, widths=[8, 8, 16, 16])
    monkeypatch.setattr(faithfulness, "load_model", load_narrow)
    monkeypatch.setattr(faithfulness, "untrained_network", partial(untrained_network, count=4))
    layers = ["layer 3", "layer 6", "rollout", "layer 3, untrained", "layer 6, untrained"]
    names = [*layers, "gradient", "centre", "random"]
    rankings = "random,layers,rollout,gradient,centre,untrained-layers"
    options = "--img-size 16 --limit 3 --steps 2 --layers 3,6".split()
    assert main([*options, "--rankings", rankings, "-o", str(tmp_path)]) == 0
    rows = pd.read_csv(tmp_path / "results.csv").set_index("ranking")
    curves = pd.read_csv(tmp_path / "curves.csv")
    assert rows.index.tolist() == names
    assert set(rows["images"]) == {3}
    areas = {}
    for name, curve in curves.groupby("ranking"):
        areas[name] = np.trapezoid(curve["deletion"], curve["share"])
    assert rows["deletion"].to_dict() == pytest.approx(areas, abs=1e-5)
    assert (tmp_path / "results.png").stat().st_size > 10_000
    assert "layer 6, untrained" in capsys.readouterr().out
    with refused("--rankings must be some of layers, rollout, random"):
        main(["--rankings", "layers,best"])
