"""`evolve` adds attention beside the convolutions of plain ResNets, timm's and torchvision's; `unevolve` removes it."""

from functools import partial

import pytest
import timm
import torch
import torchvision
from timm.layers import BlurPool2d
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)
from torch.testing import assert_close
from torchvision.models._utils import IntermediateLayerGetter
from torchvision.models.feature_extraction import create_feature_extractor
from torchvision.models.resnet import BasicBlock, Bottleneck

import ea_vision
from ea_vision import evolve, unevolve
from ea_vision.layers import AugmentedConv2d
from ea_vision.layers.projection import Projection
from ea_vision.models import get_network
from tests.models.test_convert import NARROW, RESNETS
from tests.models.zoo import (
    assert_checkpointing_changes_nothing,
    assert_compiles_and_exports,
    assert_fx_agrees,
    assert_intermediates,
    images,
    layers_of,
    on_meta,
    with_statistics,
    woken,
)
from tests.recorder.networks import recorded
from tests.refused import refused

TIMM = {
    "resnet18d": {},
    "resnext50_32x4d": {"channels": (64, 64, 64, 64)},
    "seresnet50": {},
    "ecaresnet50t": {},
    "wide_resnet50_2": {},
    "resnetblur50": {"aa_layer": BlurPool2d},
    "resnetaa50d": {},
    "resnetrs50": {},
    "seresnextaa101d_32x8d": {"channels": (64, 64, 64, 64)},
    "resnet50": {"output_stride": 8},
    "resnet34": {"output_stride": 16, "aa_layer": BlurPool2d},
    "resnet18_cifar": {},
}
TORCHVISION = {
    "torchvision basic": (BasicBlock, {}),
    "torchvision bottleneck": (Bottleneck, {}),
    "torchvision ResNeXt": (Bottleneck, {"groups": 4, "width_per_group": 8}),
    "torchvision wide": (Bottleneck, {"width_per_group": 128}),
    "torchvision dilated": (Bottleneck, {"replace_stride_with_dilation": [False, True, True]}),
    "torchvision frozen": (
        Bottleneck,
        {"norm_layer": torchvision.ops.FrozenBatchNorm2d},
    ),  # as in detectors
    "torchvision groups": (BasicBlock, {"norm_layer": partial(torch.nn.GroupNorm, 4)}),
}
NAMES = [*TIMM, *TORCHVISION]


FEW = ["resnet18d", "torchvision ResNeXt"]  # where the library and the kind of block count


def plain_network(name):
    """A narrow network in evaluation mode, whose statistics and weights all affect the output."""
    torch.manual_seed(5)
    if name in TORCHVISION:
        block, options = TORCHVISION[name]
        model = torchvision.models.ResNet(block, [1, 1, 2, 1], num_classes=5, **options)
    else:
        model = timm.create_model(name, **{**NARROW, **TIMM[name]})
    return woken(with_statistics(model)).eval()


def evolved(name, **options):
    """An evolving network whose added attention is not zero."""
    return woken(evolve(plain_network(name), "ea", **options))


@pytest.mark.parametrize("name", NAMES)
def test_every_3x3_convolution_of_the_last_stages_gets_attention(name):
    plain = plain_network(name)
    model = evolve(plain, None)
    assert len(layers_of(model)) == (4 if hasattr(plain.layer1[0], "conv3") else 8)


@pytest.mark.parametrize("norm_layer", [timm.layers.GroupNorm, timm.layers.FrozenBatchNormAct2d])
def test_a_small_stem_takes_any_norm(norm_layer):
    for name in ("resnet18_cifar", "ea_aa_resnet34"):
        options = {"layers": (1, 1, 1, 1), "stem_stride": 2, "num_classes": 3}
        model = timm.create_model(name, norm_layer=norm_layer, **options)
        assert model(images(64, 64)).shape == (2, 3)


@pytest.mark.parametrize("name", RESNETS)
@torch.no_grad()
def test_the_published_networks_are_evolved_plain_ones(name):
    network = get_network(name)
    plain = woken(timm.create_model(network.plain, **NARROW)).eval()
    options = {key: value for key, value in network.kwargs.items() if key == "alpha"}
    model = evolve(plain, network.kwargs.get("evolution"), **options)
    published = timm.create_model(name, fusion="add", **NARROW).eval()
    published.load_state_dict(woken(model).state_dict())
    x = images(64, 64)
    assert torch.equal(published(x), model(x))
    assert not torch.equal(plain(x), model(x))
    for layer in layers_of(published):
        layer.proj.weight.zero_()
    back = unevolve(published)
    assert type(back) is type(plain)
    assert torch.equal(back(x), plain(x))


@pytest.mark.parametrize("name", FEW)
def test_keywords_say_where_and_how_wide(name):
    model = evolve(
        plain_network(name),
        "pa",
        attn_stages=(3, 4),
        num_heads=2,
        qk_ratio=0.5,
        v_ratio=0.25,
        position="none",
        num_layers=2,
        img_size=(64, 96),
        augment="first",
        augment_strided=False,
    )
    assert all(layer.height_rel is None and layer.num_heads == 2 for layer in layers_of(model))
    places = [path for path, module in model.named_modules() if isinstance(module, AugmentedConv2d)]
    conv = "conv1" if name == "resnet18d" else "conv2"
    assert places == [f"layer3.1.{conv}"]
    assert model.img_size == (64, 96)
    layer = layers_of(model)[0]
    assert layer.feat_size == (4, 6)
    assert (layer.dim_qk, layer.dim_v) == (layer.out_channels // 2, layer.out_channels // 4)


@pytest.mark.parametrize("name", FEW)
@torch.no_grad()
def test_an_evolved_network_is_traced_checkpointed_deployed_and_recorded(name):
    model = evolved(name, img_size=64)
    x = images(64, 64)
    with torch.enable_grad():
        assert_checkpointing_changes_nothing(model, x, atol=1e-5, rtol=1e-4)
    assert_fx_agrees(model, x)
    expected = model(x)
    assert_close(ea_vision.deploy(model)(x), expected, atol=1e-4, rtol=1e-4)
    maps = recorded(model, x)
    assert len(maps) == len(layers_of(model))
    pixels = [maps[number].attn.shape[-1] for number in maps]
    last = 2 if name == "resnet18d" else 1  # layers in the last stage
    assert pixels == [16] * (len(maps) - last) + [4] * last
    assert torch.equal(assert_intermediates(model, x)[-1], model.forward_features(x))
    model.set_input_size((96, 64))
    assert model(images(96, 64)).shape == (2, 5)


@pytest.mark.parametrize("name", FEW)
def test_an_evolved_network_is_taken_apart_as_a_plain_one(name):
    """Its stages return tensors; these carry the logits for the next stage, with their gradients. Hooks of the backward
    pass make a view of them."""
    model = evolved(name)
    x = images(64, 64)
    expected = model.forward_features(x)
    *body, _, _ = model.children()  # without pooling and classifier
    apart = torch.nn.Sequential(*body)
    getter = IntermediateLayerGetter(model, {"layer2": "2", "layer4": "4"})
    traced = create_feature_extractor(model, {"layer2": "2", "layer4": "4"})
    parameters = list(layers_of(model)[0].qkv.parameters())
    gradients = torch.autograd.grad(expected.square().sum(), parameters)
    assert all(gradient.any() for gradient in gradients)
    seen = set()
    for hook in ("forward_hook", "full_backward_hook", "full_backward_pre_hook"):
        for stage in (model.layer1, model.layer2, model.layer3):
            getattr(stage, f"register_{hook}")(lambda stage, *_, hook=hook: seen.add(hook))
        for run in (apart, lambda x: getter(x)["4"], lambda x: traced(x)["4"]):
            output = run(x)
            assert torch.equal(output, expected)
            assert_close(torch.autograd.grad(output.square().sum(), parameters), gradients)
        assert hook in seen
    assert torch.equal(getter(x)["2"], traced(x)["2"])


def test_reentrant_checkpoints_around_a_stage_are_refused():
    """Logits computed inside it have no gradients, so part of the network's gradients would silently be missing."""
    model = evolved("resnet18d")
    model.layer2 = checkpoint_wrapper(model.layer2, checkpoint_impl=CheckpointImpl.REENTRANT)
    with torch.no_grad():
        model(images(64, 64))
    with refused("use_reentrant=False required", ValueError):
        model(images(64, 64).requires_grad_())


def test_stages_without_gradients_hand_features_on_that_have_them():
    """A frozen trunk must not be mistaken for a reentrant checkpoint."""
    model = evolved("resnet18d")
    with torch.no_grad():
        features = model.layer2(model.layer1(model.maxpool(model.forward_stem(images(64, 64)))))
    model.layer3(features.requires_grad_()).sum().backward()
    assert features.grad.any()


class LoRA(Projection):
    """A projection with a low-rank part, in loralib's way."""

    def __init__(self, base):
        super().__init__(base.in_channels, base.out_channels, 1)
        self.load_state_dict(base.state_dict(), strict=False)
        self.low_rank = torch.nn.Conv2d(base.in_channels, base.out_channels, 1, bias=False)

    def forward(self, x):
        return super().forward(x) + self.low_rank(x)


@torch.no_grad()
def test_adapters_of_the_attention_count():
    """The projections after the attention are zero, but the adapters beside them are not."""
    model = evolve(plain_network("resnet18d"), "ea", img_size=64)
    for layer in layers_of(model):
        layer.qkv = LoRA(layer.qkv)
        layer.proj = LoRA(layer.proj)
    model.eval()
    x = images(64, 64)
    expected = model(x)
    assert_close(ea_vision.deploy(model)(x), expected, atol=1e-4, rtol=1e-4)
    with refused("proj of each attention layer must be 0", ValueError):
        unevolve(model)


def test_an_evolved_network_compiles_and_exports():
    plain = plain_network("torchvision basic")
    model = woken(evolve(plain, "ea", img_size=64, attn_stages=(3,)))
    assert_compiles_and_exports(model, images(64, 64))


def test_modes_and_frozen_weights_stay():
    plain = plain_network("resnet18d")
    plain.layer3.train()
    plain.requires_grad_(False)
    model = evolve(plain, None)
    assert not model.training
    assert all(module.training for module in model.layer3.modules())
    assert not model.layer4[0].conv1.training
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained
    assert all(".conv.weight" not in name for name in trained)
    assert unevolve(model).layer3.training


class OwnForward(timm.models.ResNet):
    """A network that does something else with the stages."""

    def forward_features(self, x):
        return self.layer1(self.act1(self.bn1(self.conv1(x))))


@pytest.mark.parametrize(
    "name, options, message",
    [
        (
            "skresnet18",
            {},
            "layer1.0 must be BasicBlock or Bottleneck of timm.models.resnet, got S",
        ),
        ("aa_resnet34", {}, "got AttnResNet, which has attention already"),
        ("resnet18", {"attn_stages": (5,)}, "attn_stages must be of"),
        ("resnet18", {"alhpa": 0.5}, "evolve has no option alhpa for a ResNet"),
        ("resnet18", {"token_conv": True}, "evolve has no option token_conv for a ResNet"),
        ("resnet18", {"fusion": "concat"}, "got evolution or fusion"),
        ("resnet18", {"num_layers": 2}, "num_layers"),
    ],
)
def test_networks_and_options_that_do_not_fit_are_named(name, options, message):
    with refused(message, ValueError):
        evolve(on_meta(name), "ea", **options)


def test_a_forward_of_its_own_and_concatenated_attention_are_named():
    with torch.device("meta"):
        custom = OwnForward(timm.models.resnet.BasicBlock, (1, 1, 1, 1))
    with refused("forward_features of timm.models.resnet required, and OwnForward has", ValueError):
        evolve(custom, "ea")
    with refused("fusion='add' required, and layer2.0.conv1 has fusion", ValueError):
        unevolve(on_meta("aa_resnet34"))
