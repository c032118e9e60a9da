"""Windows of pixels and heads in layer and networks: against their definition, and against global attention."""

import pytest
import timm
import torch
from torch.testing import assert_close

from ea_vision import ops
from ea_vision.layers import AugmentedConv2d, EvolvingAttention
from ea_vision.ops import evolving_attention
from ea_vision.recorder.recording import recordable_layers
from tests.layers.oracle import assert_same, doubles, offsets, own_logits
from tests.models.zoo import layers_of, on_meta
from tests.recorder.networks import recorded
from tests.refused import refused


def within(size, window):
    """Return (N, N): whether a key lies in a query's window (height, width); None is a window of the whole map."""
    down, right = offsets(size)
    if window is None:
        return torch.ones_like(down, dtype=torch.bool)
    return (down.abs() <= window[0] // 2) & (right.abs() <= window[1] // 2)


def defined(q, k, v, height_rel, width_rel, size, window, head_window, head_border):
    """Attention by the definition, head by head: (B, K, N, D) each; the middle row of a table is offset 0."""
    K = q.shape[1]
    q = q * q.shape[3] ** -0.5
    near = within(size, window)
    heads = []
    for h in range(K):
        weights = []
        values = []
        for head in range(h - head_window // 2, h + head_window // 2 + 1):
            if head_border == "clip" and not 0 <= head < K:
                continue
            logits = own_logits(q[:, h], k[:, head % K], height_rel, width_rel, size)
            weights.append(logits.exp() * near)
            values.append(v[:, head % K])
        attn = torch.cat(weights, 2)
        heads.append(attn @ torch.cat(values, 1) / attn.sum(2, keepdim=True))
    return torch.stack(heads, 1)


def problem(size, window, dim_qk=3, dim_v=2, relative=True):
    shapes = [(2, 4, size[0] * size[1], width) for width in (dim_qk, dim_qk, dim_v)]
    if relative:
        for side, most in zip(size, window or (99, 99), strict=True):
            shapes.append((min(most, 2 * side - 1), dim_qk))
    return [doubles(*shape).requires_grad_() for shape in shapes]


@pytest.mark.parametrize(
    "size,window,head_window,head_border,relative",
    [
        ((4, 5), (3, 5), 1, "clip", True),
        ((4, 5), (3, 5), 3, "wrap", True),
        ((4, 5), (1, 3), 3, "clip", False),
        ((4, 5), (1, 3), 1, "wrap", True),
        ((4, 5), (9, 9), 3, "clip", True),
        ((4, 5), None, 3, "clip", True),
        ((4, 5), (9, 9), 1, "wrap", False),
        ((1, 6), (3, 3), 7, "clip", True),
        ((5, 1), (3, 1), 3, "wrap", False),
    ],
)
def test_windows_are_their_definition_with_their_gradients(
    size, window, head_window, head_border, relative
):
    tensors = problem(size, window, relative=relative)
    form = dict(window=window, head_window=head_window, head_border=head_border)
    options = dict(form, feat_size=size, need_logits=False)
    tables = tensors[3:] or [None, None]
    expected = defined(*tensors[:3], *tables, size, **form)
    near = {"atol": 1e-12, "rtol": 1e-9}
    assert_same(evolving_attention(*tensors, **options)[0], expected, tensors, **near)


def test_what_an_implementation_cannot_do_is_named():
    tensors = [t.detach() for t in problem((4, 5), (3, 3))]
    prev = torch.zeros(2, 4, 20, 20).double()
    form = {"feat_size": (4, 5), "window": 3, "need_logits": False}
    for by, reason, options in (
        ("sdpa", "it does not return logits", {"window": None, "need_logits": True}),
        ("sdpa", "it has no windows", {}),
        ("cpu", "it has no windows of heads", {"head_window": 3}),
    ):
        with refused(f"'{by}' cannot run this: {reason}", ValueError):
            evolving_attention(*tensors, implementation=by, **{**form, **options})
    with refused("head_window must be 1 where maps evolve", ValueError):
        evolving_attention(*tensors, prev, **form, head_window=3)


def test_a_gpus_order_ends_at_the_reference_and_the_log_says_so(monkeypatch, caplog):
    """CUDA's order of implementations, on a CPU: neither of its kernels has windows."""
    monkeypatch.setattr(ops, "ON_CPU", ops.ON_ACCELERATORS)
    layer = make(window=3, head_window=3)
    with caplog.at_level("INFO"):
        layer(doubles(2, 4, 5, 6))
    assert caplog.messages == [
        "evolving attention on cpu in torch.float64 by 'reference'; not sdpa: it has no windows; not triton: it has no "
        "windows"
    ]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_the_reference(dtype):
    tensors = [t.detach().to(dtype) for t in problem((6, 6), (3, 3), dim_qk=8, dim_v=8)]
    form = {"feat_size": (6, 6), "window": 3, "head_window": 3, "need_logits": False}
    half, _ = evolving_attention(*tensors, **form)
    doubles = [t.double() for t in tensors]
    exact, _ = evolving_attention(*doubles, **form, implementation="reference")
    assert half.dtype == dtype
    assert_close(half.double(), exact, atol=2e-2, rtol=1e-2)


def make(**options):
    torch.manual_seed(0)
    options = {"dim_qk": 8, "dim_v": 8, "num_heads": 4, "feat_size": (5, 6), **options}
    return AugmentedConv2d(4, 16, **options).double()


def attention_seen(layer):
    """The probabilities of all runs from now on."""
    seen = []
    layer.attn_drop.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    return seen


def test_every_row_of_a_table_has_a_gradient_and_tables_fit_other_maps():
    layer = make(window=(3, 15))
    assert layer.height_rel.shape == (3, 2)
    assert layer.width_rel.shape == (11, 2)  # no more than occur
    y, _ = layer(doubles(1, 4, 5, 6))
    y.square().sum().backward()
    assert layer.height_rel.grad.all()
    assert layer.width_rel.grad.all()
    whole = make()
    large = make(window=(3, 15), feat_size=(9, 9))
    layer.load_state_dict(whole.state_dict())
    assert torch.equal(layer.height_rel, whole.height_rel[3:6])
    assert torch.equal(layer.width_rel, whole.width_rel)
    large.load_state_dict(layer.state_dict())
    x = doubles(1, 4, 9, 9)
    assert_close(layer(x), large(x))
    layer.set_feat_size((9, 9))
    assert_close(layer(x), large(x))


def test_maps_evolve_whole_and_the_window_comes_after():
    first = make(window=3)
    second = make(window=3, evolution=EvolvingAttention(4, 0.3, 0.6))
    x = doubles(2, 4, 5, 6)
    _, logits = first(x, need_logits=True)
    assert logits.isfinite().all()
    assert logits.shape == (2, 4, 30, 30)
    y, evolved = second(x, logits)
    q, k, v, size = second.heads_of(second.qkv(second.branch_input(x)))
    expected = second.evolution(second.logits_of(q, k, size), logits)
    assert_close(evolved, expected)
    attn = expected.exp() * within((5, 6), (3, 3))
    heads = (attn @ v / attn.sum(-1, keepdim=True)).transpose(-2, -1)
    assert_close(second.proj(heads.reshape(2, 8, 5, 6)), y[:, 8:])
    (y.sum() + evolved.sum()).backward()
    assert all(p.grad is not None for p in second.parameters())


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
    layer = make(**options)
    seen = attention_seen(layer)
    layer(doubles(1, 4, 5, 6))
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
    count = sum(p.numel() for p in model.parameters())
    assert count / 1e6 == pytest.approx(19.4, abs=0.06)
