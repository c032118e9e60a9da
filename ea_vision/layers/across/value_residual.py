"""The first layer's values mixed into those of later layers: ResFormer."""

import torch
from torch import Tensor, nn


class ValueResidual(nn.Module):
    """Mix a layer's values with the first layer's: V'_l = lambda_1 V_1 + lambda_2 V_l, with learned lambdas.

    Paper: `Value Residual Learning` - https://arxiv.org/abs/2410.17897

    Args:
        identity: whether the lambdas begin at (0, 1), so that the network begins unchanged; otherwise at the paper's
            (0.5, 0.5).
    """

    def __init__(self, identity: bool = True, device=None, dtype=None):
        super().__init__()
        start = (0.0, 1.0) if identity else (0.5, 0.5)
        self.lambdas = nn.Parameter(torch.tensor(start, device=device, dtype=dtype))

    def changes_nothing(self) -> bool:
        """Return whether the values stay unchanged."""
        return self.lambdas.tolist() == [0.0, 1.0]

    def forward(self, values: Tensor, first_values: Tensor) -> Tensor:
        """Return the mixture of values and first_values, (B, K, N, D) each."""
        return self.lambdas[0] * first_values + self.lambdas[1] * values
