"""The shipped weights load by name, without a network, and have a card that says what they reach."""

import re
import tarfile
from pathlib import Path

import pandas as pd
import pytest
import timm
import torch
from PIL import Image
from timm.models import adapt_input_conv
from torch.testing import assert_close
from torchvision.transforms.v2.functional import pil_to_tensor

import ea_vision  # noqa: F401
from tests.slow import slow_but

OURS = timm.list_models(module="conv_transformer") + timm.list_models(module="attn_resnet")
ROOT = Path(__file__).resolve().parents[1]
SHIPPED = [name for name in timm.list_pretrained() if name.split(".")[0] in OURS]


def test_each_has_its_card():
    assert {"ea_conv_transformer_cifar", "conv_transformer_cifar"} <= {
        name.split(".")[0] for name in SHIPPED
    }
    for name in SHIPPED:
        card = Path(timm.get_pretrained_cfg(name).file).with_suffix(".md").read_text()
        assert (
            name in card
            and re.search(r"\d\d\.\d\d% top-1", card)
            and "commit" in card
            and "SHA-256" in card
        )


@pytest.mark.parametrize("name", slow_but({"ea_conv_transformer_cifar.long_c10"}, SHIPPED))
@torch.no_grad()
def test_weights_are_adapted_in_timms_ways(name):
    def create(**options):
        return timm.create_model(name, pretrained=True, **options).eval()

    plain, grey, four = create(), create(in_chans=1), create(in_chans=4, num_classes=3)
    side, stem = plain.default_cfg["input_size"][-1], plain.default_cfg["first_conv"] + ".weight"
    x = torch.randn(2, 1, side, side)
    rounding = dict(
        atol=0.02, rtol=0.01
    )  # the file's half precision, in which timm adapts the stem
    assert_close(grey(x), plain(x.expand(-1, 3, -1, -1)), **rounding)
    adapted = adapt_input_conv(4, plain.get_parameter(stem))
    assert_close(four.get_parameter(stem), adapted, atol=1e-3, rtol=1e-3)
    assert four(x.expand(-1, 4, -1, -1)).shape == (2, 3)

    # the tables are resized on load, as the plain network resizes them at every call
    size = (side * 5 // 4, side * 3 // 2)
    x = torch.randn(1, 3, *size)
    assert_close(create(img_size=size)(x), plain(x), atol=1e-4, rtol=1e-4)


def test_results_are_those_of_the_cards():
    rows = pd.read_csv(ROOT / "experiments" / "results" / "results-cifar10.csv").set_index("model")
    ten = {name for name in SHIPPED if timm.get_pretrained_cfg(name).num_classes == 10}
    assert set(rows.index) == ten  # else `python experiments/shipped_weights.py` is due
    for name, row in rows.iterrows():
        card = Path(timm.get_pretrained_cfg(name).file).with_suffix(".md").read_text()
        said = list(map(float, re.search(r"(\d+\.\d+)% top-1, (\d+\.\d+)% top-5", card).groups()))
        assert [row["top1"], row["top5"]] == pytest.approx(said, abs=0.05)
        assert row["top1"] + row["top1_err"] == pytest.approx(100)


@pytest.mark.parametrize(
    "name",
    slow_but(
        {"ea_conv_transformer_cifar.long_c10"}, [name for name in SHIPPED if name.endswith("_c10")]
    ),
)
def test_weights_know_their_images(name, shared):
    model = timm.create_model(name, pretrained=True).eval()
    cfg, images, targets = model.pretrained_cfg, [], []
    with tarfile.open(shared / "data" / "cifar10" / "test.tar") as tar:
        for member in [m for m in tar if m.isfile()][::100]:  # 100 images, all classes
            images.append(pil_to_tensor(Image.open(tar.extractfile(member)).convert("RGB")))
            targets.append(cfg["label_names"].index(member.name.split("/")[-2]))
    x = torch.stack(images) / 255
    mean, std = (torch.tensor(cfg[key]).view(-1, 1, 1) for key in ("mean", "std"))
    with torch.no_grad():
        predicted = model((x - mean) / std).argmax(1)
    assert (predicted == torch.tensor(targets)).float().mean() > 0.65
