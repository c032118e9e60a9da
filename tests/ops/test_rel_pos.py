"""Tables of relative positions fitted to maps of other sizes; their logits are compared in tests/layers."""

import torch
from torch.testing import assert_close

from ea_vision.layers import fit_rel_table


def test_a_smaller_map_uses_the_middle_of_the_table():
    table = torch.arange(13.0).unsqueeze(1)  # offsets -6..6
    assert_close(fit_rel_table(table, 4).squeeze(1), torch.arange(3.0, 10.0))  # offsets -3..3
    assert fit_rel_table(table, 7) is table


def test_a_larger_map_uses_a_linearly_resized_table():
    table = torch.randn(5, 2, dtype=torch.float64)
    fitted = fit_rel_table(table, 6)
    assert fitted.shape == (11, 2)
    for row in range(11):  # half-pixel centres, as in bilinear resizing without aligned corners
        at = min(max((row + 0.5) * 5 / 11 - 0.5, 0), 4)
        low = int(at)
        high = min(low + 1, 4)
        assert_close(fitted[row], table[low] * (1 - at + low) + table[high] * (at - low))
    assert_close(fitted[5], table[2])  # offset 0 stays offset 0
