"""Evidence of a class in attention maps, and its rollout, against finite differences and a double loop."""

import copy
from itertools import product

import pytest
import timm
import torch
from torch.testing import assert_close

from ea_vision import evolve
from ea_vision.ops import use_implementation
from ea_vision.recorder.class_evidence import EVIDENCE, add_class_evidence
from ea_vision.recorder.quantities import class_rollout
from tests.recorder.networks import TINY, lively, recorded, small_swin, timms, torchvision_vit
from tests.refused import refused


def vit():
    return timms("vit_tiny_patch16_224", **TINY)


NETWORKS = {
    "ours": lambda: timm.create_model("ea_conv_transformer_cifar", pretrained=True).eval(),
    "timm": vit,
    "evolved": lambda: lively(evolve(vit(), "ea")),
    "torchvision": torchvision_vit,
    "swin": small_swin,
}


@pytest.mark.parametrize("name", NETWORKS)
def test_every_kind_of_network_has_evidence_and_stays_as_it_was(name):
    torch.manual_seed(0)
    model = NETWORKS[name]().double()
    images = torch.rand(2, 3, 32, 32, dtype=torch.float64)
    maps = recorded(model, images)
    before = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        logits = add_class_evidence(model, images, maps, [1, 2])
    assert_close(logits, model(images))
    layer = maps[min(maps)]
    evidence = layer.formed(EVIDENCE)
    assert evidence.shape == layer.formed("attn").shape
    assert evidence.min() >= 0
    assert evidence.max() > 0
    assert_close(model.state_dict(), before, rtol=0, atol=0)


def changed_logit(model, images, index, step):
    """Return the logit of class 1 after a step on one entry of the first softmax (unfused) of a timm transformer."""

    def changed(self, *args, **kwargs):
        patch.undo()
        result = self.softmax(*args, **kwargs).clone()
        result[index] += step
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "softmax", changed)
        return model(images)[0, 1].item()


@pytest.mark.parametrize("name", ["timm", "ours"])
def test_gradients_by_finite_differences(name):
    torch.manual_seed(0)
    fused = NETWORKS[name]().double()
    images = torch.rand(1, 3, 32, 32, dtype=torch.float64)
    maps = recorded(fused, images)
    add_class_evidence(fused, images, maps, [1])
    for block in fused.blocks if name == "timm" else ():
        block.attn.fused_attn = False
    attn = maps[1].attn
    for index in [(0, 0, 0, 3), (0, 1, 2, 2), (0, 2, 4, 1), (0, 0, 5, 5)]:
        with torch.no_grad(), use_implementation("reference"):
            higher = changed_logit(fused, images, index, 1e-6)
            lower = changed_logit(fused, images, index, -1e-6)
        expected = max(0.0, (higher - lower) / 2e-6 * attn[index].item())
        assert maps[1][EVIDENCE][index].item() == pytest.approx(expected, rel=1e-4, abs=1e-9)


def test_rollout_is_a_double_loop():
    """R = (1 + A) R over the layers, with A the heads' mean, minus the identity."""
    torch.manual_seed(0)
    model = NETWORKS["evolved"]()
    images = torch.rand(1, 3, 32, 32)
    maps = recorded(model, images)
    add_class_evidence(model, images, maps)
    identity = torch.eye(maps[1].attn.shape[-1])
    R = identity.clone()
    for layer in maps.values():
        A = layer[EVIDENCE][0].mean(0)
        before = R.clone()
        for i, j in product(range(len(A)), repeat=2):
            R[i] += A[i, j] * before[j]
    assert_close(class_rollout(maps)[0], R - identity, rtol=1e-4, atol=1e-6)


def test_refusals():
    model = vit()
    images = torch.rand(1, 3, 32, 32)
    maps = recorded(model, images)
    with refused("a class must lie between 0 and .*, got .9999"):
        add_class_evidence(model, images, maps, [9999])
    model.reset_classifier(0)
    model.head = torch.nn.Unflatten(1, (-1, 1))
    with refused("logits .* required"):
        add_class_evidence(model, images, maps)
