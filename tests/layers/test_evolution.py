"""The evolution modules against DESIGN's equations, and what they refuse."""
import pytest
import torch
from torch import nn

from ea_vision.layers import EvolvingAttention, PredictiveAttention, create_evolution
from ea_vision.ops import evolving_attention
from tests.layers.oracle import loop_map_conv


@pytest.mark.parametrize("alpha,beta,kernel_size", [(0.5, 1.0, 3), (0.7, 0.3, 1), (0.0, 0.4, 5), (1.0, 0.0, 3)])
def test_evolving_attention_is_the_papers_equation(alpha, beta, kernel_size):
    module = EvolvingAttention(3, alpha, beta, kernel_size).double()
    logits, prev = torch.randn(2, 2, 3, 7, 7, dtype=torch.float64)
    mixed = alpha * prev + (1 - alpha) * logits
    convolved = torch.stack([loop_map_conv(m, module.convs[0]) for m in mixed])
    torch.testing.assert_close(module(logits, prev), beta * convolved + (1 - beta) * mixed)


@pytest.mark.parametrize("num_layers", [0, 1, 2, 3])
def test_predictive_attention_is_the_papers_equation(num_layers):
    module = PredictiveAttention(3, 0.2, num_layers).double()
    logits, prev = torch.randn(2, 2, 3, 7, 7, dtype=torch.float64)
    predicted = prev
    for conv in module.convs:
        predicted = torch.stack([loop_map_conv(m, conv) for m in predicted])
    assert len(module.convs) == num_layers
    torch.testing.assert_close(module(logits, prev), 0.2 * predicted + 0.8 * logits)


def test_bad_options_are_named():
    with pytest.raises(ValueError, match="alpha must lie between 0 and 1, got 1.5"):
        EvolvingAttention(4, alpha=1.5)
    with pytest.raises(ValueError, match="alpha must lie between 0 and 1, got x"):
        EvolvingAttention(4, alpha="x")
    with pytest.raises(ValueError, match="beta must lie between 0 and 1, got -1"):
        EvolvingAttention(4, beta=-1)
    with pytest.raises(ValueError, match="odd and positive, got 4"):
        EvolvingAttention(4, kernel_size=4)
    with pytest.raises(ValueError, match="num_layers must be 0 or more, got -1"):
        PredictiveAttention(4, num_layers=-1)
    with pytest.raises(ValueError, match="one of 'ea', 'pa' or None, got 'xa'"):
        create_evolution("xa", 4)
    with pytest.raises(ValueError, match="beta"):
        create_evolution("pa", 4, beta=0.5)
    with pytest.raises(ValueError, match="alpha"):
        create_evolution(None, 4, alpha=0.5)


@pytest.mark.parametrize("learnable", [True, "per_head"])
@pytest.mark.parametrize("kind", ["ea", "pa"])
def test_learnable_gates_satisfy_the_equations_and_have_their_gradients(kind, learnable):
    module = create_evolution(kind, 3, alpha=0.3, learnable=learnable).double()
    values = torch.linspace(-0.4, 1.7, 3, dtype=torch.float64)  # outside 0 to 1, too
    with torch.no_grad():
        for place, gate in enumerate(module.gates().values()):
            gate.copy_(values.roll(place) if learnable == "per_head" else values[place])
    logits, prev = torch.randn(2, 2, 3, 7, 7, dtype=torch.float64)
    alpha, beta = (getattr(module, name) * torch.ones(3, 1, 1) if learnable is True else
                   torch.as_tensor(getattr(module, name)).expand(3).view(3, 1, 1) for name in ("alpha", "beta"))
    if kind == "ea":
        mixed = alpha * prev + (1 - alpha) * logits
        expected = beta * module.convs[0](mixed).relu() + (1 - beta) * mixed
    else:
        expected = alpha * module.convs[0](prev).relu() + (1 - alpha) * logits
    torch.testing.assert_close(module(logits, prev), expected)
    fixed = create_evolution(kind, 3).double().load_state_dict(module.state_dict(), strict=False)
    assert fixed.unexpected_keys == list(module.gates()) and not fixed.missing_keys

    names = [name for name, _ in module.named_parameters()]
    assert names[:len(module.gates())] == list(module.gates())
    q, k = torch.randn(2, 1, 3, 4, 2, dtype=torch.float64)
    prev = torch.randn(1, 3, 4, 4, dtype=torch.float64, requires_grad=True)

    def run(prev, *values):
        def call(_, prev):
            return evolving_attention(q, k, q, **module.operands(prev))
        return torch.func.functional_call(_Calls(module, call), dict(zip(keys, values, strict=True)), (prev,))

    keys = [f"module.{name}" for name in names]
    assert torch.autograd.gradcheck(run, (prev, *(p.detach().clone().requires_grad_() for p in module.parameters())))


class _Calls(nn.Module):
    def __init__(self, module, call):
        super().__init__()
        self.module, self.call = module, call

    def forward(self, *args):
        return self.call(self.module, *args)


@pytest.mark.parametrize("kind", ["ea", "pa"])
def test_learnable_gates_at_zero_change_no_bit_and_can_leave(kind):
    module = create_evolution(kind, 3, alpha=0.0, learnable=True, **({"beta": 0.0} if kind == "ea" else {}))
    logits, prev = torch.randn(2, 2, 3, 7, 7)
    evolved = module(logits, prev)
    assert torch.equal(evolved, logits) and module.changes_nothing()
    evolved.square().sum().backward()
    assert all(gate.grad.any() for gate in module.gates().values())
    with torch.no_grad():
        module.alpha -= 0.1
    assert not module.changes_nothing() and not torch.equal(module(logits, prev), logits)
    module.reset_parameters()
    assert module.alpha == 0 and module.convs[0].weight.any()


def test_half_maps_keep_their_dtype_with_learnable_gates():
    for learnable in (True, "per_head"):
        module = EvolvingAttention(3, 0.3, 0.6, learnable=learnable).bfloat16().float()
        logits, prev = torch.randn(2, 2, 3, 7, 7)
        with torch.autocast("cpu", torch.bfloat16):
            evolved = module(logits.bfloat16(), prev.bfloat16())
        assert evolved.dtype == torch.bfloat16
        torch.testing.assert_close(evolved.float(), module(logits, prev), atol=0.05, rtol=0.05)


def test_bad_gates_are_named():
    with pytest.raises(ValueError, match="alpha must be a finite number, got inf"):
        EvolvingAttention(4, alpha=float("inf"), learnable=True)
    with pytest.raises(ValueError, match="False, True or 'per_head', got 2"):
        EvolvingAttention(4, learnable=2)
    assert EvolvingAttention(4, alpha=-0.5, beta=2, learnable=True).beta.item() == 2.0
