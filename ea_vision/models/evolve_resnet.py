"""Attention beside the 3x3 convolutions of trained ResNets of timm and torchvision.

    model = ea_vision.evolve(timm.create_model("resnet50d", pretrained=True), "ea")
    model = ea_vision.evolve(torchvision.models.resnext50_32x4d(weights="DEFAULT"), kind=None)     # AA
    plain = ea_vision.unevolve(model)                               # an error once the attention has learned

The plain network's modules stay. Each augmented 3x3 convolution, with its groups and dilation, becomes the `conv` of an
`AugmentedConv2d` with fusion="add", whose attention begins at zero. Blocks and network change their class; norms,
anti-aliasing, squeeze-excite, stem and head are not changed.

Shape letters: B batch, C channels, H x W image or map.
"""

from typing import Any

import torch
import torchvision
from timm.models import resnet as timm_resnet
from torch import Tensor, nn
from torchvision.models import resnet as torchvision_resnet

from ea_vision.layers import AugmentedConv2d
from ea_vision.layers.evolution import all_zero
from ea_vision.models._attention_config import AttentionConfig, to_size
from ea_vision.models._mechanisms import refuse
from ea_vision.models.any_transformer import plain_class, shared_copy
from ea_vision.models.attn_resnet import (
    STAGES,
    AttendsInBasicBlock,
    AttendsInBottleneck,
    AttnBasicBlock,
    AttnBottleneck,
    AttnResNet,
    Placement,
    ResNetStages,
)
from ea_vision.models.note import remember_evolution
from ea_vision.ops import Size


class _TimmsNames:
    """timm's names for the activations of torchvision's blocks, and for steps that these lack."""

    se = drop_path = None
    drop_block = aa = staticmethod(lambda x: x)
    act1 = act2 = act3 = property(lambda self: self.relu)


class AttnTorchvisionBasicBlock(_TimmsNames, AttendsInBasicBlock, torchvision_resnet.BasicBlock):
    """torchvision's BasicBlock with attention."""


class AttnTorchvisionBottleneck(_TimmsNames, AttendsInBottleneck, torchvision_resnet.Bottleneck):
    """torchvision's Bottleneck with attention."""


class AttnTorchvisionResNet(ResNetStages, torchvision_resnet.ResNet):
    """torchvision's ResNet with attention beside its 3x3 convolutions, as `evolve_resnet` makes it.

    img_size: (height, width) in pixels, for which position tables are made.
    feature_info: channels, reduction and module of each feature, as in timm's networks.
    """

    def forward_stem(self, x: Tensor) -> Tensor:
        return self.relu(self.bn1(self.conv1(x)))

    def _forward_impl(self, x: Tensor) -> Tensor:
        pooled = self.avgpool(self.forward_features(x))
        return self.fc(torch.flatten(pooled, 1))


NETWORKS = {timm_resnet.ResNet: AttnResNet, torchvision_resnet.ResNet: AttnTorchvisionResNet}
BLOCKS = {
    timm_resnet.BasicBlock: AttnBasicBlock,
    timm_resnet.Bottleneck: AttnBottleneck,
    torchvision_resnet.BasicBlock: AttnTorchvisionBasicBlock,
    torchvision_resnet.Bottleneck: AttnTorchvisionBottleneck,
}


def is_resnet(model: nn.Module) -> bool:
    """Return whether a network is a ResNet of timm's or torchvision's."""
    return isinstance(model, tuple(NETWORKS))


def has_attention(model: nn.Module) -> bool:
    """Return whether a network is a ResNet with attention of ours."""
    return isinstance(model, tuple(NETWORKS.values()))


def evolve_resnet(
    model: nn.Module,
    kind: str | None = "ea",
    *,
    img_size: int | Size | None = None,
    augment: str = "all",
    augment_strided: bool = True,
    map_reduction: int = 16,
    **options: Any,
) -> nn.Module:
    """Put attention beside the 3x3 convolutions of a ResNet: return a new model that shares the weights.

    It computes what the plain network does, and learns from there: first the attention's last projections, which begin
    at zero, then the rest.

    Args:
        model: timm's or torchvision's ResNet with basic or bottleneck blocks.
        kind: a registered evolution ("ea", "pa", ...), which begins as in its paper unless `start` says otherwise; None
            for attention whose maps do not evolve (AA).
        img_size: input size in pixels, one number or (height, width), for which position tables are made. Default: that
            of the network's configuration, or 224 without one.
        augment: which convolutions of a block get attention; see `AttnResNet`.
        augment_strided: see `AttnResNet`.
        map_reduction: see `AttnResNet`.
        **options: those of `AttentionConfig` (attn_stages, by default (2, 3, 4), num_heads, qk_ratio, v_ratio,
            position, window, ...; with basic blocks the ratios are by default 0.25 and 0.125, as published) and of the
            evolution (start, alpha, beta, kernel_size, ...).

    Raises:
        ValueError: the network cannot have attention (the message names the module at fault), or an option is unknown
            or does not fit.
    """
    refuse(model, reason_against(model))
    attention = _attention_of(model, kind, options)
    placement = Placement(augment, augment_strided, map_reduction)
    keywords = {"kind": kind, "img_size": img_size, **vars(placement), **options}
    evolving = shared_copy(model)
    evolving.plain_class = type(model)
    evolving.__class__ = NETWORKS[_base_of(model)]
    for block in _blocks_of(evolving).values():
        block.__class__ = BLOCKS[type(block)]
    if img_size is None:
        config = getattr(model, "pretrained_cfg", None)
        img_size = tuple(config["input_size"][1:]) if config else 224
    evolving.img_size = to_size(img_size)
    if isinstance(evolving, AttnTorchvisionResNet):
        evolving.feature_info = _feature_info(evolving)
    weight = next(evolving.parameters())
    placement.put(evolving, attention, weight.device, weight.dtype)
    evolving.set_grad_checkpointing(getattr(model, "grad_checkpointing", False))
    remember_evolution(evolving, keywords)
    return evolving


def unevolve_resnet(model: nn.Module) -> nn.Module:
    """Return the plain ResNet of one whose attention adds nothing: a new model that shares the weights.

    Raises:
        ValueError: the attention adds something or replaces channels of a convolution.
    """
    reason = _reason_against_plain(model)
    if reason is not None:
        raise ValueError(f"this {type(model).__name__} does not compute a plain network: {reason}")
    plain = shared_copy(model)
    for block in _blocks_of(plain).values():
        for name in ("conv1", "conv2"):
            conv = getattr(block, name)
            if isinstance(conv, AugmentedConv2d):
                setattr(block, name, conv.conv)
        block.__class__ = plain_class(type(block))
    for stage in STAGES:
        blocks = getattr(plain, f"layer{stage}")
        sequential = nn.Sequential(*blocks)
        sequential.training = blocks.training
        setattr(plain, f"layer{stage}", sequential)
    plain.__class__ = plain.__dict__.pop("plain_class", _base_of(model))
    del plain.img_size, plain.relay
    if isinstance(plain, torchvision.models.ResNet):
        del plain.feature_info
    return plain


def reason_against(model: nn.Module) -> str | None:
    """Return why a ResNet cannot have attention beside its convolutions, or None."""
    if has_attention(model):
        return f"a plain network required, got {type(model).__name__}, which has attention already"
    base = _base_of(model)
    for name in ("forward", "_forward_impl", "forward_features", "forward_head"):
        if getattr(type(model), name, None) is not getattr(base, name, None):
            return f"{name} of {base.__module__} required, and {type(model).__name__} has its own"
    block_classes = [block for block in BLOCKS if block.__module__ == base.__module__]
    names = " or ".join(block.__name__ for block in block_classes)
    for path, block in _blocks_of(model).items():
        if type(block) not in block_classes:
            return f"{path} must be {names} of {base.__module__}, got {type(block).__name__}"
        for name in ("conv1", "conv2"):
            conv = getattr(block, name)
            if not isinstance(conv, nn.Conv2d):
                return f"{path}.{name} must be a Conv2d, got {type(conv).__name__}"
    return None


def _reason_against_plain(model: nn.Module) -> str | None:
    """Return why a ResNet with attention does not compute a plain one, or None."""
    active = []
    for name, layer in model.named_modules():
        if not isinstance(layer, AugmentedConv2d):
            continue
        if layer.fusion != "add":
            return f"fusion='add' required, and {name} has fusion={layer.fusion!r}"
        if not all_zero(layer.proj):
            active.append(name)
    if active:
        return (
            f"proj of each attention layer must be 0; got {len(active)} layers where it is not, "
            f"the first of them {active[0]}"
        )
    return None


def _attention_of(model: nn.Module, kind: str | None, options: dict[str, Any]) -> AttentionConfig:
    """Return the configuration of the attention from the options.

    Raises:
        ValueError: an unknown option.
    """
    ratios = {}
    if not hasattr(model.layer1[0], "conv3"):  # of basic blocks, as published
        ratios = {"qk_ratio": 0.25, "v_ratio": 0.125}
    left = dict(options)
    attention = AttentionConfig.take(left, **ratios, evolution=kind, fusion="add")
    if attention.evolution != kind or attention.fusion != "add":
        raise ValueError(
            "evolve itself sets evolution (by kind) and fusion='add'; got evolution or fusion"
        )
    if left:
        raise ValueError(
            f"evolve has no option {', '.join(sorted(left))} for a ResNet (attn_stages chooses where it attends)"
        )
    return attention


def _base_of(model: nn.Module) -> type[nn.Module]:
    """Return timm's or torchvision's class of a ResNet."""
    return next(base for base in NETWORKS if isinstance(model, base))


def _blocks_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return the blocks of the four stages by their names."""
    blocks = {}
    for stage in STAGES:
        for index, block in enumerate(getattr(model, f"layer{stage}")):
            blocks[f"layer{stage}.{index}"] = block
    return blocks


def _feature_info(model: nn.Module) -> list[dict]:
    """Return timm's `feature_info` of torchvision's ResNet."""
    info = [dict(num_chs=model.layer1[0].conv1.in_channels, reduction=2, module="relu")]
    reduction = 4
    for stage in STAGES:
        blocks = getattr(model, f"layer{stage}")
        reduction *= blocks[0].stride
        channels = getattr(blocks[-1], "conv3", blocks[-1].conv2).out_channels
        info.append(dict(num_chs=channels, reduction=reduction, module=f"layer{stage}"))
    return info
