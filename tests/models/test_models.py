"""Every registered name: published sizes, gradients, features, scripts, sizes, and what creation refuses."""
import pytest
import timm
import torch
from timm.models import create_feature_extractor, get_graph_node_names

import ea_vision  # noqa: F401
from ea_vision.layers import AugmentedConv2d, EvolvingAttention, PredictiveAttention

RESNETS = timm.list_models(module="attn_resnet")
CIFAR = timm.list_models(module="conv_transformer")
NAMES = RESNETS + CIFAR
SMALL = ["aa_resnet34", "pa_aa_resnet34", "ea_aa_resnet50", *CIFAR]  # one of each kind, where depth adds nothing

MILLIONS = {  # DESIGN section 3 (published, AA column) and 4 (reconstruction)
    "aa_resnet34": 20.7, "pa_aa_resnet34": 20.7, "ea_aa_resnet34": 20.7,
    "aa_resnet50": 25.8, "pa_aa_resnet50": 25.8, "ea_aa_resnet50": 25.8,
    "aa_resnet101": 45.4, "pa_aa_resnet101": 45.4, "ea_aa_resnet101": 45.4,
    "aa_resnet152": 61.6, "pa_aa_resnet152": 61.6, "ea_aa_resnet152": 61.6,
}


def millions(model) -> float:
    return sum(p.numel() for p in model.parameters()) / 1e6


def lively(name: str, **options):
    """A new model whose residual branches count: timm's initial zeros in their last norms would hide any mistake."""
    model = timm.create_model(name, **options)
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d) and not module.weight.any():
            torch.nn.init.constant_(module.weight, 0.2)
    return model


def side(name: str) -> int:
    return 64 if name in RESNETS else 32


def layers_of(model) -> list:
    return [m for m in model.modules() if isinstance(m, AugmentedConv2d)]


def test_the_zoo_is_registered():
    assert len(RESNETS) == 12 and set(RESNETS) == set(MILLIONS)
    assert CIFAR == ["cnn_cifar", "conv_transformer_cifar", "ea_conv_transformer_cifar", "pa_conv_transformer_cifar"]
    assert len(timm.list_models("*ea_aa*")) == 4


@pytest.mark.parametrize("name", RESNETS)
def test_resnet_sizes_are_the_published_ones(name):
    # to the digit: rounded, but EA-152 (61.657M) which the paper must have cut off
    count = millions(timm.create_model(name))
    assert MILLIONS[name] in (round(count, 1), int(count * 10) / 10)
    assert count == pytest.approx(MILLIONS[name], abs=0.06)


@pytest.mark.parametrize("name,published", [
    ("cnn_cifar", 5.36), ("conv_transformer_cifar", 4.92), ("pa_conv_transformer_cifar", 4.92),
    ("ea_conv_transformer_cifar", 4.92)])
def test_cifar_sizes_lie_within_two_percent(name, published):
    assert millions(timm.create_model(name)) == pytest.approx(published, rel=0.02)


def test_sizes_of_one_attention_branch_are_the_aa_papers():
    model = timm.create_model("aa_resnet50")
    for stage, thousands in (("layer2", 43), ("layer3", 90), ("layer4", 190)):
        layer = model.get_submodule(stage)[1].conv2
        count = sum(p.numel() for name, p in layer.named_parameters() if not name.startswith("conv."))
        assert count / 1000 == pytest.approx(thousands, rel=0.011)


def test_the_authors_widths_are_reachable():
    model = timm.create_model("ea_aa_resnet50", qk_ratio=0.25, v_ratio=0.125)
    assert millions(model) == pytest.approx(24.96, abs=0.01)


@pytest.mark.parametrize("name,layers,chains", [
    ("ea_aa_resnet34", 26, [20, 6]), ("ea_aa_resnet50", 13, [10, 3]), ("ea_aa_resnet101", 30, [27, 3]),
    ("ea_aa_resnet152", 47, [44, 3]), ("ea_conv_transformer_cifar", 6, [3, 3])])
def test_chains_restart_where_the_map_changes(name, layers, chains):
    found = layers_of(timm.create_model(name))
    starts = [i for i, layer in enumerate(found) if layer.evolution is None]
    assert len(found) == layers
    assert [b - a for a, b in zip(starts, [*starts[1:], layers], strict=True)] == chains
    for a, b in zip(starts, [*starts[1:], layers], strict=True):
        assert len({layer.feat_size for layer in found[a:b]}) == 1


def test_alpha_and_beta_are_the_papers():
    for name, alpha in (("34", 0.5), ("50", 0.5), ("101", 0.7), ("152", 0.7)):
        found = [layer.evolution for layer in layers_of(timm.create_model(f"ea_aa_resnet{name}")) if layer.evolution]
        assert {(e.alpha, e.beta) for e in found} == {(alpha, 1.0)}
        found = [layer.evolution for layer in layers_of(timm.create_model(f"pa_aa_resnet{name}")) if layer.evolution]
        assert {(e.alpha, len(e.convs)) for e in found} == {(0.5, 1)}


@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_gets_a_gradient(name):
    model = lively(name, num_classes=5)
    y = model(torch.randn(2, 3, side(name), side(name)))
    assert y.shape == (2, 5) and y.isfinite().all()
    y.square().sum().backward()
    assert [n for n, p in model.named_parameters() if p.grad is None or not p.grad.isfinite().all()] == []
    assert [n for n, p in model.named_parameters() if not p.grad.any()] == []


@pytest.mark.parametrize("name", NAMES)
def test_gradient_checkpointing_changes_nothing(name):
    model = lively(name, num_classes=5)
    x = torch.randn(2, 3, side(name), side(name))
    results = []
    for enable in (False, True):
        model.zero_grad()
        model.set_grad_checkpointing(enable)
        y = model(x)
        y.sum().backward()
        results.append((y.detach(), [p.grad for p in model.parameters()]))
    torch.testing.assert_close(results[0], results[1], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_default_cfg_names_modules_that_exist(name):
    model = timm.create_model(name)
    cfg = model.default_cfg
    assert isinstance(model.get_submodule(cfg["first_conv"]), torch.nn.Conv2d)
    assert model.get_submodule(cfg["classifier"]) is model.get_classifier()
    assert model.get_classifier().out_features == cfg["num_classes"]
    size = cfg["input_size"][-1]
    with torch.no_grad():
        assert model.eval().forward_features(torch.randn(1, 3, size, size)).shape[-2:] == cfg["pool_size"]


@pytest.mark.parametrize("name", SMALL)
def test_head_in_timms_ways(name):
    model = lively(name, num_classes=7, in_chans=1).eval()
    x = torch.randn(2, 1, side(name), side(name))
    features = model.forward_features(x)
    torch.testing.assert_close(model.forward_head(features), model(x))
    assert model.forward_head(features, pre_logits=True).shape == (2, model.head_hidden_size)
    model.reset_classifier(3)
    assert model(x).shape == (2, 3)
    model.reset_classifier(0, "")
    torch.testing.assert_close(model(x), features)


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("size", [(40, 72), (96, 64)])
def test_other_sizes_work_without_being_told(name, size):
    model = lively(name, num_classes=5).eval()
    with torch.no_grad():
        assert model(torch.randn(1, 3, *size)).shape == (1, 5)


@pytest.mark.parametrize("name", SMALL)
def test_img_size_sizes_the_tables_and_loads_others(name):
    size = (96, 64)
    small, large = lively(name).eval(), lively(name, img_size=size).eval()
    large.load_state_dict(small.state_dict())
    x = torch.randn(1, 3, *size)
    with torch.no_grad():
        torch.testing.assert_close(large(x), small(x))
        small.set_input_size(size)
        torch.testing.assert_close(large(x), small(x))
    shapes = [{n: p.shape for n, p in m.named_parameters()} for m in (small, large)]
    assert shapes[0] == shapes[1]
    for layer in layers_of(large):
        assert layer.height_rel.shape[0] == 2 * layer.feat_size[0] - 1


@pytest.mark.parametrize("name", SMALL)
def test_features_are_those_of_the_whole_network(name):
    torch.manual_seed(1)
    model = lively(name).eval()
    x = torch.randn(1, 3, side(name), side(name))
    with torch.no_grad():
        final, taken = model.forward_intermediates(x)
        torch.testing.assert_close(final, model.forward_features(x))
        torch.testing.assert_close(final, taken[-1])
        early = model.forward_intermediates(x, indices=[0, 2], stop_early=True, intermediates_only=True)
        torch.testing.assert_close(early, [taken[0], taken[2]])

        features = timm.create_model(name, features_only=True, out_indices=(1, 2)).eval()
        features.model.load_state_dict(model.state_dict(), strict=False)
        for got, expected, info in zip(features(x), taken[1:3], features.feature_info.get_dicts(), strict=True):
            torch.testing.assert_close(got, expected)
            assert got.shape[1] == info["num_chs"] and got.shape[2] == x.shape[2] // info["reduction"]


@pytest.mark.parametrize("name", SMALL)
def test_script_and_fx_compute_the_same(name):
    model = lively(name).eval()
    x = torch.randn(1, 3, side(name), side(name))
    with torch.no_grad():
        torch.testing.assert_close(torch.jit.script(model)(x), model(x))
        _, nodes = get_graph_node_names(model)
        extractor = create_feature_extractor(model, return_nodes=[nodes[-1]])
        torch.testing.assert_close(next(iter(extractor(x).values())), model(x))


@pytest.mark.parametrize("name", ["ea_aa_resnet34", "ea_conv_transformer_cifar"])
@pytest.mark.parametrize("options", [
    {"beta": 0.0}, {"alpha": 0.0}, {"alpha": 0.2, "beta": 0.4}, {"kernel_size": 1}, {"kernel_size": 5},
    {"relative": False}, {"num_heads": 2}])
def test_ea_ablations_by_keyword(name, options):
    model = timm.create_model(name, num_classes=5, **options)
    evolutions = [layer.evolution for layer in layers_of(model) if layer.evolution is not None]
    for evolution in evolutions:
        assert isinstance(evolution, EvolvingAttention)
        assert evolution.alpha == options.get("alpha", 0.5) and evolution.beta == options.get("beta", 1.0)
        side_of_kernel, heads = options.get("kernel_size", 3), evolution.convs[0].in_channels
        assert evolution.convs[0].weight.shape == (heads, heads, side_of_kernel, side_of_kernel)
        assert heads == options.get("num_heads", heads)
    assert all((layer.height_rel is None) == (options.get("relative") is False) for layer in layers_of(model))
    assert model(torch.randn(2, 3, 32, 32)).shape == (2, 5)


@pytest.mark.parametrize("name,alpha", [("pa_aa_resnet34", 0.5), ("pa_conv_transformer_cifar", 0.01)])
@pytest.mark.parametrize("num_layers", [0, 1, 2, 3])
def test_pa_ablations_by_keyword(name, alpha, num_layers):
    model = timm.create_model(name, num_classes=5, num_layers=num_layers)
    evolutions = [layer.evolution for layer in layers_of(model) if layer.evolution is not None]
    assert all(isinstance(e, PredictiveAttention) and e.alpha == alpha for e in evolutions)
    assert {len(e.convs) for e in evolutions} == {num_layers}
    assert model(torch.randn(2, 3, 32, 32)).shape == (2, 5)


def test_without_skip_and_convolution_ea_is_aa():
    plain = lively("aa_resnet34", num_classes=5).eval()
    evolving = lively("ea_aa_resnet34", num_classes=5, alpha=0.0, beta=0.0).eval()
    evolving.load_state_dict(plain.state_dict(), strict=False)
    x = torch.randn(1, 3, 64, 64)
    assert torch.equal(evolving(x), plain(x))


@pytest.mark.parametrize("name", SMALL)
def test_weight_decay_spares_norms_and_tables(name):
    from timm.optim import param_groups_weight_decay
    model = timm.create_model(name)
    spared, decayed = param_groups_weight_decay(model, 1e-4, no_weight_decay_list=model.no_weight_decay())
    names = {id(p): n for n, p in model.named_parameters()}
    spared = {names[id(p)] for p in spared["params"]}
    assert {n for n in names.values() if n.endswith("_rel")} <= spared
    assert not [names[id(p)] for p in decayed["params"] if p.ndim < 2]


@pytest.mark.parametrize("name", SMALL)
def test_layers_group_in_order(name):
    from timm.models import group_parameters
    model = timm.create_model(name)
    for coarse in (False, True):
        groups = group_parameters(model, model.group_matcher(coarse=coarse), reverse=True)
        assert set(groups) == {n for n, _ in model.named_parameters()}
        first_conv, classifier = model.default_cfg["first_conv"], model.default_cfg["classifier"]
        assert groups[f"{first_conv}.weight"] == 0
        assert groups[f"{classifier}.weight"] == max(groups.values()) > 3


def test_residual_options_of_timms_resnet_work():
    from timm.layers import BlurPool2d
    for options in (dict(aa_layer=BlurPool2d), dict(block_args=dict(attn_layer="se")), dict(output_stride=8),
                    dict(output_stride=16), dict(stem_type="deep", stem_width=32, avg_down=True)):
        model = timm.create_model("ea_aa_resnet34", num_classes=5, drop_path_rate=0.1, **options)
        x = torch.randn(2, 3, 64, 64)
        assert model(x).shape == (2, 5)
        assert model.forward_features(x).shape[-1] == 64 // options.get("output_stride", 32)


def test_pretrained_without_weights_says_so():
    with pytest.raises(RuntimeError, match="aa_resnet50 has no pretrained weights.*that have them"):
        timm.create_model("aa_resnet50", pretrained=True)


@pytest.mark.parametrize("name,options,message", [
    ("aa_resnet34", {"alpha": 0.5}, "alpha"),
    ("pa_aa_resnet34", {"beta": 0.5}, "beta"),
    ("cnn_cifar", {"kernel_size": 5}, "kernel_size"),
    ("cnn_cifar", {"evolution": "ea"}, "attention=True"),
    ("ea_aa_resnet34", {"img_size": 0}, "img_size"),
    ("ea_conv_transformer_cifar", {"img_size": 4}, "at least 8 pixels"),
    ("ea_conv_transformer_cifar", {"num_heads": 3}, "multiple of num_heads=3, got 256"),
])
def test_bad_options_are_named(name, options, message):
    with pytest.raises(ValueError, match=message):
        timm.create_model(name, **options)


def test_importing_the_package_is_light():
    import subprocess
    import sys
    code = "import ea_vision, sys; print([m for m in ('matplotlib', 'sklearn', 'ffcv') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_the_baseline_is_timms_resnet18_with_the_stem_of_small_images():
    model = timm.create_model("resnet18_cifar", num_classes=7, in_chans=1).eval()
    plain = timm.create_model("resnet18", num_classes=7, in_chans=1)
    differing = {name for name, p in model.named_parameters() if p.shape != plain.get_parameter(name).shape}
    assert differing == {"conv1.weight"} and len(list(model.parameters())) == len(list(plain.parameters()))
    features = timm.create_model("resnet18_cifar", features_only=True)
    shapes = [tuple(f.shape[1:]) for f in features(torch.zeros(1, 3, 32, 32))]
    assert shapes == [(64, 32, 32), (64, 32, 32), (128, 16, 16), (256, 8, 8), (512, 4, 4)]
    assert features.feature_info.reduction() == [1, 1, 2, 4, 8]
