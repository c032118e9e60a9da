"""Faithfulness of rankings: a class that depends on one marked patch, closed forms, and the command from end to end."""
import csv
import json
import sys

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from torch import nn

from ea_vision.base.errors import UsageError, exit_code
from ea_vision.layers import AugmentedConv2d
from ea_vision.recorder.faithfulness import SHARES, counts_of, filled, measure_rankings, order_of, row_of
from ea_vision.recorder.loading import LoadedModel
from ea_vision.recorder.patch_rankings import (
    AttentionSource,
    CamSource,
    CentreSource,
    GradientSource,
    random_source,
)
from ea_vision.visualize import faithfulness_report
from ea_vision.visualize.faithfulness_report import faithfulness_figure

GREY = (0.5, 0.5, 0.5)
GRID = (8, 8)


class Marked(nn.Module):
    """The class is the colour of one marked patch, red or blue on grey; its attention looks at what is coloured."""

    def __init__(self, looks: float = 60.0):
        super().__init__()
        self.attn = AugmentedConv2d(3, 3, dim_qk=1, dim_v=1, num_heads=1, feat_size=GRID, position="none")
        with torch.no_grad():
            for parameter in self.attn.qkv.parameters():
                parameter.zero_()
            self.attn.qkv.bias[0] = 1.0  # each query asks for
            self.attn.qkv.weight[1, 1] = looks  # green, which both marks have

    def forward(self, x):
        patches = F.avg_pool2d(x, 4)
        self.attn(patches)  # looked at, and left out of the class: what the class hangs on is known
        colour = (patches[:, 0] - patches[:, 2]).flatten(1).sum(1)
        return torch.stack([colour, -colour], dim=1) * 3


def marked_images(count: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    """uint8 images, grey but for a patch in an eighth of the side, and where it is."""
    generator = torch.Generator().manual_seed(0)
    images = torch.full((count, 3, 32, 32), 127.5).round_().to(torch.uint8)
    place = torch.randint(64, (count,), generator=generator)
    for image, where, red in zip(images, place.tolist(), torch.rand(count, generator=generator) < 0.5, strict=True):
        row, col = where // 8 * 4, where % 8 * 4
        image[:, row:row + 4, col:col + 4] = torch.tensor([255, 255, 0] if red else [0, 255, 255]).view(3, 1, 1)
    return images, place


def loaded(model: nn.Module, size: int = 32) -> LoadedModel:
    return LoadedModel(model.eval(), "marked", (size, size), {"mean": GREY, "std": (1.0, 1.0, 1.0)})


@pytest.fixture(scope="module")
def oracle():
    """Rankings of 256 marked images by attention to the mark, the gradient, at random and wholly wrong."""
    images, place = marked_images(256)
    model = loaded(Marked())

    def predict(batch):
        return model.model(model.normalize(batch))

    def wrong(batch, classes):
        return {"wrong": -AttentionSource(model, [1], ["layers"])(batch, classes)["layer 1"]}

    sources = [AttentionSource(model, [1]), GradientSource(predict, GREY, GRID), random_source, wrong]
    curves = measure_rankings(predict, images, sources, GRID, mean=GREY, steps=8, batch_size=100)
    return {of.ranking: of for of in curves}


@pytest.mark.parametrize("ranking", ["layer 1", "layer 1, head 0", "rollout", "gradient"])
def test_the_right_ranking_scores_as_well_as_can_be(oracle, ranking):
    curves = oracle[ranking]
    assert curves.whole.min() > 0.99  # the probability of the class, and a half without the mark
    best = curves.whole - curves.empty
    torch.testing.assert_close(curves.empty, torch.full((256,), 0.5), atol=1e-3, rtol=0)
    torch.testing.assert_close(curves.comprehensiveness(), best)
    torch.testing.assert_close(curves.sufficiency(), torch.zeros(256), atol=1e-6, rtol=0)
    first = 1 / 64  # the class falls within the first patch
    torch.testing.assert_close(curves.deletion(), curves.empty + first / 2 * best)
    torch.testing.assert_close(curves.insertion(), curves.whole - first / 2 * best)


def test_the_wrong_ranking_scores_as_badly_as_can_be(oracle):
    curves = oracle["wrong"]
    torch.testing.assert_close(curves.comprehensiveness(), torch.zeros(256), atol=1e-6, rtol=0)
    torch.testing.assert_close(curves.sufficiency(), curves.whole - curves.empty)


def test_the_random_ranking_is_near_chance(oracle):
    """The mark is among the first n of N patches with probability n / N."""
    curves = oracle["random"]
    assert curves.bins == (1, 3, 6, 13, 32) and curves.counts == (1, 3, 6, 8, 13, 16, 24, 32, 40, 48, 56)
    chance, best = np.mean(curves.bins) / 64, (curves.whole - curves.empty).mean().item()
    row = row_of("marked", curves)
    middle = curves.empty.mean() + best / 2
    for score, expected in (("comprehensiveness", chance * best), ("sufficiency", (1 - chance) * best),
                            ("deletion", middle), ("insertion", middle)):
        assert abs(row[score] - expected) < 4 * row[f"{score}_se"] < 0.1


def test_a_map_that_knows_nothing_is_the_random_ranking():
    images, _ = marked_images(8)
    model = loaded(Marked(looks=0.0))
    uniform, chance = measure_rankings(lambda batch: model.model(model.normalize(batch)), images,
                                       [AttentionSource(model, [1], ["layers"]), random_source], GRID, mean=GREY)
    assert torch.equal(uniform.removed, chance.removed) and torch.equal(uniform.kept, chance.kept)


def test_patches_by_hand():
    """A 2x2 grid whose probability is known: the class's logit is the sum of a weight a patch, over what is shown."""
    weights = torch.tensor([[3.0, -1.0], [0.5, 2.0]])
    images = torch.full((1, 3, 4, 6), 255, dtype=torch.uint8)

    def predict(batch):
        shown = F.adaptive_avg_pool2d(batch.mean(1, keepdim=True), 2)[:, 0]
        logit = (shown * weights).sum((1, 2))
        return torch.stack([logit, torch.zeros_like(logit)], dim=1)

    [curves] = measure_rankings(predict, images, [lambda *_: {"weights": weights[None]}], (2, 2), mean=(0, 0, 0),
                                shares=(0.25, 0.5), steps=4)
    assert curves.counts == (1, 2, 3) and curves.bins == (1, 2)
    p = torch.sigmoid(torch.tensor([4.5, 1.5, -0.5, -1.0, 0.0]))  # as 3, 2, 0.5, -1 go
    q = torch.sigmoid(torch.tensor([0.0, 3.0, 5.0, 5.5, 4.5]))  # as they come
    torch.testing.assert_close(curves.curve("deletion"), p.tolist())
    torch.testing.assert_close(curves.curve("insertion"), q.tolist())
    torch.testing.assert_close(curves.comprehensiveness()[0], p[0] - p[1:3].mean())
    torch.testing.assert_close(curves.sufficiency()[0], p[0] - q[1:3].mean())
    torch.testing.assert_close(curves.deletion()[0], (p[0] / 2 + p[1:4].sum() + p[4] / 2) / 4)
    torch.testing.assert_close(curves.insertion()[0], (q[0] / 2 + q[1:4].sum() + q[4] / 2) / 4)


def test_counts_orders_and_ties():
    assert counts_of(SHARES, 196) == [2, 10, 20, 39, 98] and counts_of(SHARES, 4) == [1, 1, 1, 1, 2]
    ties = torch.tensor([[2, 0, 3, 1]])
    assert order_of(torch.tensor([[[1.0, 5.0], [1.0, 1.0]]]), (2, 2), ties).tolist() == [[1, 2, 0, 3]]
    fine = torch.arange(16.0).view(1, 4, 4)
    assert order_of(fine, (2, 2), ties).tolist() == [[3, 2, 1, 0]]  # reduced to the grid
    assert CentreSource((3, 3))(torch.zeros(2, 3, 9, 9), None)["centre"].flatten(1).argmax(1).tolist() == [4, 4]


def test_fillings():
    images = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    assert torch.equal(filled(images, "mean", GREY, GRID), torch.full_like(images, 0.5))
    blurred = filled(images, "blur", GREY, GRID)
    assert blurred.shape == images.shape and blurred.std() < 0.3 * images.std()
    torch.testing.assert_close(filled(torch.full_like(images, 0.3), "blur", GREY, (1, 2)),
                               torch.full_like(images, 0.3))
    with pytest.raises(ValueError, match="filling must be one of mean, blur, got 'noise'"):
        filled(images, "noise", GREY, GRID)


@pytest.mark.parametrize("wrong", [dict(steps=0), dict(shares=(0.0,)), dict(images=0), dict(grid=(64, 8))])
def test_what_cannot_be_measured(wrong):
    images, grid = torch.zeros(wrong.pop("images", 1), 3, 32, 32, dtype=torch.uint8), wrong.pop("grid", GRID)
    with pytest.raises(ValueError, match="required, got|patches must be 1 to 32"):
        measure_rankings(lambda batch: batch, images, [random_source], grid, mean=GREY, **wrong)


def test_a_class_token_ranks_where_the_classifier_reads_it():
    vit = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, embed_dim=24, num_heads=3).eval()
    model = loaded(vit)
    images = torch.rand(2, 3, 32, 32)
    by_token, by_all = (AttentionSource(model, [1, 2], rows=rows)(images, None) for rows in ("auto", "mean"))
    assert by_token["layer 2, head 1"].shape == (2, 2, 2) and list(by_token) == list(by_all)
    assert not torch.allclose(by_token["layer 2"], by_all["layer 2"])
    sums = by_token["rollout"].sum((1, 2))
    assert ((0 < sums) & (sums < 1)).all()  # the rest is the token's own
    with pytest.raises(UsageError, match="need a network that has one; marked has none"):
        AttentionSource(loaded(Marked()), [1], rows="cls")


def test_class_activation_maps_need_their_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "pytorch_grad_cam", None)
    with pytest.raises(UsageError, match=r"GradCAM needs pytorch-grad-cam \(pip install grad-cam\)"):
        CamSource(loaded(Marked()), ["GradCAM"])


def test_class_activation_maps_by_their_package():
    pytest.importorskip("pytorch_grad_cam", reason="needs pytorch-grad-cam")
    model = loaded(timm.create_model("ea_conv_transformer_cifar", img_size=16, widths=(8, 8, 16, 16)), 16)
    maps = CamSource(model, ["GradCAM", "LayerCAM"])(torch.rand(2, 3, 16, 16), torch.tensor([0, 1]))
    assert list(maps) == ["GradCAM", "LayerCAM"] and all(of.shape == (2, 16, 16) for of in maps.values())
    vit = loaded(timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, embed_dim=24, num_heads=3))
    assert CamSource(vit, ["GradCAM"])(torch.rand(1, 3, 32, 32), torch.tensor([0]))["GradCAM"].shape == (1, 32, 32)
    with pytest.raises(UsageError, match="must be a module of marked, got 'nowhere'"):
        CamSource(model, ["GradCAM"], "nowhere")


def test_the_command(tmp_path, capsys):
    output = tmp_path / "out"
    assert faithfulness_report.main([
        "--model", "ea_conv_transformer_cifar", "--img-size", "16", "--limit", "3", "--steps",
        "2", "--layers", "3,6", "--rankings", "random,layers,rollout,gradient,centre,untrained-layers", "--filling",
        "blur", "--patches", "4", "--cache-dir", "none", "--device", "cpu", "--npz", "-o",
        str(output)]) == 0
    with open(output / "results.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    names = ["layer 3", "layer 6", "rollout", "gradient", "layer 3, untrained", "layer 6, untrained", "centre",
             "random"]
    assert [row["ranking"] for row in rows] == names and {row["images"] for row in rows} == {"3"}
    about = json.loads((output / "results.json").read_text())
    assert about["options"]["filling"] == "blur" and about["versions"]["timm"] == timm.__version__
    label = rows[0]["model"]
    assert about["models"][label]["counts_of_shares"] == [1, 1, 2, 3, 8]
    deletion = about["models"][label]["curves"]["layer 3"]["deletion"]
    assert len(deletion) == len(about["models"][label]["curve_shares"]) == 6
    assert float(rows[0]["deletion"]) == pytest.approx(np.trapezoid(deletion, about["models"][label]["curve_shares"]),
                                                       abs=1e-5)
    with np.load(output / "results.npz") as scores:
        assert len(scores.files) == 4 * len(names)
        assert scores[f"{label}/random/sufficiency"].mean() == pytest.approx(float(rows[-1]["sufficiency"]), abs=1e-5)
    assert (output / "results.png").stat().st_size > 20_000
    said = capsys.readouterr().out
    assert "layer 6, untrained" in said and "written:" in said


def test_the_figure_has_a_colour_a_model_and_curves_for_each(oracle):
    figure = faithfulness_figure({"AA": list(oracle.values()), "EA, a longer name": [oracle["random"]]})
    above, below = figure.subfigs
    assert [text.get_text() for text in above.legends[0].get_texts()] == ["AA", "EA, a longer name"]
    assert [tick.get_text() for tick in above.axes[0].get_yticklabels()] == list(oracle)
    lines = {line.get_label(): line.get_ydata() for line in below.axes[0].get_lines()}
    np.testing.assert_allclose(lines["layer 1"], oracle["layer 1"].curve("deletion"))
    assert len(below.axes) == 4 and [len(axes.get_lines()) for axes in below.axes] == [6, 1, 6, 1]


@pytest.mark.parametrize("options, said", [
    (["--rankings", "layers,best"], "--rankings must be some of layers, heads, rollout, random"),
    (["--patches", "0"], "--patches must be N or H,W patches, got '0'"),
    (["--patches", "64"], "--patches must be at most 32,32, one a pixel"),
    (["--layers", "9"], "no attention layer '9'"),
    (["--img-size", "16,32"], "--img-size must be one number here"),
])
def test_options_that_cannot_be(options, said, tmp_path, capsys):
    assert exit_code(lambda: faithfulness_report.main([*options, "-o", str(tmp_path / "out")])) == 2
    assert said in capsys.readouterr().err and not (tmp_path / "out").exists()
