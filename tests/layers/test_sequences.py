"""Evolving attention over sequences (EA paper, section 3.5): no leak from the future, no dependence on padding."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from ea_vision.layers import EvolvingAttention, PredictiveAttention
from ea_vision.ops.reference import attention_of, mask_logits
from tests.layers.oracle import doubles
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


def attends_to(module, queries, keys):
    """Return whether the probabilities of row i depend on the logit (r, c), (queries, queries, keys)."""
    logits = 0.1 * doubles(1, 2, queries, keys)

    def rows(logits):
        squares = masked_attention(module, logits).square()
        return squares.sum((0, 1, 3))

    jacobian = torch.autograd.functional.jacobian(rows, logits)
    return jacobian.abs().sum((1, 2)) > 0


@pytest.mark.parametrize("kernel_size", [1, 3, 5])
@pytest.mark.parametrize("causal, keys", [("self", 6), ("cross", 7)])
def test_a_decoder_reads_no_later_row_and_in_itself_no_later_key(causal, keys, kernel_size):
    """Each row reads only itself and the kernel_size - 1 rows before it."""
    reads = attends_to(evolution(causal, kernel_size), 6, keys)
    may = torch.ones(6, keys, dtype=torch.bool)
    if causal == "self":
        may = may.tril()
    for row in range(6):
        of_row = reads[row]
        first = max(0, row - kernel_size + 1)
        assert not of_row[row + 1 :].any()
        assert not of_row[:first].any()
        assert not of_row[~may].any()
        if may[row].sum() > 1:  # a softmax over one key is constant
            assert of_row[row, may[row]].all()
    if kernel_size > 1:
        assert reads[5, 4][may[4]].all()


@pytest.mark.parametrize("N", [1, 2])
@pytest.mark.parametrize("causal", ["self", "cross"])
def test_a_sequence_shorter_than_the_kernel_reads_nothing_later(causal, N):
    """Zeros are padded before the sequence, and the convolution's result is zero."""
    module = evolution(causal, kernel_size=5)
    logits = doubles(1, 2, N, N)
    seen = logits.tril() if causal == "self" else logits
    assert_close(module(logits), 0.4 * seen)


@pytest.mark.parametrize(
    "row,column,count", [(5, 5, 6), (5, 4, 8), (6, 3, 9), (0, 0, 0), (1, 1, 3)]
)
def test_a_decoder_entry_reads_six_eight_or_nine_entries(row, column, count):
    """Rows i-2..i and columns j-2..j, without columns after the row: 6 entries on the diagonal, as in the paper."""
    module = evolution("self", beta=1.0)
    nn.init.constant_(module.convs[0].weight, 0.1)
    logits = torch.rand(1, 2, 8, 8).double()
    jacobian = torch.autograd.functional.jacobian(module, logits)
    read = jacobian[0, 0, row, column, 0, 0] != 0
    assert read.sum() == count
    near = torch.zeros(8, 8, dtype=torch.bool)
    near[max(0, row - 2) : row + 1, max(0, column - 2) : column + 1] = True
    assert not (read & ~near).any()
    evolved = module(logits)  # zeros enter
    assert not evolved[..., 0, :].any()
    assert not evolved[..., :, 0].any()


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
