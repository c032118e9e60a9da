"""Evolving attention over sequences (EA paper, section 3.5): no leak from the future, no dependence on padding."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

from ea_vision.layers import EvolvingAttention, PredictiveAttention
from ea_vision.ops.reference import attention_of, mask_logits
from tests.layers.oracle import assert_same, by_head, doubles
from tests.refused import refused


def evolution(causal, kernel_size=3, beta=0.6, **options):
    torch.manual_seed(0)
    options.update(beta=beta, kernel_size=kernel_size, causal=causal)
    module = EvolvingAttention(2, **options).double()
    # entries pass the ReLU, so that their gradients show what is read
    nn.init.constant_(module.convs[0].bias, 0.5)
    return module


def masked_attention(module, logits):
    """Return the probabilities of evolved logits (B, K, queries, keys) under the module's mask."""
    return attention_of(mask_logits(module(logits), module.causal))


def causal_equation(module, logits):
    """Return a decoder's evolved logits.

    The kernel's last row lies on the entry's row. In self-attention its last column lies on the entry's column, and
    3x3 reads 6 entries on the diagonal, as in the paper.
    """
    conv = module.convs[0]
    last = conv.kernel_size[0] - 1
    reach = last // 2
    in_itself = module.causal == "self"
    Q, N = logits.shape[2:]
    readable = torch.ones(Q, N).tril(N - Q) if in_itself else torch.ones(Q, N)
    seen = logits * readable
    columns = (last, 0) if in_itself else (reach, reach)
    convolved = F.conv2d(F.pad(seen, (*columns, last, 0)), conv.weight) + by_head(conv.bias)
    after_start = readable.clone()
    after_start[:reach] = 0
    if in_itself:
        after_start[:, :reach] = 0
    return module.beta * convolved.relu() * after_start + (1 - module.beta) * seen


@pytest.mark.parametrize("kernel_size", [1, 3, 5])
@pytest.mark.parametrize("causal", ["self", "cross"])
@pytest.mark.parametrize("queries, keys", [(1, 1), (2, 2), (6, 6), (6, 7)])
def test_a_decoder_reads_the_rows_before_and_in_itself_the_keys_before(
    causal, queries, keys, kernel_size
):
    """Also where the sequence is shorter than the kernel."""
    module = evolution(causal, kernel_size)
    logits = doubles(2, 2, queries, keys).requires_grad_()
    inputs = [logits, *module.convs.parameters()]
    assert_same(module(logits), causal_equation(module, logits), inputs)


@pytest.mark.parametrize("causal", ["self", "cross"])
def test_step_by_step_equals_at_once(causal):
    """A step with the two previous rows of logits is a map of three rows."""
    module = evolution(causal)
    logits = doubles(2, 2, 8, 8)
    whole = masked_attention(module, logits)
    for i in range(8):
        keys = i + 1 if causal == "self" else 8
        first = max(0, i - 2)
        step = masked_attention(module, logits[:, :, first : i + 1, :keys])
        assert_close(step[:, :, -1], whole[:, :, i, :keys])
        prefix = masked_attention(module, logits[:, :, : i + 1, :keys])
        assert_close(prefix, whole[:, :, : i + 1, :keys])


@pytest.mark.parametrize("kernel_size", [3, 5])
@pytest.mark.parametrize("kind", ["ea", "pa", "self", "cross"])
@pytest.mark.parametrize("left,right", [(1, 0), (0, 3), (2, 1), (5, 0)])
def test_a_padded_sequence_is_the_sequence_without_padding(kind, left, right, kernel_size):
    """The convolution's values at the padding do not reach the sequence."""
    if kind == "pa":
        module = PredictiveAttention(2, 0.4, num_layers=2, kernel_size=kernel_size).double()
    elif kind == "ea":
        module = evolution("none", kernel_size, alpha=0.4)
    else:
        module = evolution(kind, kernel_size)
    end = left + 6
    length = end + right
    inside = slice(left, end)
    logits, prev_logits = 5 * doubles(2, 1, 2, length, length)
    padding = torch.ones(1, length, dtype=torch.bool)
    padding[:, inside] = False

    def attention(logits, prev_logits, padding):
        evolved = module(logits, prev_logits, padding, padding)
        return attention_of(mask_logits(evolved, module.causal, padding))

    attn = attention(logits, prev_logits, padding)[:, :, inside]
    assert not attn[..., :left].any()
    assert not attn[..., end:].any()
    alone = attention(logits[..., inside, inside], prev_logits[..., inside, inside], None)
    assert_close(attn[..., inside], alone)


@pytest.mark.parametrize(
    "options,message",
    [
        ({}, "prev_logits of the previous layer required, got None"),
        ({"causal": "future"}, "'none', 'self' or 'cross', got 'future'"),
        ({"alpha": 0.5, "causal": "self"}, "has no skip connection: leave alpha out, got 0.5"),
    ],
)
def test_bad_options_are_named(options, message):
    with refused(message, ValueError):
        EvolvingAttention(2, **options)(torch.randn(1, 2, 5, 5))


def test_a_causal_form_has_an_identity_start():
    module = EvolvingAttention(2, beta=0.0, causal="self", learnable=True)
    assert module.alpha == 0.0
    assert isinstance(module.beta, nn.Parameter)
    assert module.operands(None) is None
    assert "no causal form" in module.reason_against()
    logits = torch.randn(1, 2, 5, 5)
    plain = attention_of(mask_logits(logits, "self"))
    assert_close(masked_attention(module, logits), plain, atol=0, rtol=0)
