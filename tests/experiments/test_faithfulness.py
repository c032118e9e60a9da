"""Faithfulness of rankings: a class that depends on one marked patch, closed forms, and the script from end to end."""
from functools import partial

import numpy as np
import pandas as pd
import pytest
import timm
import torch
import torch.nn.functional as F
from torch import nn

from ea_vision.base.errors import UsageError
from ea_vision.layers import AugmentedConv2d
from ea_vision.recorder.loading import LoadedModel, load_model
from ea_vision.recorder.probe import untrained_network
from experiments import faithfulness
from experiments.faithfulness import (
    attention_source,
    centre_source,
    gradient_source,
    main,
    measure,
    order_of,
    random_source,
)

GREY = (0.5, 0.5, 0.5)
GRID = (8, 8)


class Marked(nn.Module):
    """The class is the colour of one marked patch, red or blue on grey; its attention looks at what is coloured."""

    def __init__(self):
        super().__init__()
        self.attn = AugmentedConv2d(3, 3, dim_qk=1, dim_v=1, num_heads=1, feat_size=GRID, position="none")
        with torch.no_grad():
            for parameter in self.attn.qkv.parameters():
                parameter.zero_()
            self.attn.qkv.bias[0] = 1.0  # each query asks for
            self.attn.qkv.weight[1, 1] = 60.0  # green, which both marks have

    def forward(self, x):
        patches = F.avg_pool2d(x, 4)
        self.attn(patches)  # looked at, and left out of the class: what the class depends on is known
        colour = (patches[:, 0] - patches[:, 2]).flatten(1).sum(1)
        return torch.stack([colour, -colour], dim=1) * 3


def marked_images(count: int) -> torch.Tensor:
    """Return uint8 images, grey but for a patch in an eighth of the side."""
    random = np.random.default_rng(0)
    images = torch.full((count, 3, 32, 32), 128, dtype=torch.uint8)
    for image, (row, col), red in zip(images, random.integers(8, size=(count, 2)) * 4, random.random(count) < 0.5,
                                      strict=True):
        image[:, row:row + 4, col:col + 4] = torch.tensor([255, 255, 0] if red else [0, 255, 255]).view(3, 1, 1)
    return images


def loaded(model: nn.Module, size: int = 32) -> LoadedModel:
    return LoadedModel(model.eval(), "marked", (size, size), {"mean": GREY, "std": (1.0, 1.0, 1.0)})


def test_rankings_score_as_well_as_can_be_and_at_random_near_chance():
    """256 marked images: by attention to the mark and by the gradient the class falls within the first patch; at random
    the mark is among the first n of N patches with probability n / N."""
    model = loaded(Marked())

    def predict(batch):
        return model.model(model.normalize(batch))

    sources = [attention_source(model, [1], ["layers"]), partial(gradient_source, predict, GREY, GRID), random_source]
    by_attention, by_gradient, at_random = measure(predict, marked_images(256), sources, GRID, mean=GREY, steps=8,
                                                   batch_size=100)
    for curves in (by_attention, by_gradient):
        assert curves.whole.min() > 0.99  # the probability of the class, and a half without the mark
        torch.testing.assert_close(curves.empty, torch.full((256,), 0.5), atol=1e-3, rtol=0)
        best, scores = curves.whole - curves.empty, curves.scores()
        for name, expected in (("comprehensiveness", best), ("sufficiency", 0 * best),
                               ("deletion", curves.empty + best / 128), ("insertion", curves.whole - best / 128)):
            torch.testing.assert_close(scores[name], expected, atol=1e-6, rtol=1e-5)
    row = at_random.row()
    assert at_random.bins == (1, 3, 6, 13, 32) and at_random.counts == (1, 3, 6, 8, 13, 16, 24, 32, 40, 48, 56)
    chance, best = np.mean(at_random.bins) / 64, (at_random.whole - at_random.empty).mean().item()
    middle = at_random.empty.mean() + best / 2
    for score, expected in (("comprehensiveness", chance * best), ("sufficiency", (1 - chance) * best),
                            ("deletion", middle), ("insertion", middle)):
        assert abs(row[score] - expected) < 4 * row[f"{score}_se"] < 0.1


def test_patches_by_hand():
    """A 2x2 grid whose probability is known: the class's logit is the sum of a weight a patch, over what is shown."""
    weights = torch.tensor([[3.0, -1.0], [0.5, 2.0]])

    def predict(batch):
        shown = F.adaptive_avg_pool2d(batch.mean(1, keepdim=True), 2)[:, 0]
        logit = (shown * weights).sum((1, 2))
        return torch.stack([logit, torch.zeros_like(logit)], dim=1)

    images = torch.full((1, 3, 4, 6), 255, dtype=torch.uint8)
    [curves] = measure(predict, images, [lambda *_: {"weights": weights[None]}], (2, 2), mean=(0, 0, 0), steps=4)
    assert curves.counts == (1, 2, 3) and curves.bins == (1, 1, 1, 1, 2)
    p = torch.sigmoid(torch.tensor([4.5, 1.5, -0.5, -1.0, 0.0]))  # as 3, 2, 0.5, -1 go
    q = torch.sigmoid(torch.tensor([0.0, 3.0, 5.0, 5.5, 4.5]))  # as they come
    torch.testing.assert_close(curves.curve("deletion")[0], p)
    torch.testing.assert_close(curves.curve("insertion")[0], q)
    by_hand = {"comprehensiveness": p[0] - (4 * p[1] + p[2]) / 5, "sufficiency": p[0] - (4 * q[1] + q[2]) / 5,
               **{name: (x[0] / 2 + x[1:4].sum() + x[4] / 2) / 4 for name, x in (("deletion", p), ("insertion", q))}}
    torch.testing.assert_close({name: score[0] for name, score in curves.scores().items()}, by_hand)


def test_orders_and_ties():
    ties = torch.tensor([[2, 0, 3, 1]])
    assert order_of(torch.tensor([[[1.0, 5.0], [1.0, 1.0]]]), (2, 2), ties).tolist() == [[1, 2, 0, 3]]
    assert order_of(torch.arange(16.0).view(1, 4, 4), (2, 2), ties).tolist() == [[3, 2, 1, 0]]  # reduced to the grid
    centre = centre_source((3, 3), torch.zeros(2, 3, 9, 9), None)["centre"]
    assert centre.flatten(1).argmax(1).tolist() == [4, 4]


def test_a_class_token_ranks_where_the_classifier_reads_it():
    by_pool = []
    for pool in ("token", "avg"):
        torch.manual_seed(0)
        vit = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, embed_dim=24, num_heads=3,
                                global_pool=pool).eval()
        by_pool.append(attention_source(loaded(vit), [1, 2])(torch.rand(2, 3, 32, 32), None))
    by_token, by_all = by_pool
    assert by_token["layer 2"].shape == (2, 2, 2) and list(by_token) == ["layer 1", "layer 2", "rollout"]
    assert not torch.allclose(by_token["layer 2"], by_all["layer 2"])
    sums = by_token["rollout"].sum((1, 2))
    assert ((0 < sums) & (sums < 1)).all()  # the rest is the token's own


def test_the_script(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(faithfulness, "load_model", lambda target, **keywords: load_model(
        target, random=True, widths=[8, 8, 16, 16], **keywords))
    monkeypatch.setattr(faithfulness, "untrained_network", partial(untrained_network, count=4))
    names = ["layer 3", "layer 6", "rollout", "layer 3, untrained", "layer 6, untrained", "gradient", "centre",
             "random"]
    assert main(["--img-size", "16", "--limit", "3", "--steps", "2", "--layers", "3,6", "--rankings",
                 "random,layers,rollout,gradient,centre,untrained-layers", "-o", str(tmp_path)]) == 0
    rows, curves = pd.read_csv(tmp_path / "results.csv"), pd.read_csv(tmp_path / "curves.csv")
    assert rows["ranking"].tolist() == names and set(rows["images"]) == {3}
    for row in rows.itertuples():
        of = curves[curves["ranking"] == row.ranking]
        assert row.deletion == pytest.approx(np.trapezoid(of["deletion"], of["share"]), abs=1e-5)
    assert (tmp_path / "results.png").stat().st_size > 10_000 and "layer 6, untrained" in capsys.readouterr().out
    with pytest.raises(UsageError, match="--rankings must be some of layers, rollout, random"):
        main(["--rankings", "layers,best"])
