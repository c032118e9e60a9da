"""What timm expects of a model, following timm's own model tests, but comparing values where those compare shapes."""

import copy
from functools import partial
from itertools import product

import pytest
import torch
from timm.layers import BlurPool2d, DropPath
from timm.models import group_parameters
from torch.testing import assert_close

from tests.models.zoo import (
    CHAINED,
    CIFAR,
    OUTLINES,
    TESTED,
    assert_checkpointing_changes_nothing,
    assert_fx_agrees,
    assert_intermediates,
    give_gradients,
    groups_of,
    idle,
    layers_of,
    lively,
    sample,
    side,
)


@pytest.fixture(scope="module", params=TESTED)
def name(request):
    return request.param


@pytest.fixture(scope="module")
def model(name):
    """One network per name, which the tests must not change."""
    torch.manual_seed(0)
    return lively(name, num_classes=5).eval()


@pytest.fixture(scope="module")
def image(name):
    return sample(name, 1)


@torch.no_grad()
def test_default_cfg_is_true_and_every_size_has_its_shapes(name):
    model = OUTLINES[name].eval()  # shapes alone, so that the largest size costs nothing
    cfg = model.default_cfg
    assert isinstance(model.get_submodule(cfg["first_conv"]), torch.nn.Conv2d)
    assert model.get_submodule(cfg["classifier"]) is model.get_classifier()
    assert model.get_classifier().out_features == cfg["num_classes"]
    native_size = cfg["input_size"][1:]
    reduction = model.feature_info[-1]["reduction"]
    for size in {(96, 160), (288, 288), native_size}:
        features = model.forward_features(torch.empty(2, 3, *size, device="meta"))
        shape = (
            cfg["pool_size"]
            if size == native_size
            else (size[0] // reduction, size[1] // reduction)
        )
        assert features.shape == (2, model.num_features, *shape)
        assert model.forward_head(features).shape == (2, cfg["num_classes"])


def test_every_parameter_has_a_gradient(name, model):
    twin = copy.deepcopy(model).train()
    give_gradients(twin, sample(name))
    assert idle(twin) == []


def test_gradient_checkpointing_changes_nothing(name, model):
    # timm's own ResNets move their statistics twice
    assert_checkpointing_changes_nothing(model, sample(name), name in CHAINED, atol=1e-5, rtol=1e-4)


def test_fx_and_a_trace_compute_the_same(model, image):
    assert_fx_agrees(model, image)


@torch.no_grad()
def test_intermediates_are_those_of_the_whole_network(model, image):
    taken = assert_intermediates(model, image)
    # some networks have layers between the last feature and the head
    end = getattr(model, "forward_end", torch.nn.Identity())
    assert_close(model.forward_features(image), end(taken[-1]))
    only = partial(model.forward_intermediates, image, intermediates_only=True)
    assert_close(only(indices=[0, 2], stop_early=True), [taken[0], taken[2]])
    assert_close(only(indices=2, norm=True), taken[-2:])


@torch.no_grad()
def test_features_only_are_the_intermediates(name, model, image):
    features = lively(name, features_only=True, out_indices=(0, -2)).eval()
    inner = getattr(features, "model", features)  # timm's ResNet is unwrapped
    assert len(inner.state_dict()) < len(model.state_dict())  # what no wanted feature needs is gone
    inner.load_state_dict({n: model.state_dict()[n] for n in inner.state_dict()})
    expected = model.forward_intermediates(image, intermediates_only=True)
    assert_close(features(image), [expected[0], expected[-2]])
    first = model.feature_info[0]
    last = model.feature_info[-2]
    assert features.feature_info.channels() == [first["num_chs"], last["num_chs"]]
    assert features.feature_info.reduction() == [first["reduction"], last["reduction"]]
    features.set_grad_checkpointing(True)


@torch.no_grad()
def test_head_in_timms_ways(model, image):
    model = copy.deepcopy(model)
    features = model.forward_features(image)
    assert_close(model.forward_head(features), model(image))
    assert model.forward_head(features, pre_logits=True).shape == (1, model.head_hidden_size)
    model.reset_classifier(0, "max")
    assert_close(model(image), features.amax((2, 3)))
    model.reset_classifier(4, "catavgmax")
    assert model(image).shape == (1, 4)
    assert model.forward_head(features, pre_logits=True).shape == (1, 2 * model.num_features)
    model.reset_classifier(0, "")
    assert_close(model(image), features)


def test_layer_decay_follows_the_order_of_the_network(name, image):
    model = lively(name, num_classes=5).eval()
    order = []
    owners = [m for m in model.modules() if list(m.parameters(recurse=False))]
    for module in owners:
        module.register_forward_pre_hook(lambda m, _: order.append(m))
    with torch.no_grad():
        model(image)
    assert set(order) == set(owners)

    group_of = groups_of(model, layer_decay=0.75)
    assert group_of.keys() == set(model.parameters())
    scales = []
    for module in order:
        scales += [group_of[p]["lr_scale"] for p in module.parameters(recurse=False)]
    assert scales == sorted(scales)
    assert scales[-1] == 1.0
    assert len(set(scales)) > len(model.feature_info)
    for layer in layers_of(model):
        assert len({group_of[p]["lr_scale"] for p in layer.parameters()}) == 1
    for n, p in model.named_parameters():
        spared = p.ndim < 2 or n.endswith("_rel")  # norms, biases, position tables
        assert group_of[p]["weight_decay"] == (0.0 if spared else 0.05), n
    coarse = group_parameters(model, model.group_matcher(coarse=True), reverse=True)
    assert coarse.keys() == dict(model.named_parameters()).keys()
    assert coarse[f"{model.default_cfg['first_conv']}.weight"] == 0


@torch.no_grad()
def test_other_sizes_and_channels_work(name, model):
    sizes = [(24, 40), (40, 16)] if side(name) == 32 else [(40, 72), (96, 160)]
    runs = [(model, torch.randn(1, 3, *size)) for size in sizes]
    for channels in (1, 4):
        other = lively(name, num_classes=5, in_chans=channels).eval()
        assert other.get_submodule(model.default_cfg["first_conv"]).in_channels == channels
        runs.append((other, torch.randn(1, channels, side(name), side(name))))
    for network, x in runs:
        y = network(x)
        assert y.shape == (1, 5)
        assert y.isfinite().all()


@pytest.mark.parametrize("small", CHAINED)
def test_img_size_sizes_the_tables_and_loads_others(small):
    size = (96, 64) if side(small) == 64 else (40, 24)
    plain = lively(small).eval()
    large = lively(small, img_size=size).eval()
    large.load_state_dict(plain.state_dict())
    x = torch.randn(1, 3, *size)
    with torch.no_grad():
        assert_close(large(x), plain(x))
        plain.requires_grad_(False).set_input_size(size)
        assert_close(large(x), plain(x))
    for n, parameter in plain.named_parameters():
        assert parameter.shape == large.get_parameter(n).shape
    assert not any(p.requires_grad for p in plain.parameters())  # what was frozen stays so
    for layer in layers_of(large):
        rows = 2 * layer.feat_size[0] - 1
        if layer.window is not None:
            rows = min(rows, layer.window[0])
        assert layer.height_rel.shape[0] == rows


@pytest.mark.parametrize("small", [*CIFAR, "aa_wrn28_10_cifar"])  # the others have timm's own head
def test_a_new_classifier_lives_where_the_network_does(small):
    model = lively(small, global_pool="max").double().eval()
    model.reset_classifier(0)
    model.reset_classifier(2)
    assert model.get_classifier().weight.dtype == torch.float64
    assert not any(module.training for module in model.modules())
    assert model.head.global_pool.pool_type == "max"


@pytest.mark.parametrize("small", CHAINED)
def test_drop_path_grows_with_depth_and_is_off_in_evaluation(small):
    model = lively(small, num_classes=5, drop_path_rate=0.3)
    rates = [m.drop_prob for m in model.modules() if isinstance(m, DropPath)]
    assert rates == sorted(rates)
    assert 0.28 < rates[-1] <= 0.3
    assert len(rates) > 3
    x = sample(small, 4)
    assert not torch.equal(model(x), model(x))
    model.eval()
    assert torch.equal(model(x), model(x))


NORM = partial(torch.nn.BatchNorm2d, eps=1e-3)
IN_BOTH = (dict(aa_layer=BlurPool2d), dict(output_stride=8), dict(output_stride=16))


@pytest.mark.parametrize(
    "network,options",
    [
        *product(("ea_aa_resnet34", "ea_aa_mnasnet_075"), IN_BOTH),
        ("ea_aa_resnet34", dict(block_args=dict(attn_layer="se"))),
        *product(("ea_aa_resnet34", "ea_aa_resnet50"), [dict(augment_strided=False)]),
        ("ea_aa_resnet34", dict(augment="first")),
        ("ea_aa_resnet34", dict(stem_type="deep", stem_width=32, avg_down=True)),
        ("ea_aa_mnasnet_075", dict(norm_layer=NORM)),
    ],
)
def test_options_of_timms_resnet_and_efficientnet_work(network, options):
    model = lively(network, num_classes=5, **options)
    x = torch.randn(2, 3, 64, 64)
    y = model(x)
    assert y.shape == (2, 5)
    stride = options.get("output_stride", 32)
    assert model.forward_features(x).shape[-1] == 64 // stride
    y.sum().backward()
    assert all(p.grad is not None for p in model.parameters())


NORMED = [
    "csan_resnet50",
    "ea_aa_resnet34",
    "ea_aa_mnasnet_075",
    "ea_aa_wrn28_10_cifar",
    "ea_conv_transformer_cifar",
]


@pytest.mark.parametrize("network", NORMED)
def test_normalised_queries_and_keys_in_every_family(network):
    model = lively(network, num_classes=5, qk_norm=True).eval()
    image = sample(network, 1)
    gains = {n for n, _ in model.named_parameters() if n.endswith(".qk_gain")}
    assert len(gains) == len(layers_of(model))
    assert gains <= model.no_weight_decay()
    give_gradients(model, image)
    assert idle(model, ".qk_gain") == []
    if network == NORMED[-1]:  # by the same layer in all of them
        assert_fx_agrees(model, image)
