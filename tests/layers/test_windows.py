"""Windows of pixels and heads in layer and networks: against their definition, and against global attention."""

import pytest
import timm
import torch
from torch.testing import assert_close

from ea_vision import ops
from ea_vision.layers import EvolvingAttention
from ea_vision.recorder.recording import recordable_layers
from tests.layers.oracle import assert_defined, doubles, make, within
from tests.models.zoo import layers_of, on_meta
from tests.recorder.networks import recorded

FOUR_HEADS = dict(dim_qk=8, dim_v=8, num_heads=4)


def local(**options):
    return make(**{**FOUR_HEADS, "feat_size": (5, 6), **options})


@pytest.mark.parametrize(
    "size,window,head_window,head_border,position",
    [
        ((4, 5), (3, 5), 1, "clip", "relative"),
        ((4, 5), (3, 5), 3, "wrap", "relative"),
        ((4, 5), (1, 3), 3, "clip", "none"),
        ((4, 5), (1, 3), 1, "wrap", "relative"),
        ((4, 5), (9, 9), 3, "clip", "relative"),
        ((4, 5), None, 3, "clip", "relative"),
        ((4, 5), (9, 9), 1, "wrap", "none"),
        ((1, 6), (3, 3), 7, "clip", "relative"),
        ((5, 1), (3, 1), 3, "wrap", "none"),
    ],
)
def test_windows_are_their_definition_with_their_gradients(
    size, window, head_window, head_border, position
):
    form = dict(window=window, head_window=head_window, head_border=head_border)
    layer = make(**FOUR_HEADS, **form, feat_size=size, position=position)
    assert_defined(layer, doubles(2, 8, *size))


def test_a_gpus_order_ends_at_the_reference_and_the_log_says_so(monkeypatch, log):
    """CUDA's order of implementations, on a CPU: neither of its kernels has windows."""
    monkeypatch.setattr(ops, "ON_CPU", ops.ON_ACCELERATORS)
    layer = local(window=3, head_window=3)
    layer(doubles(2, 8, 5, 6))
    assert log.messages == [
        "evolving attention on cpu in torch.float64 by 'reference'; not sdpa: it has no windows; not triton: it has no "
        "windows"
    ]


def test_tables_have_the_rows_that_occur_and_fit_other_maps():
    layer = local(window=(3, 15))
    assert layer.height_rel.shape == (3, 2)
    assert layer.width_rel.shape == (11, 2)
    whole = local()
    large = local(window=(3, 15), feat_size=(9, 9))
    layer.load_state_dict(whole.state_dict())
    assert torch.equal(layer.height_rel, whole.height_rel[3:6])
    assert torch.equal(layer.width_rel, whole.width_rel)
    large.load_state_dict(layer.state_dict())
    x = doubles(1, 8, 9, 9)
    assert_close(layer(x), large(x))
    layer.set_feat_size((9, 9))
    assert_close(layer(x), large(x))


def test_maps_evolve_whole_and_the_window_comes_after():
    x = doubles(2, 8, 5, 6)
    _, logits = local(window=3)(x, need_logits=True)
    assert logits.isfinite().all()
    second = local(window=3, evolution=EvolvingAttention(4, 0.3, 0.6))
    assert_defined(second, x, logits.detach())


@pytest.mark.parametrize(
    "options",
    [
        {"window": 3, "head_window": 1},
        {"window": 3, "head_window": 3},
        {"window": 3, "evolution": "ea"},
    ],
)
def test_recorded_maps_are_windowed_and_recording_changes_nothing(options):
    small = dict(widths=(8, 8, 16, 16), num_classes=3)
    model = timm.create_model("conv_transformer_cifar", **small, **options).eval()
    for layer in recorded(model, torch.randn(2, 3, 32, 24)).values():
        sums = layer.attn.sum(-1)
        assert sums.shape == (2, 4, layer.feat_size[0] * layer.feat_size[1])
        assert_close(sums, torch.ones_like(sums))
        assert not layer.attn.masked_fill(within(layer.feat_size, (3, 3)), 0).any()
    parts = ("attn",) if options.get("head_window") == 3 else ("attn", "logits", "self_logits")
    assert recordable_layers(model)[0].parts == parts


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"window": 3},
        {"window": (3, 15), "head_window": 3},
        {"window": 3, "head_window": 3, "head_border": "wrap"},
    ],
)
def test_the_elements_of_a_map_are_those_that_are_seen(options):
    layer = local(**options)
    seen = []
    layer.attn_drop.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    layer(doubles(1, 8, 5, 6))
    assert layer.map_elements((5, 6)) == (seen[0] > 0).sum()


def test_names_of_csan():
    model = on_meta("csan_resnet50")
    windows = {(layer.feat_size, layer.window, layer.head_window) for layer in layers_of(model)}
    assert windows == {((28, 28), (7, 7), 3), ((14, 14), (7, 7), 3), ((7, 7), None, 1)}
    small = layers_of(timm.create_model("csan_conv_transformer_cifar"))
    windows = [(layer.window, layer.head_window) for layer in small]
    assert windows == [((5, 5), 3)] * 3 + [(None, 1)] * 3
    tables = [layer.height_rel.numel() + layer.width_rel.numel() for layer in small[:3]]
    assert tables == [2 * 5 * 64] * 3  # nothing else differs


def test_stand_alone_self_attention_is_a_configuration():
    model = on_meta("aa_resnet50", qk_ratio=1.0, v_ratio=1.0, window=7, map_reduction=8)
    layers = {(layer.conv, layer.window, layer.num_pools) for layer in layers_of(model)}
    assert layers == {(None, (7, 7), 0), (None, (7, 7), 1)}
