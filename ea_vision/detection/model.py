"""RetinaNet over any network of ours or timm's that returns features.

torchvision's RetinaNet (its losses, matching, decoding and non-maximum suppression), configured as the AA paper's
detector: feature pyramid P3 to P7, 6 anchors per location and focal loss with gamma 1.5. Keywords choose BatchNorm in
pyramid and heads and the Huber loss, as in the authors' code.

Papers:
* RetinaNet: `Focal Loss for Dense Object Detection` - https://arxiv.org/abs/1708.02002
* AA: `Attention Augmented Convolutional Networks` - https://arxiv.org/abs/1904.09925

Shape letters: B images, H x W pixels, A anchors per location, C classes.
"""

from functools import partial
from typing import Any

import timm
import torch
import torch.nn.functional as F
from timm.layers import Format, freeze_batch_norm_2d, nhwc_to
from torch import Tensor, nn
from torchvision.models.detection import RetinaNet
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.retinanet import (
    RetinaNetClassificationHead,
    RetinaNetHead,
    RetinaNetRegressionHead,
)
from torchvision.ops import FeaturePyramidNetwork, sigmoid_focal_loss
from torchvision.ops.feature_pyramid_network import LastLevelP6P7

from ea_vision.zoo.create import create_leaving_out
from ea_vision.zoo.preparation import image_statistics

STRIDES = (8, 16, 32)  # of the features that the pyramid is made from, in pixels
LEVELS = (3, 4, 5, 6, 7)  # of the pyramid: level n has one location per 2^n x 2^n pixels
# anchors per location: log2 of their sizes relative to the level's
OCTAVE_SCALES = {6: (0, 1 / 2), 9: (0, 1 / 3, 2 / 3)}
RATIOS = (0.5, 1.0, 2.0)  # height / width
HUBER_DELTA = 0.1  # this and HUBER_WEIGHT are from the AA paper's code
HUBER_WEIGHT = 50.0
# Keywords of torchvision's RetinaNet that `create_detector` passes on.
_RETINANET = (
    "score_thresh",
    "nms_thresh",
    "detections_per_img",
    "topk_candidates",
    "fg_iou_thresh",
    "bg_iou_thresh",
)


class CoarseLevels(LastLevelP6P7):
    """torchvision's P6 and P7 from P5. On a CPU they are computed in the weights' precision, because bfloat16 weight
    gradients of a 1x1 map with stride 2 are wrong there (torch 2.11)."""

    def forward(
        self, p: list[Tensor], c: list[Tensor], names: list[str]
    ) -> tuple[list[Tensor], list[str]]:
        last = p[-1].to(self.p6.weight.dtype)
        with torch.autocast("cpu", enabled=False):
            maps, names = super().forward([last], c, names)
        return [*p, *maps[1:]], names


class Pyramid(nn.Module):
    """A network's features at strides 8, 16 and 32, and the feature pyramid over them.

    Args:
        body: a `features_only` network of timm's.
        channels: of the pyramid's five maps.
        norm: a BatchNorm after each map.

    Raises:
        ValueError: the network has no features at these strides.
    """

    def __init__(self, body: nn.Module, channels: int = 256, norm: bool = False):
        super().__init__()
        strides = body.feature_info.reduction()
        last = {stride: position for position, stride in enumerate(strides)}
        if not set(STRIDES) <= set(last):
            raise ValueError(
                f"features at strides {', '.join(map(str, STRIDES))} are required, got "
                f"{', '.join(map(str, strides))}"
            )
        self.positions = [last[stride] for stride in STRIDES]
        self.body = body
        self.out_channels = channels
        widths = body.feature_info.channels()
        widths = [widths[position] for position in self.positions]
        coarse = CoarseLevels(channels, channels)
        self.fpn = FeaturePyramidNetwork(widths, channels, extra_blocks=coarse)
        self.norms = nn.ModuleList(_norm(channels, norm) for _ in LEVELS)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """Turn (B, 3, H, W) into the maps "p3" to "p7", (B, channels, H / 2^n, W / 2^n) each."""
        features = self.body(x)
        if getattr(self.body, "output_fmt", None) == Format.NHWC:  # such as Swin's
            features = [nhwc_to(x, Format.NCHW) for x in features]
        fine = zip(LEVELS, self.positions, strict=False)
        maps = self.fpn({f"p{level}": features[position] for level, position in fine})
        return {name: norm(x) for norm, (name, x) in zip(self.norms, maps.items(), strict=True)}


def _norm(channels: int, norm: bool) -> nn.Module:
    return nn.BatchNorm2d(channels) if norm else nn.Identity()


class _Tower(nn.Module):
    """The 3x3 convolutions of a head, shared by the levels of the pyramid; with `norm`, every level has its own
    BatchNorms after them."""

    def __init__(self, channels: int, convs: int, norm: bool):
        super().__init__()
        self.convs = nn.ModuleList(
            nn.Conv2d(channels, channels, 3, padding=1) for _ in range(convs)
        )
        for conv in self.convs:
            nn.init.normal_(conv.weight, std=0.01)
            nn.init.zeros_(conv.bias)
        self.norms = nn.ModuleList()
        for _ in LEVELS:
            self.norms.append(nn.ModuleList(_norm(channels, norm) for _ in range(convs)))

    def forward(self, maps: list[Tensor], last: nn.Conv2d, numbers: int) -> Tensor:
        """Turn the pyramid's maps, by a head's `last` convolution, into (B, locations * A, numbers), in float32 because
        losses and boxes need its precision."""
        outputs = []
        for x, norms in zip(maps, self.norms, strict=True):
            for conv, norm in zip(self.convs, norms, strict=True):
                x = F.relu(norm(conv(x)))
            x = last(x).unflatten(1, (-1, numbers))  # (B, A, numbers, H, W)
            x = x.permute(0, 3, 4, 1, 2).flatten(1, 3)  # (B, H * W * A, numbers)
            outputs.append(x.float())
        return torch.cat(outputs, dim=1)


class ClassHead(RetinaNetClassificationHead):
    """torchvision's head for classes, with a `_Tower` and with alpha and gamma of the focal loss."""

    def __init__(
        self,
        channels: int,
        anchors: int,
        num_classes: int,
        *,
        convs: int,
        norm: bool,
        alpha: float,
        gamma: float,
    ):
        super().__init__(channels, anchors, num_classes)
        self.conv = _Tower(channels, convs, norm)
        self.alpha = alpha
        self.gamma = gamma

    def forward(self, maps: list[Tensor]) -> Tensor:
        """Turn the pyramid's maps into logits (B, locations * A, C)."""
        return self.conv(maps, self.cls_logits, self.num_classes)

    def compute_loss(
        self, targets: list[dict[str, Tensor]], outputs: dict[str, Tensor], matched: list[Tensor]
    ) -> Tensor:
        """Return the mean over images of: focal loss of matched and background anchors / number of matched anchors."""
        losses = []
        for target, logits, match in zip(targets, outputs["cls_logits"], matched, strict=True):
            is_object = match >= 0
            labels = target["labels"][match[is_object]]
            one_hot = torch.zeros_like(logits)
            one_hot[is_object, labels] = 1.0
            clear = match != self.BETWEEN_THRESHOLDS
            loss = sigmoid_focal_loss(
                logits[clear], one_hot[clear], self.alpha, self.gamma, reduction="sum"
            )
            losses.append(loss / is_object.sum().clamp(min=1))
        return torch.stack(losses).mean()


class BoxHead(RetinaNetRegressionHead):
    """torchvision's head for boxes, with a `_Tower` and with the Huber loss as an option."""

    def __init__(self, channels: int, anchors: int, *, convs: int, norm: bool, loss: str):
        super().__init__(channels, anchors)
        self.conv = _Tower(channels, convs, norm)
        self._loss_type = loss
        self.stretch = 1.0
        self.weight = 1.0
        if loss == "huber":
            # Huber of x is delta^2 times smooth_l1 of x / delta; the mean is over the four offsets.
            self._loss_type = "smooth_l1"
            self.stretch = 1 / HUBER_DELTA
            self.weight = HUBER_WEIGHT * HUBER_DELTA**2 / 4
            self.box_coder.weights = (self.stretch,) * 4

    def forward(self, maps: list[Tensor]) -> Tensor:
        """Turn the pyramid's maps into offsets (B, locations * A, 4)."""
        return self.conv(maps, self.bbox_reg, 4)

    def compute_loss(
        self,
        targets: list[dict[str, Tensor]],
        outputs: dict[str, Tensor],
        anchors: list[Tensor],
        matched: list[Tensor],
    ) -> Tensor:
        """Return torchvision's loss, or `HUBER_WEIGHT` times the mean Huber loss of the matched anchors' offsets."""
        stretched = {"bbox_regression": self.stretch * outputs["bbox_regression"]}
        return self.weight * super().compute_loss(targets, stretched, anchors, matched)


class Anchors(AnchorGenerator):
    """torchvision's anchors, in float32 for maps of any precision."""

    def forward(self, image_list, feature_maps: list[Tensor]) -> list[Tensor]:
        shapes = [torch.empty((), device=x.device).expand(x.shape) for x in feature_maps]
        return super().forward(image_list, shapes)


class Detector(RetinaNet):
    """torchvision's RetinaNet as `create_detector` builds it.

    In training: (images, targets) -> {"classification": loss, "bbox_regression": loss}. In eval mode: images -> a list
    of {"boxes": (n, 4), "scores": (n,), "labels": (n,)}, boxes x1 y1 x2 y2 in pixels of the input image.

    images: a list of (3, H, W), or (B, 3, H, W), floats in 0..1. They are normalised, scaled to fit into
    img_size x img_size without changing their aspect, and padded to it below and to the right.
    targets: one dict per image with "boxes" (n, 4) float, x1 y1 x2 y2 in pixels, and "labels" (n,) int64, 0 to
    num_classes - 1: there is no background class. An image may have no box (shapes (0, 4) and (0,)).

    Attributes:
        num_classes, img_size: the arguments of `create_detector`.
    """

    num_classes: int
    img_size: int

    def no_weight_decay(self) -> set[str]:
        """Return the names of the position tables, which timm's optimisers leave without weight decay."""
        tables = ("height_rel", "width_rel")
        return {name for name, _ in self.named_parameters() if name.endswith(tables)}


def create_detector(
    backbone: str = "aa_resnet50",
    num_classes: int = 90,
    img_size: int = 640,
    anchors: int = 6,
    gamma: float = 1.5,
    focal_alpha: float = 0.25,
    box_loss: str = "l1",
    head_norm: str | None = None,
    fpn_channels: int = 256,
    head_convs: int = 4,
    min_head_qk: int = 0,
    augment_strided: bool = True,
    frozen_norm: bool = False,
    grad_checkpointing: bool = False,
    **backbone_kwargs: Any,
) -> Detector:
    """Create a RetinaNet over a network of ours or timm's. Only the backbone can be `pretrained`.

    Args:
        backbone: a registered timm model with features at strides 8, 16 and 32.
        num_classes: C, number of object classes; labels are 0 to C - 1.
        img_size: side in pixels of the square that images are scaled into, a multiple of 32.
        anchors: per location of the pyramid: 6 (the AA paper's) or 9 (torchvision's), in ratios 1/2, 1 and 2.
        gamma, focal_alpha: of the focal loss; torchvision's gamma is 2.
        box_loss: one of torchvision's ("l1", "smooth_l1", "giou", ...) or "huber" (as the AA paper's code, times 50).
        head_norm: "batch" puts BatchNorms after the pyramid's maps and, for each of them, into the heads.
        fpn_channels, head_convs: width of pyramid and heads; number of a head's 3x3 convolutions before its last.
        min_head_qk: minimum width of a head's queries in the backbone's attention. 0 gives the published detector's
            size; classification weights were made with 20 and need 20.
        augment_strided: whether convolutions with stride 2 are augmented too.
        frozen_norm: freeze statistics and weights of the backbone's BatchNorms, as for small batches.
        grad_checkpointing: compute the backbone's activations again in the backward pass, to save memory.
        **backbone_kwargs: of torchvision's RetinaNet: score_thresh, nms_thresh, detections_per_img, topk_candidates,
            fg_iou_thresh, bg_iou_thresh; all others of the backbone: pretrained, layers, num_heads, alpha, ...

    Raises:
        ValueError: a value that is not allowed, or a backbone without such features.
        TypeError, RuntimeError: what timm raises for keywords that the backbone lacks, and for unknown backbones.
    """
    _check(anchors, head_norm, img_size)
    norm = head_norm == "batch"
    retinanet = {"detections_per_img": 100}
    for key in _RETINANET:
        if key in backbone_kwargs:
            retinanet[key] = backbone_kwargs.pop(key)
    keywords = {
        "img_size": img_size,
        "min_head_qk": min_head_qk,
        "augment_strided": augment_strided,
        **backbone_kwargs,
    }
    defaults = {"img_size": img_size, "min_head_qk": 0, "augment_strided": True}
    # a backbone may lack the keywords that have their defaults
    optional = {key for key, value in defaults.items() if keywords[key] == value}
    create = partial(timm.create_model, backbone, features_only=True)
    body, _ = create_leaving_out(create, keywords, optional)
    if frozen_norm:
        body = freeze_batch_norm_2d(body)
    if grad_checkpointing:
        network = body if hasattr(body, "set_grad_checkpointing") else body.model
        network.set_grad_checkpointing(True)
    with torch.device("meta"):
        heads = RetinaNetHead(1, 1, 1)  # torchvision's two heads, which are replaced
    heads.classification_head = ClassHead(
        fpn_channels,
        anchors,
        num_classes,
        convs=head_convs,
        norm=norm,
        alpha=focal_alpha,
        gamma=gamma,
    )
    heads.regression_head = BoxHead(
        fpn_channels, anchors, convs=head_convs, norm=norm, loss=box_loss
    )
    octaves = OCTAVE_SCALES[anchors]
    # the sides in pixels of the square anchors of each level
    sizes = [tuple(4 * 2 ** (level + octave) for octave in octaves) for level in LEVELS]
    mean, std = image_statistics(body)
    detector = Detector(
        Pyramid(body, fpn_channels, norm),
        num_classes,
        min_size=img_size,
        max_size=img_size,
        image_mean=mean,
        image_std=std,
        anchor_generator=Anchors(tuple(sizes), (RATIOS,) * len(sizes)),
        head=heads,
        size_divisible=img_size,
        **retinanet,
    )
    detector.num_classes = num_classes
    detector.img_size = img_size
    return detector


def _check(anchors: int, head_norm: str | None, img_size: int) -> None:
    """Raise ValueError for values that `create_detector` does not allow."""
    if anchors not in OCTAVE_SCALES:
        raise ValueError(f"anchors must be 6 or 9, got {anchors!r}")
    if head_norm not in (None, "none", "batch"):
        raise ValueError(f"head_norm must be 'batch' or None, got {head_norm!r}")
    if img_size < 32 or img_size % 32:
        raise ValueError(f"img_size must be a multiple of 32 pixels, got {img_size!r}")
