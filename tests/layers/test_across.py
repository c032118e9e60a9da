"""The mechanisms of `ea_vision.layers.across`, each against its equation in a slow loop, outputs and gradients."""
import pytest
import torch

from ea_vision.layers import MRLALight, TokenConv, ValueResidual, create_evolution
from tests.layers import across_oracle as oracle

KINDS = ["residual", "talking_heads", "reattention", "refiner", "mta", "conv2d"]
K, SIZE = 3, (2, 3)
N = SIZE[0] * SIZE[1]


def maps(seed: int, prefix: int = 0, shape=None) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    side = N + prefix
    return torch.randn(shape or (2, K, side, side), generator=generator, dtype=torch.float64).requires_grad_()


def new(kind: str, **options):
    """A mechanism in float64 of which all counts: nothing is at a start that would hide a mistake."""
    torch.manual_seed(0)
    mechanism = create_evolution(kind, K, dtype=torch.float64, **options)
    with torch.no_grad():
        for parameter in mechanism.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return mechanism


def run(mechanism, logits, prev, size=SIZE):
    """The maps that weigh the values."""
    logits = mechanism(logits, prev, size) if mechanism.spatial else mechanism(logits, prev)
    attn = mechanism.mix_attn(logits.softmax(-1))
    if mechanism.mixes_output:  # of values with the maps' own shape
        values = torch.ones_like(logits) + logits.detach()
        return mechanism.mix_output(attn, values, values[:, 0, :, :1])
    return attn


def assert_same(mechanism, expected, inputs) -> None:
    """Outputs and all gradients of two functions of the same inputs and parameters."""
    actual = mechanism[0]
    torch.testing.assert_close(actual, expected, atol=1e-10, rtol=1e-10)
    weights = torch.randn(actual.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    inputs = [*inputs, *mechanism[1].parameters()]
    grads = [torch.autograd.grad((y * weights).sum(), inputs, retain_graph=True, allow_unused=True)
             for y in (actual, expected)]
    assert all(grad is not None for grad in grads[1])
    torch.testing.assert_close(grads[0], grads[1], atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("options", [
    {}, {"mixture": True}, {"learnable": True}, {"mixture": True, "learnable": True}, {"learnable": "per_head"}])
def test_residual_is_its_equation(options):
    mechanism, logits, prev = new("residual", **options), maps(1), maps(2)
    mixture, alpha = "mixture" in options, mechanism.alpha
    if "learnable" not in options:
        assert alpha == (0.5 if mixture else 1.0)
    if options.get("learnable") == "per_head":
        alpha = alpha.view(-1, 1, 1).expand(logits.shape).flatten()
        expected = torch.stack([a + g * b for a, b, g in zip(logits.flatten(), prev.flatten(), alpha, strict=True)])
        expected = expected.view(logits.shape)
    else:
        expected = oracle.residual(logits, prev, alpha, mixture)
    assert_same((mechanism(logits, prev), mechanism), expected, (logits, prev))


def test_residual_mixture_is_realformers_running_mean():
    own = [maps(seed) for seed in range(4)]
    carried = own[0]
    for layer, logits in enumerate(own[1:], start=1):
        carried = create_evolution("residual", K, mixture=True, alpha=layer / (layer + 1))(logits, carried)
    torch.testing.assert_close(carried, sum(own) / 4)


def test_talking_heads_are_their_equation():
    m, logits = new("talking_heads"), maps(1)
    attn = oracle.softmax(oracle.mix_heads(logits, m.proj_l.weight, m.proj_l.bias))
    assert_same((run(m, logits, logits), m), oracle.mix_heads(attn, m.proj_w.weight, m.proj_w.bias), (logits,))


@pytest.mark.parametrize("gain", [None, 0.7])
def test_reattention_is_its_equation(gain):
    m, logits = new("reattention", gain=gain, scale=0.5), maps(1)
    attn = oracle.softmax(logits)
    mixed = oracle.mix_heads(attn, m.reatten_matrix.weight[:, :, 0, 0], m.reatten_matrix.bias)
    mixed = 0.5 * oracle.batch_norm(mixed, m.var_norm.weight, m.var_norm.bias)
    assert_same((run(m, logits, logits), m), mixed if gain is None else attn + m.gain * mixed, (logits,))


@pytest.mark.parametrize("gain", [None, 0.7])
def test_refiner_is_its_equation(gain):
    m, logits = new("refiner", gain=gain, expansion=2), maps(1)
    attn = oracle.softmax(logits)
    x = oracle.mix_heads(attn, m.conv_exp.weight[:, :, 0, 0])
    x = oracle.depthwise(oracle.relu6(oracle.batch_norm(x, m.bn1.weight, m.bn1.bias)), m.depth_sep_conv.weight)
    x = oracle.mix_heads(oracle.relu6(oracle.batch_norm(x, m.bn2.weight, m.bn2.bias)), m.conv_pro.weight[:, :, 0, 0])
    x = attn + oracle.batch_norm(x, m.bn3.weight, m.bn3.bias)
    refined = oracle.batch_norm(x, m.adapt_bn.weight, m.adapt_bn.bias)
    assert_same((run(m, logits, logits), m), refined if gain is None else attn + m.gain * refined, (logits,))


def test_multi_token_attention_is_its_equation():
    m, logits = new("mta", map_kernel=(3, 5), head_kernel=1), maps(1)
    attn = oracle.softmax(oracle.mix_heads(oracle.depthwise(logits, m.conv_before), m.heads_before))
    attn = oracle.depthwise(attn, m.conv_after)
    expected = torch.stack([m.heads_after[k, 0, 0] * attn[:, k] for k in range(K)], dim=1)
    assert_same((run(m, logits, logits), m), expected, (logits,))


def test_groups_of_heads_mix_among_themselves():
    m = create_evolution("mta", 4, dtype=torch.float64, map_kernel=(1, 1), head_kernel=2)
    torch.nn.init.normal_(m.heads_after)
    attn = maps(1, shape=(1, 4, 3, 3))
    expected = torch.stack([sum(m.heads_after[e // 2, c, e % 2] * attn[:, e // 2 * 2 + c] for c in range(2))
                            for e in range(4)], dim=1)
    torch.testing.assert_close(m.mix_attn(attn), expected)


@pytest.mark.parametrize("prefix", [0, 1, 2])
def test_conv2d_is_a_four_dimensional_loop_on_a_map_that_is_not_square(prefix):
    mechanism, logits, prev = new("conv2d"), maps(1, prefix), maps(2, prefix)
    mechanism.num_prefix_tokens = prefix
    expected = oracle.conv2d(logits, prev, mechanism.alpha, mechanism.keys, mechanism.queries, SIZE, prefix)
    actual = mechanism(logits, prev, SIZE)
    assert_same((actual, mechanism), expected, (logits, prev))
    mixed = logits + mechanism.alpha * prev
    assert torch.equal(actual[:, :, :prefix], mixed[:, :, :prefix])
    assert torch.equal(actual[..., :prefix], mixed[..., :prefix])


@pytest.mark.parametrize("gain", [None, 0.7])
def test_exclusive_attention_is_its_equation(gain):
    m, out, values = new("xsa", gain=gain), maps(1, shape=(2, K, N, 4)), maps(2, shape=(2, K, N, 4))
    gains = torch.ones(K, dtype=torch.float64) if gain is None else m.gain
    actual = m.mix_output(out, values, None)
    assert_same((actual, m), oracle.exclusive(out, values, gains), (out, values))
    if gain is None:
        assert (actual * values).sum(-1).abs().max() < 1e-12  # nothing of the own value is left


@pytest.mark.parametrize("identity", [False, True])
def test_gated_attention_is_its_equation(identity):
    m, out, x = new("gated", channels=5, identity=identity), maps(1, shape=(2, K, N, 4)), maps(2, shape=(2, N, 5))
    expected = oracle.gated(out, x, m.gate.weight, m.gate.bias, 2.0 if identity else 1.0)
    assert_same((m.mix_output(out, None, x), m), expected, (out, x))


def test_value_residual_is_its_equation():
    module = ValueResidual(identity=False, dtype=torch.float64)
    with torch.no_grad():
        module.lambdas.add_(torch.tensor([0.2, -0.1], dtype=torch.float64))
    values, first = maps(1), maps(2)
    assert_same((module(values, first), module), oracle.value_residual(values, first, module.lambdas), (values, first))


def test_mrla_is_its_equation():
    torch.manual_seed(0)
    m = MRLALight(8, dim_group=4, identity=False, dtype=torch.float64)
    x, shortcut = maps(1, shape=(2, 8, 2, 3)), maps(2, shape=(2, 8, 2, 3))
    expected = oracle.mrla_light(x, shortcut, m.query.weight[0, 0], m.key.weight[0, 0], m.value.weight,
                                 m.shortcut_scale[:, 0, 0], 4)
    expected = oracle.batch_norm(expected, m.bn.weight, m.bn.bias)
    assert_same((m(x, shortcut), m), expected, (x, shortcut))


def test_token_conv_sees_the_patches_neighbours_in_the_image():
    m = TokenConv(4, num_prefix_tokens=1, identity=False, dtype=torch.float64)
    x = maps(1, shape=(2, 1 + N, 4))
    y = m(x, SIZE)
    assert torch.equal(y[:, :1], x[:, :1])
    image = x[:, 1:].transpose(1, 2).reshape(2, 4, *SIZE)
    expected = image + oracle.depthwise(image, m.conv.weight) + m.conv.bias.view(-1, 1, 1)
    assert_same((y[:, 1:], m), expected.flatten(2).transpose(1, 2), (x,))


@pytest.mark.parametrize("kind", ["ea", "pa", "xsa", "gated", *KINDS])
def test_an_identity_start_changes_nothing_and_learns(kind):
    torch.manual_seed(0)
    mechanism = create_evolution(kind, K, start="identity", channels=1)
    logits, prev = maps(1).float().detach(), maps(2).float().detach()
    assert mechanism.changes_nothing()
    actual = run(mechanism, logits, prev)
    assert torch.equal(actual, logits.softmax(-1))
    learned = []
    for _ in range(2):
        mechanism.zero_grad()
        run(mechanism, logits, prev).square().sum().backward()
        learned.append(any(p.grad is not None and p.grad.any() for p in mechanism.parameters()))
        with torch.no_grad():
            for p in mechanism.parameters():
                p.sub_(0.1 * p.grad)
    assert all(learned) and not mechanism.changes_nothing()
    assert [name for name, p in mechanism.named_parameters() if not p.grad.any()] == []


@pytest.mark.parametrize("kind", ["residual", "talking_heads", "reattention", "refiner", "conv2d", "xsa", "gated"])
def test_a_papers_start_changes_maps(kind):
    torch.manual_seed(0)
    mechanism, logits, prev = create_evolution(kind, K, start="paper", dtype=torch.float64), maps(1), maps(2)
    assert not mechanism.changes_nothing()
    assert not torch.allclose(run(mechanism, logits, prev), logits.softmax(-1), atol=1e-4)


def test_starts_and_options_that_there_are_not():
    with pytest.raises(ValueError, match="start must be 'identity' or 'paper', got 'zero'"):
        create_evolution("conv2d", K, start="zero")
    with pytest.raises(ValueError, match="two odd numbers .* got .4, 11."):
        create_evolution("mta", K, map_kernel=(4, 11))
    with pytest.raises(ValueError, match="must divide num_heads=3, got 2"):
        create_evolution("mta", K, head_kernel=2)
    with pytest.raises(ValueError, match="odd and positive, got 2"):
        create_evolution("conv2d", K, kernel_size=2)
    with pytest.raises(ValueError, match="dim_group=32 divides, got 48"):
        MRLALight(48)
    with pytest.raises(ValueError, match="'residual' has alpha, mixture, learnable; got beta"):
        create_evolution("residual", K, beta=0.5)


def test_uniform_maps_are_uniform():
    logits = maps(1)
    attn = run(create_evolution("uniform", K), logits, logits)
    assert torch.equal(attn, torch.full_like(attn, 1 / N))
