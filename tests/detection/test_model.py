"""The detector: published sizes, losses, boxes, and what it refuses."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from torchvision.models.detection.image_list import ImageList

from ea_vision.detection.model import Anchors, create_detector
from experiments.counting import count_as_papers
from tests.detection.tiny import small_detector
from tests.models.zoo import layers_of

# its features have their channels last
SWIN = {"window_size": 4, "embed_dim": 12, "depths": [1, 1, 1, 1], "num_heads": [1, 1, 2, 2]}
# its features are taken by hooks
HIERA = {
    "embed_dim": 16,
    "stages": [1, 1, 1, 1],
    "mask_unit_attn": [False] * 4,
    "grad_checkpointing": True,
}


def boxes(*corners):
    return {
        "boxes": torch.tensor(corners, dtype=torch.float32).reshape(-1, 4),
        "labels": torch.arange(len(corners)),
    }


@pytest.mark.parametrize(
    "backbone, kwargs, params, profiler_gflops",
    [
        ("resnet50", {}, 33_397_364, 182.3),  # published: 33.4, 182
        ("aa_resnet50", {}, 32_969_804, 182.7),  # the paper prints 33.1, 182
        ("aa_resnet101", {}, 51_572_496, 244.5),  # 51.7, 245
        ("aa_resnet50", {"augment_strided": False}, 33_088_934, 182.7),
        ("aa_resnet50", {"min_head_qk": 20}, 33_678_444, 185.1),
        ("resnet50", {"head_norm": "batch"}, 33_397_364 + 23_040, 182.3),
        ("resnet50", {"anchors": 9, "num_classes": 91}, 34_068_119, 193.8),  # torchvision's own
    ],
)
def test_sizes_are_the_published_ones(backbone, kwargs, params, profiler_gflops):
    with torch.device("meta"):
        detector = create_detector(backbone, **kwargs)

    def without_decoding(images):
        features = detector.backbone(images)
        return detector.head([*features.values()])

    detector.forward = without_decoding
    count = count_as_papers(detector, (3, 640, 640))
    assert count.counts.params == params
    assert count.profiler / 1e9 == pytest.approx(profiler_gflops, abs=0.05)


@pytest.mark.parametrize(
    "backbone, kwargs",
    [
        ("aa_resnet34", {}),
        ("ea_aa_resnet34", {"head_norm": "batch", "alpha": 0.3, "fusion": "add"}),
        ("resnet18", {"anchors": 9, "grad_checkpointing": True}),
        ("aa_resnet34", {"augment_strided": False, "box_loss": "huber"}),
        ("ea_aa_resnet34", {"grad_checkpointing": True, "box_loss": "smooth_l1"}),
        ("aa_mnasnet_075", {}),
        ("ese_vovnet19b_slim_dw", {}),  # its features have a class of their own
        ("test_convnext", {}),
        ("swin_tiny_patch4_window7_224", SWIN),
        ("hiera_tiny_224", HIERA),
    ],
)
def test_every_weight_learns_though_one_image_has_no_box(backbone, kwargs):
    detector = small_detector(backbone, **kwargs)
    losses = detector(torch.rand(2, 3, 64, 64), [boxes((4, 4, 40, 44)), boxes()])
    assert set(losses) == {"classification", "bbox_regression"}
    assert all(x > 0 for x in losses.values())
    sum(losses.values()).backward()
    assert not [name for name, p in detector.named_parameters() if p.grad is None]
    losses = detector(torch.rand(2, 3, 64, 64), [boxes(), boxes()])
    assert losses["bbox_regression"] == 0
    assert losses["classification"] > 0, "images without boxes alone train, too"
    fusions = {kwargs.get("fusion", "concat")} if "aa_" in backbone else set()
    assert {layer.fusion for layer in layers_of(detector)} == fusions
    [found] = detector.eval()([torch.rand(3, 50, 64)])
    assert set(found) == {"boxes", "scores", "labels"}


@torch.no_grad()
def test_a_detection_does_not_depend_on_the_other_images():
    """In float64, with scores that lie apart: in float32 a convolution rounds by the size of its batch, and boxes whose
    scores are nearly equal change places."""
    detector = small_detector(score_thresh=0.0).double().eval()
    for module in detector.head.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight)
    image = torch.rand(3, 50, 40).double()
    other = torch.rand(3, 64, 64).double()
    [alone] = detector([image])
    _, together = detector([other, image])
    assert len(alone["boxes"]) == 100
    # pixels of the image given
    assert alone["boxes"][:, 2].max() <= 40
    assert alone["boxes"][:, 3].max() <= 50
    assert_close(alone, together)


def test_anchors_are_exact_in_bfloat16():
    anchors = Anchors(((32.0,),), ((1.0,),))
    images = ImageList(torch.zeros(1, 3, 640, 640), [(640, 640)])
    places = anchors(images, [torch.zeros(1, 4, 80, 80, dtype=torch.bfloat16)])[0]
    assert places.dtype == torch.float32
    assert places[-1].tolist() == [632 - 16, 632 - 16, 632 + 16, 632 + 16]


def test_gamma_and_the_huber_loss_are_the_formulas():
    target = boxes((0, 0, 10, 10))
    logits = torch.randn(5, 3)
    offsets = torch.zeros(5, 4)
    match = torch.tensor([0, -1, -2, -1, -1])  # -2: neither object nor background
    right = 1 - logits.sigmoid()
    right[0, 0] = 1 - right[0, 0]
    share = torch.full((5, 3), 0.7)
    share[0, 0] = 0.3
    losses = -share * (1 - right) ** 1.2 * right.log()
    head = small_detector("resnet18", gamma=1.2, focal_alpha=0.3, box_loss="huber").head
    computed = head.classification_head.compute_loss(
        [target], {"cls_logits": logits[None]}, [match]
    )
    assert_close(computed, losses[match > -2].sum())
    offsets[0] = torch.tensor([0.05, 0.3, 0, 0])
    computed = head.regression_head.compute_loss(
        [target], {"bbox_regression": offsets[None]}, [target["boxes"].expand(5, 4)], [match]
    )
    small = 0.5 * 0.05**2
    large = 0.1 * (0.3 - 0.05)
    assert computed.item() == pytest.approx(50 * (small + large) / 4)


def test_frozen_norms_do_not_move():
    detector = small_detector("resnet18", frozen_norm=True)
    before = detector.backbone.body.bn1.running_mean.clone()
    detector(torch.rand(2, 3, 64, 64), [boxes(), boxes()])
    assert torch.equal(detector.backbone.body.bn1.running_mean, before)
    assert "backbone.body.bn1.weight" not in dict(detector.named_parameters())


@pytest.mark.parametrize(
    "kwargs, error, message",
    [
        ({"anchors": 7}, ValueError, "anchors must be 6 or 9, got 7"),
        ({"head_norm": "layer"}, ValueError, "head_norm must be 'batch' or None, got 'layer'"),
        ({"img_size": 100}, ValueError, "a multiple of 32 pixels, got 100"),
        (
            {"backbone": "vit_tiny_patch16_224", "img_size": 224},
            ValueError,
            "strides 8, 16, 32 are required, got 16, 16",
        ),
        ({"min_head_qk": 20}, TypeError, "min_head_qk"),
    ],
)
def test_errors_name_what_was_required_and_what_was_received(kwargs, error, message):
    """A keyword that the backbone lacks is not swallowed."""
    with pytest.raises(error, match=message):
        small_detector(**{"backbone": "resnet18", **kwargs})


def test_bfloat16_has_the_gradients_of_float32_on_a_map_of_one_pixel():
    """P7 of a 64-pixel image: torch 2.11 gives garbage for its bfloat16 weight gradients on a CPU."""
    detector = small_detector("resnet18", head_norm="batch").eval()
    detector.training = True  # batch statistics of one pixel would be all there is
    gradients = []
    for amp in (False, True):
        detector.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=amp):
            losses = detector(torch.ones(4, 3, 64, 64) * 0.7, [boxes((2, 2, 60, 60))] * 4)
        sum(losses.values()).backward()
        p7 = detector.backbone.fpn.extra_blocks.p7
        gradients.append(p7.weight.grad.clone())
    expected, half = gradients
    largest = expected.abs().max().item()
    assert largest > 0
    assert_close(half, expected, rtol=0, atol=0.1 * largest)
