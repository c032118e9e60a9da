"""The published networks: sizes, chains, shares of the maps, ablations, and what creation refuses."""

from itertools import product

import pytest
import timm
import torch
from timm.layers import GatherExcite
from torch.testing import assert_close

from ea_vision.layers import AugmentedConv2d, Evolution, EvolvingAttention, PredictiveAttention
from experiments.published import figures
from tests.models.zoo import CIFAR, OUTLINES, count, layers_of, lively, on_meta, shrunk
from tests.refused import refused

VIT = "ea_vit_tiny_patch16_224"


SAME_SIZE = {
    "pa_aa_resnet152": "ea_aa_resnet152",
    "ea_conv_transformer_cifar": "pa_conv_transformer_cifar",
    "csan_conv_transformer_cifar": "conv_transformer_cifar",
}  # no paper has the first of each
NOT_AS_PRINTED = {"aa_wrn28_10_cifar": 36.1}  # and said to be


@pytest.mark.parametrize("name", [name for name in OUTLINES if figures(SAME_SIZE.get(name, name))])
def test_sizes_are_the_published_ones(name):
    """To the last published digit, rounded or truncated (EA-152's 61.657M); the CIFAR reconstructions within 2%."""
    millions = count(OUTLINES[name]) / 1e6
    published = NOT_AS_PRINTED.get(name, figures(SAME_SIZE.get(name, name))["params_m"])
    if name in CIFAR:
        assert millions == pytest.approx(published, rel=0.02)
    else:
        digits = len(str(published).partition(".")[2])
        scaled = millions * 10**digits
        assert round(published * 10**digits) in (round(scaled), int(scaled))


@torch.no_grad()
@pytest.mark.parametrize(
    "name, plain, options",
    [
        ("aa_mnasnet_100", "semnasnet_100", {}),
        ("aa_resnet50", "resnet50", {"layers": (1, 1, 1, 1)}),
    ],
)
def test_a_network_without_attention_is_timms(name, plain, options):
    model = timm.create_model(name, attn_stages=(), **options).eval()
    plain = timm.create_model(plain, **options).eval()
    assert list(model.state_dict()) == list(plain.state_dict())
    assert model.feature_info == plain.feature_info
    model.load_state_dict(plain.state_dict())
    x = torch.randn(2, 3, 64, 64)
    assert torch.equal(model(x), plain(x))


def test_gather_excite_is_timms():
    gate = timm.create_model("ge_wrn28_10_cifar", width=1).group1[0].gate
    x = torch.randn(2, 16, 5, 7)
    assert_close(gate(x), GatherExcite(16, extra_params=False, extent=0, use_mlp=False)(x))


@pytest.mark.parametrize(
    "name, options, millions, near",
    [
        # the share of the EA authors
        ("aa_resnet50", dict(qk_ratio=0.25, v_ratio=0.125, min_head_qk=None), 24.96, 0.01),
        # stand-alone self-attention
        ("aa_resnet50", dict(qk_ratio=1.0, v_ratio=1.0, window=7, map_reduction=8), 19.4, 0.06),
        # 13 layers, as in the AA paper
        ("aa_resnet34", dict(augment="first", v_ratio=0.25, min_head_qk=20), 20.751, 0.0005),
    ],
)
def test_other_configurations_have_the_published_size(name, options, millions, near):
    assert count(on_meta(name, **options)) / 1e6 == pytest.approx(millions, abs=near)


@pytest.mark.parametrize(
    "name, options, chains",
    [
        ("ea_aa_resnet34", {}, [20, 6]),
        ("ea_aa_resnet34", {"augment": "first"}, [10, 3]),
        ("ea_aa_resnet34", {"augment_strided": False}, [18, 5]),
        ("ea_aa_resnet50", {}, [10, 3]),
        ("ea_aa_resnet50", {"augment_strided": False}, [8, 2]),
        ("ea_aa_resnet101", {}, [27, 3]),
        ("ea_aa_resnet152", {}, [44, 3]),
        ("ea_aa_mnasnet_100", {}, [3, 1, 6, 3]),
        ("ea_aa_wrn28_10_cifar", {}, [4, 4, 4]),
        ("ea_conv_transformer_cifar", {}, [3, 3]),
    ],
)
def test_chains_restart_where_the_map_changes(name, options, chains):
    layers = layers_of(on_meta(name, **options))
    sizes = []
    for layer in layers:
        if layer.evolution is None:
            sizes.append([])
        sizes[-1].append(layer.feat_size)
    assert [len(chain) for chain in sizes] == chains
    assert all(len(set(chain)) == 1 for chain in sizes)
    assert "augment_strided" not in options or {layer.stride for layer in layers} == {1}


def evolutions_of(model):
    return [layer.evolution for layer in layers_of(model) if layer.evolution is not None]


def test_alpha_and_beta_are_the_papers():
    for depth, alpha in (("34", 0.5), ("50", 0.5), ("101", 0.7), ("152", 0.7)):
        ea = evolutions_of(OUTLINES[f"ea_aa_resnet{depth}"])
        pa = evolutions_of(OUTLINES[f"pa_aa_resnet{depth}"])
        assert {(evolution.alpha, evolution.beta) for evolution in ea} == {(alpha, 1.0)}
        assert {(evolution.alpha, len(evolution.convs)) for evolution in pa} == {(0.5, 1)}


ABLATIONS = [
    {"beta": 0.0},
    {"alpha": 0.0},
    {"alpha": 0.2, "beta": 0.4},
    {"kernel_size": 1},
    {"kernel_size": 5},
    {"position": "none"},
    {"num_heads": 2},
    {"qk_ratio": 0.5, "v_ratio": 0.25},
]
DEPTHS = [{"num_layers": number} for number in range(4)]


@pytest.mark.parametrize(
    "name, options",
    [
        *product(("ea_aa_resnet34", "ea_conv_transformer_cifar"), ABLATIONS),
        *product(("pa_aa_resnet34", "pa_conv_transformer_cifar"), DEPTHS),
    ],
)
def test_ablations_by_keyword(name, options):
    model = timm.create_model(name, num_classes=5, **options, **shrunk(name))
    evolutions = evolutions_of(model)
    kind = EvolvingAttention if name.startswith("ea") else PredictiveAttention
    alpha = 0.01 if name == "pa_conv_transformer_cifar" else options.get("alpha", 0.5)
    kernel_size = options.get("kernel_size", 3)
    for evolution in evolutions:
        assert isinstance(evolution, kind)
        assert (evolution.alpha, evolution.beta) == (alpha, options.get("beta", 1.0))
        assert len(evolution.convs) == options.get("num_layers", 1)
        assert {conv.kernel_size for conv in evolution.convs} <= {(kernel_size, kernel_size)}
    for layer in layers_of(model):
        assert layer.num_heads == options.get("num_heads", layer.num_heads)
        assert "qk_ratio" not in options or layer.dim_qk == 2 * layer.dim_v
        assert (layer.height_rel is None) == ("position" in options)
    assert evolutions
    assert model(torch.randn(2, 3, 32, 32)).shape == (2, 5)


def test_pretrained_without_weights_says_so():
    with pytest.raises(RuntimeError, match="No pretrained weights exist for"):
        timm.create_model("aa_mnasnet_140", pretrained=True)


@pytest.mark.parametrize(
    "name, usual, possible, options, place",
    [
        ("aa_resnet34", (2, 3, 4), (1, 2, 3, 4), {"layers": (1, 1, 1, 1)}, "layer{0}"),
        ("ea_aa_resnet50", (2, 3, 4), (1, 2, 3, 4), {"layers": (1, 1, 1, 1)}, "layer{0}"),
        ("aa_mnasnet_100", (2, 3, 4, 5, 6), (2, 3, 4, 5, 6), {}, "blocks.{0}"),
        ("aa_wrn28_10_cifar", (1, 2, 3), (1, 2, 3), {"depth": 10, "width": 1}, "group{0}"),
        ("conv_transformer_cifar", (3, 4), (1, 2, 3, 4), {"depth": 1}, "stages.{1}"),
        (VIT, (2, 3), (2, 3), {"depth": 3}, "blocks.{1}"),
    ],
)
def test_where_attention_stands_is_one_keyword_in_every_family(
    name, usual, possible, options, place
):
    keyword = "attn_layers" if "vit" in name else "attn_stages"
    chosen = [possible, *((stage,) for stage in possible)]
    if not name.startswith("ea_"):
        chosen.append(())
    for stages in [None, *chosen]:
        model = on_meta(name, **options, **{keyword: stages})
        positions = []
        for stage in possible:
            modules = model.get_submodule(place.format(stage, stage - 1)).modules()
            if any(isinstance(each, (AugmentedConv2d, Evolution)) for each in modules):
                positions.append(stage)
        assert tuple(positions) == (usual if stages is None else stages)


@torch.no_grad()
def test_chains_pass_plain_stages():
    model = lively("ea_aa_resnet50", attn_stages=(1, 3)).eval()
    x = torch.randn(1, 3, 64, 64)
    first, second, *_ = layers_of(model)  # both have maps of 1/16
    assert first.evolution is None
    assert first.need_logits
    assert second.evolution is not None
    assert model.prune_intermediate_layers([2]) == [2]
    assert model(x).shape == (1, 512, 8, 8)
    *body, _, _ = model.children()  # without pooling and classifier
    assert torch.equal(torch.nn.Sequential(*body)(x), model(x))


@torch.no_grad()
def test_a_mnasnet_is_taken_apart_as_timms():
    """Its stages, too, are called with a tensor alone, by nn.Sequential and by timm's as_sequential."""
    model = lively("ea_aa_mnasnet_075", num_classes=5).eval()
    x = torch.randn(1, 3, 64, 64)
    expected = model(x)
    assert torch.equal(torch.nn.Sequential(*model.children())(x), expected)
    assert torch.equal(model.as_sequential()(x), expected)


@pytest.mark.parametrize(
    "name,options,message",
    [
        ("aa_resnet34", {"alpha": 0.5}, "alpha"),
        ("aa_resnet34", {"augment": "second"}, "augment must be 'all' or 'first', got 'second'"),
        (
            "cnn_cifar",
            {"evolution": "ea"},
            r"attn_stages must be of .* for evolution='ea'.*got \(\)",
        ),
        ("ea_aa_resnet34", {"img_size": 0}, "img_size"),
        ("wrn28_10_cifar", {"depth": 27}, "6 n \\+ 4.*got 27"),
        ("resnet18_cifar", {"stem_stride": 3}, "stem_stride must be 1, 2 or 4, got 3"),
        ("wrn28_10_cifar", {"width": 0}, "width must be 1 or more, got 0"),
        ("wrn28_10_cifar", {"gate": "eca"}, "gate must be 'se', 'ge' or None, got 'eca'"),
        ("ea_conv_transformer_cifar", {"img_size": 4}, "at least 8 pixels"),
        ("ea_conv_transformer_cifar", {"num_heads": 3}, "multiple of num_heads=3, got 256"),
        (
            "ea_conv_transformer_cifar",
            {"attn_stages": (4, 5)},
            r"attn_stages must be of \(1, 2, 3, 4\).*got .*\(4, 5\)",
        ),
        (
            "ea_aa_resnet50",
            {"attn_stages": ()},
            r"attn_stages must be of .* at least one for evolution='ea'.*got \(\)",
        ),
        (VIT, {"attn_layers": 3}, r"attn_layers must be whole numbers.*got 3"),
        (VIT, {"attn_layers": [1, 2, 4]}, r"can evolve are \[2, 3\] of 3 .*got \[1, 4\]"),
        (VIT, {"attn_layers": []}, "got none"),
        (VIT, {"prefix": "drop"}, "'convolve' or 'pass', got 'drop'"),
        (VIT, {"prefix": "pass", "attn_layers": [3]}, "only the class token's row"),
        (VIT, {"value_residual": "half"}, "must be False, True or 'paper', got 'half'"),
        (
            "conv_transformer_cifar",
            {"evolution": "talking_heads", "window": 3},
            "window must be None with TalkingHeads, which mixes maps after the softmax",
        ),
        ("cnn_cifar", {"position": "polar"}, "position must be one of .*got 'polar'"),
        (
            "ea_conv_transformer_cifar",
            {"attn_stages": 3},
            r"attn_stages must be whole numbers, such as \(2, 3\), got 3",
        ),
        ("ea_conv_transformer_cifar", {"widths": 32}, "widths must be whole numbers.*got 32"),
        ("ea_aa_resnet50", {"layers": (3, 4)}, r"layers must be 4 whole numbers, got \(3, 4\)"),
        (
            "aa_resnet50",
            {"window": 7, "window_stages": (9,)},
            r"window_stages must be of \(2, 3, 4\).*got \(9,\)",
        ),
    ],
)
def test_bad_options_are_named(name, options, message):
    if name == VIT:
        options = {"depth": 3, **options}
    with refused(message, ValueError):
        timm.create_model(name, **options)


def test_the_baseline_is_timms_resnet18_but_for_its_stem():
    ours = timm.create_model("resnet18_cifar").state_dict()
    timms = timm.create_model("resnet18", num_classes=10).state_dict()
    assert ours.keys() == timms.keys()
    differing = [name for name, weights in ours.items() if weights.shape != timms[name].shape]
    assert differing == ["conv1.weight"]


SMALL_STEM = {"stem_stride": 2, "img_size": 64, "map_reduction": 4}


@pytest.mark.parametrize(
    "name, keywords, side, reductions",
    [
        ("resnet18_cifar", {}, 32, [1, 1, 2, 4, 8]),
        ("resnet18_cifar", {"stem_stride": 2}, 64, [2, 2, 4, 8, 16]),
        ("aa_resnet34", SMALL_STEM, 64, [2, 2, 4, 8, 16]),
        ("ea_aa_resnet50", SMALL_STEM, 64, [2, 2, 4, 8, 16]),
    ],
)
def test_stems_for_small_images(name, keywords, side, reductions):
    model = on_meta(name, in_chans=1, **keywords).eval()
    image = torch.empty(1, 1, side, side, device="meta")
    features = model.forward_intermediates(image, intermediates_only=True)
    assert [side // f.shape[-1] for f in features] == reductions
    assert [info["reduction"] for info in model.feature_info] == reductions
    # tables have one entry per offset
    heights = {(len(layer.height_rel) + 1) // 2 for layer in layers_of(model)}
    assert heights == ({16, 8, 4} if "img_size" in keywords else set())


@pytest.mark.parametrize(
    "name, options",
    [
        ("ea_conv_transformer_cifar", {"widths": (8, 8, 8, 8), "learnable": True}),
        ("ea_conv_transformer_cifar", {"widths": (8, 8, 8, 8), "evolution": "reattention"}),
        ("ea_aa_wrn28_10_cifar", {"width": 1, "depth": 10, "qk_norm": True}),
    ],
)
def test_reset_attention_weights_are_random_or_constant_as_in_a_new_network(name, options):
    """`init_weights` resets every weight of attention and of evolution."""
    network = timm.create_model(name, **options)
    created = timm.create_model(name, **options)
    weights = {}
    for path, module in network.named_modules():
        if isinstance(module, AugmentedConv2d):
            weights |= dict(module.named_parameters(path))
    with torch.no_grad():
        for parameter in weights.values():
            parameter.fill_(7.0)
    network.init_weights()
    for path, parameter in weights.items():
        as_created = created.get_parameter(path)
        assert not (parameter == 7.0).any(), path
        assert (parameter.unique().numel() == 1) == (as_created.unique().numel() == 1), path
