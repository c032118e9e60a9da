"""The shipped weights load by name, without a network, and have a card that says what they reach."""
import re
import tarfile
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image

import ea_vision  # noqa: F401

OURS = timm.list_models(module="conv_transformer") + timm.list_models(module="attn_resnet")
SHIPPED = [name for name in timm.list_pretrained() if name.split(".")[0] in OURS]


def test_each_has_its_card():
    assert "ea_conv_transformer_cifar.fast3_c10" in SHIPPED and "conv_transformer_cifar.fast3_c10" in SHIPPED
    for name in SHIPPED:
        card = Path(timm.get_pretrained_cfg(name).file).with_suffix(".md").read_text()
        assert name in card and re.search(r"\d\d\.\d\d% top-1", card) and "commit" in card and "SHA-256" in card


@pytest.mark.parametrize("name", SHIPPED)
def test_weights_are_adapted_in_timms_ways(name):
    model = timm.create_model(name, pretrained=True, in_chans=1, num_classes=3, img_size=(40, 48)).eval()
    assert model(torch.randn(1, 1, 40, 48)).shape == (1, 3)


@pytest.mark.parametrize("name", SHIPPED)
def test_weights_know_their_images(name, shared):
    model = timm.create_model(name, pretrained=True).eval()
    cfg, images, targets = model.pretrained_cfg, [], []
    with tarfile.open(shared / "data" / "cifar10" / "test.tar") as tar:
        for member in [m for m in tar if m.isfile()][::50]:  # 200 images, all classes
            images.append(np.asarray(Image.open(tar.extractfile(member)).convert("RGB")))
            targets.append(cfg["label_names"].index(member.name.split("/")[-2]))
    x = torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2) / 255
    mean, std = (torch.tensor(cfg[key]).view(-1, 1, 1) for key in ("mean", "std"))
    with torch.no_grad():
        predicted = model((x - mean) / std).argmax(1)
    assert (predicted == torch.tensor(targets)).float().mean() > 0.65
