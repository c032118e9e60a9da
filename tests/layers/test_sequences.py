"""Evolving attention over sequences (EA paper, section 3.5): no leak from the future, no dependence on padding."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from ea_vision.layers import EvolvingAttention, PredictiveAttention
from ea_vision.ops.reference import attention_of, mask_logits

D64 = torch.float64


def evolution(causal, kernel_size=3, beta=0.6, **options):
    torch.manual_seed(0)
    module = EvolvingAttention(
        2, beta=beta, kernel_size=kernel_size, causal=causal, **options
    ).double()
    nn.init.constant_(
        module.convs[0].bias, 0.5
    )  # entries pass the ReLU, so that what is read can be seen
    return module


def attends_to(module, queries, keys):
    """Of the masked attention: whether row i's probabilities depend on the logit (r, c): (queries, queries, keys)."""
    logits = 0.1 * torch.randn(1, 2, queries, keys, dtype=D64)

    def rows(logits):
        return attention_of(mask_logits(module(logits), module.causal)).square().sum((0, 1, 3))

    return torch.autograd.functional.jacobian(rows, logits).abs().sum((1, 2)) > 0


@pytest.mark.parametrize("kernel_size", [1, 3, 5])
@pytest.mark.parametrize("causal", ["self", "cross"])
def test_no_later_row_is_read_and_of_a_decoder_no_later_key(causal, kernel_size):
    """Across a decoder and its source every key may be read."""
    alone = causal == "self"
    reads = attends_to(evolution(causal, kernel_size), 6, 6 if alone else 7)
    for row in range(6):
        assert not reads[row, row + 1 :].any()  # a later query
        assert not alone or not reads[row].triu(1).any()  # a key after its query
        seen = reads[row, row, : row + 1] if alone else reads[row, row]
        assert seen.all() or len(seen) == 1  # a softmax over one key is constant
        assert not reads[
            row, : max(0, row - kernel_size + 1)
        ].any()  # rows i-2 to i, of a 3x3 convolution
    assert kernel_size == 1 or (reads[5, 4, :5].any() if alone else reads[5, 4].all())


@pytest.mark.parametrize("causal", ["self", "cross"])
def test_a_sequence_shorter_than_the_kernel_reads_nothing_later(causal):
    module = evolution(causal, kernel_size=5)
    for N in (
        1,
        2,
    ):  # a sequence shorter than the kernel's reach: what lies before it enters as zeros
        logits = torch.randn(1, 2, N, N, dtype=D64)
        assert_close(module(logits), 0.4 * logits.tril() if causal == "self" else 0.4 * logits)


def test_a_decoder_entry_reads_six_eight_or_nine_entries():
    """Rows i-2..i, columns j-2..j, of these the columns up to the row: the paper's 6 on the diagonal."""
    module = evolution("self", beta=1.0)
    nn.init.constant_(module.convs[0].weight, 0.1)
    logits = torch.rand(1, 2, 8, 8, dtype=D64)
    for row, column, count in ((5, 5, 6), (5, 4, 8), (6, 3, 9), (0, 0, 0), (1, 1, 3)):
        jacobian = torch.autograd.functional.jacobian(module, logits)
        read = jacobian[0, 0, row, column, 0, 0] != 0
        assert read.sum() == count, (row, column)
        if count:
            rows, columns = read.nonzero().T
            assert row - 2 <= rows.min() and rows.max() <= row and column - 2 <= columns.min()
            assert columns.max() <= column
    assert (
        not module(logits)[..., 0, :].any() and not module(logits)[..., :, 0].any()
    )  # zeros enter


@pytest.mark.parametrize("causal", ["self", "cross"])
def test_step_by_step_equals_at_once(causal):
    """With the two rows of logits before it kept, a step is a map of three rows."""
    module, logits = evolution(causal), torch.randn(2, 2, 8, 8, dtype=D64)
    whole = attention_of(mask_logits(module(logits), causal))
    for i in range(8):
        keys = i + 1 if causal == "self" else 8
        step = logits[:, :, max(0, i - 2) : i + 1, :keys]
        row = attention_of(mask_logits(module(step), causal))[:, :, -1]
        assert_close(row, whole[:, :, i, :keys])
        prefix = attention_of(mask_logits(module(logits[:, :, : i + 1, :keys]), causal))
        assert_close(prefix, whole[:, :, : i + 1, :keys])


@pytest.mark.parametrize("kernel_size", [3, 5])
@pytest.mark.parametrize("kind", ["ea", "pa", "self", "cross"])
@pytest.mark.parametrize("left,right", [(1, 0), (0, 3), (2, 1), (5, 0)])
def test_a_padded_sequence_is_the_sequence_without_padding(kind, left, right, kernel_size):
    """What the convolution gives at the padding does not move into the sequence."""
    module = (
        PredictiveAttention(2, 0.4, num_layers=2, kernel_size=kernel_size).double()
        if kind == "pa"
        else evolution("none", kernel_size, alpha=0.4)
        if kind == "ea"
        else evolution(kind, kernel_size)
    )
    N, length = 6, left + 6 + right
    whole, inside = 5 * torch.randn(2, 1, 2, length, length, dtype=D64), slice(left, left + N)
    padding = torch.ones(1, length, dtype=torch.bool)
    padding[:, inside] = False

    def attention(maps, padding):
        evolved = module(*maps, padding, padding)
        return attention_of(mask_logits(evolved, module.causal, padding))

    attn = attention(whole, padding)[:, :, inside]
    assert not attn[..., :left].any() and not attn[..., left + N :].any()
    assert_close(attn[..., inside], attention(whole[..., inside, inside], None))


def test_bad_options_are_named():
    for options, message in (
        ({}, "prev_logits of the previous layer required, got None"),
        ({"causal": "future"}, "'none', 'self' or 'cross', got 'future'"),
        ({"alpha": 0.5, "causal": "self"}, "has no skip connection: alpha=0 required, got 0.5"),
    ):
        with pytest.raises(ValueError, match=message):
            EvolvingAttention(2, **options)(torch.randn(1, 2, 5, 5))
    module = EvolvingAttention(2, beta=0.0, causal="self", learnable=True)
    assert module.alpha == 0.0 and isinstance(module.beta, nn.Parameter)
    assert "no causal form" in module.operands(None)
    logits = torch.randn(1, 2, 5, 5)
    attn = attention_of(mask_logits(module(logits), "self"))  # an identity start, here too
    assert_close(attn, attention_of(mask_logits(logits, "self")), atol=0, rtol=0)
