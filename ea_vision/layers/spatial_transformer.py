"""Spatial transformer: a small network says where to look, and a sampler looks there.

Paper: `Spatial Transformer Networks` - https://arxiv.org/abs/1506.02025. This kind of attention transforms the image;
it has no attention weights.

Shape letters: B batch, C channels, H x W the input, h x w the output.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ea_vision.layers.tracing import keep_whole
from ea_vision.ops import Size

IDENTITY = (1.0, 0.0, 0.0, 0.0, 1.0, 0.0)


def sample_affine(x: Tensor, theta: Tensor, out_size: Size) -> Tensor:
    """Sample images bilinearly on an affine grid, the same for all channels, zeros outside (paper, equation 5).

    Args:
        x: (B, C, H, W).
        theta: (B, 2, 3), from the output's coordinates (x, y, 1) to the input's (x, y). Both run from -1 to 1 between
            the outer edges of the first and the last pixel.
        out_size: (h, w) in pixels.

    Returns:
        (B, C, h, w).
    """
    grid = F.affine_grid(theta.to(x.dtype), (*x.shape[:2], *out_size), align_corners=False)
    return F.grid_sample(x, grid, mode="bilinear", padding_mode="zeros", align_corners=False)


@keep_whole  # the grid needs sizes at run time, so FX keeps the layer whole
class SpatialTransformer(nn.Module):
    """Sample the input where a localisation network says. At the start the output is the input.

    The localisation network has two strided convolutions, a mean over a 4x4 grid, and two linear layers (the paper does
    not prescribe them). The last layer begins with zero weights and the identity as bias.

    Args:
        in_channels: C.
        hidden: channels of the second convolution and width of the hidden linear layer; the first convolution has half.
        out_size: (height, width) of the output in pixels, or None for the input's.

    Raises:
        ValueError: hidden below 2.
    """

    def __init__(
        self,
        in_channels: int,
        hidden: int = 32,
        out_size: Size | None = None,
        device=None,
        dtype=None,
    ):
        dd = {"device": device, "dtype": dtype}
        super().__init__()
        if hidden < 2:
            raise ValueError(f"hidden must be 2 or more, got {hidden}")
        self.out_size = out_size
        self.localise = nn.Sequential(
            nn.Conv2d(in_channels, hidden // 2, 5, stride=2, padding=2, **dd),
            nn.ReLU(),
            nn.Conv2d(hidden // 2, hidden, 5, stride=2, padding=2, **dd),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(4),
            nn.Flatten(),
            nn.Linear(16 * hidden, hidden, **dd),
            nn.ReLU(),
        )
        self.fc = nn.Linear(hidden, 6, **dd)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise the localisation network by He, and its output as the identity."""
        for module in self.localise:
            if isinstance(module, (nn.Conv2d, nn.Linear)):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
                nn.init.zeros_(module.bias)
        nn.init.zeros_(self.fc.weight)
        with torch.no_grad():
            self.fc.bias.copy_(torch.tensor(IDENTITY))

    def theta(self, x: Tensor) -> Tensor:
        """Return the affine transformation: (B, C, H, W) -> (B, 2, 3), see `sample_affine`."""
        return self.fc(self.localise(x)).view(-1, 2, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Return the sampled input: (B, C, H, W) -> (B, C, h, w)."""
        size = x.shape[2:] if self.out_size is None else self.out_size
        return sample_affine(x, self.theta(x), size)
