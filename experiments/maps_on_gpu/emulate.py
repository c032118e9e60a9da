"""Run the fused kernels of this folder on a CPU, in an emulator of a GPU's 32 lanes, and compare with float64.

    python -m experiments.maps_on_gpu.emulate              # about 10 seconds, needs g++

The same source is a GPU's kernel and, with `warp.h`'s other half, C++ for a CPU. All memory that a kernel should write
is filled with NaN before, and so is its shared memory.
"""

import ctypes
import math
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from ea_vision.ops import evolving_attention

FOLDER = Path(__file__).parent
KERNELS = {"forward.cu": "ea_forward", "backward_core.cu": "core"}
K, D, E, H, W = 8, 20, 3, 14, 14  # heads, widths of queries and values, the map
N = H * W
ALPHA = 0.5
BFLOAT16 = torch.bfloat16
# tap (x, y) of the adjoint that each half of the backward core's five products sums; the tenth half is not used
TAPS = ((0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1), (0, 2), (1, 2), (2, 2))


class ForwardArguments(ctypes.Structure):
    """The struct `Args` of forward.cu."""

    _fields_ = [
        *[(name, ctypes.c_void_p) for name in "q k v prev height width hot weight".split()],
        *[(name, ctypes.c_void_p) for name in "bias logits out lse".split()],
        ("alpha", ctypes.c_float),
        ("scale", ctypes.c_float),
    ]


class BackwardArguments(ctypes.Structure):
    """The struct `Args` of backward_core.cu."""

    _fields_ = [
        *[(name, ctypes.c_void_p) for name in "dz m adjoint d_prev d_weight".split()],
        ("alpha", ctypes.c_float),
    ]


Run = Callable[[ctypes.Structure, int], int]  # runs a kernel with its arguments for so many images


def build(source: str, folder: Path) -> Run:
    """Compile a kernel for the emulator and load it; it returns the bytes of shared memory that it has."""
    library = folder / f"{source}.so"
    command = ["g++", "-O2", "-shared", "-fPIC", "-x", "c++", FOLDER / source, "-o", library]
    subprocess.run(command, check=True)
    function = getattr(ctypes.CDLL(str(library)), KERNELS[source])
    return lambda arguments, images: function(ctypes.byref(arguments), images)


def _unwritten(*shape: int, dtype: torch.dtype = BFLOAT16) -> Tensor:
    return torch.full(shape, float("nan"), dtype=dtype)


def _taps_first(weight: Tensor) -> Tensor:
    """Return a weight (made, taken, 3, 3) as (9, made, taken)."""
    return weight.permute(2, 3, 0, 1).reshape(9, K, K).contiguous()


def _one_hot_positions() -> Tensor:
    """Return rows of 48 numbers: one at D + the pixel's row and one at D + H + its column, for whole tiles of 16."""
    pixel = torch.arange(N)
    hot = torch.zeros(math.ceil(N / 16) * 16, 48)
    hot[pixel, D + pixel // W] = 1
    hot[pixel, D + H + pixel % W] = 1
    return hot.to(BFLOAT16)


class Forward:
    """The fused forward pass of a layer on random bfloat16 inputs.

    Attributes:
        inputs: arguments of `evolving_attention`, heads before pixels, for `images` images.
        logits, out, lse: what the kernel writes; NaN before.
    """

    def __init__(self, run: Run, images: int = 1, device: str = "cpu"):
        torch.manual_seed(0)
        self.run, self.images = run, images
        B = images
        q, k = torch.randn(2, B, N, K, D, device=device).to(BFLOAT16)
        v = torch.randn(B, N, K, E, device=device).to(BFLOAT16)
        prev = torch.randn(B, N, N, K, device=device).to(BFLOAT16)
        height_rel = (torch.randn(2 * H - 1, D, device=device) * 0.3).to(BFLOAT16)
        width_rel = (torch.randn(2 * W - 1, D, device=device) * 0.3).to(BFLOAT16)
        weight = (torch.randn(K, K, 3, 3, device=device) * 0.15).to(BFLOAT16)
        bias = torch.randn(K, device=device).to(BFLOAT16).float()
        self.inputs = [x.transpose(1, 2) for x in (q, k, v)]
        self.inputs += [height_rel, width_rel, prev.permute(0, 3, 1, 2), weight, bias]
        self.logits = _unwritten(B, N, N, K).to(device)
        self.out = _unwritten(B, N, K, E).to(device)
        self.lse = _unwritten(B, K, N, dtype=torch.float32).to(device)
        hot = _one_hot_positions().to(device)
        tensors = [q, k, v, prev, height_rel, width_rel, hot, _taps_first(weight), bias]
        self.tensors = [*tensors, self.logits, self.out, self.lse]

    def __call__(self) -> None:
        pointers = [x.data_ptr() for x in self.tensors]
        self.run(ForwardArguments(*pointers, ALPHA, D**-0.5), self.images)

    def reference(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return output and logits of the reference."""
        inputs = [x.to(dtype) for x in self.inputs]
        options = {"alpha": ALPHA, "feat_size": (H, W), "implementation": "reference"}
        return evolving_attention(*inputs, **options)


def forward_errors(forward: Forward) -> dict[str, tuple[float, float]]:
    """Return largest differences from float64 of the fused forward and of the reference in bfloat16, by output."""
    forward()
    exact_out, exact_logits = forward.reference(torch.float64)
    rounded_out, rounded_logits = forward.reference(BFLOAT16)
    logits = forward.logits.permute(0, 3, 1, 2)
    exact_lse = torch.logsumexp(logits.double(), -1) / math.log(2)  # of the logits that it stored
    out = forward.out.transpose(1, 2)

    def largest(x: Tensor, exact: Tensor) -> float:
        return float((x.double() - exact).abs().max())

    return {
        "logits": (largest(logits, exact_logits), largest(rounded_logits, exact_logits)),
        "out": (largest(out, exact_out), largest(rounded_out, exact_out)),
        "lse": (largest(forward.lse, exact_lse), 1e-3),
    }


def backward_errors(run: Run, device: str = "cpu") -> dict[str, tuple[float, float]]:
    """Return relative differences of the backward core's gradients from float64, and those of rounding alone."""
    torch.manual_seed(0)
    dz, m = torch.randn(2, 1, N, N, K, device=device).to(BFLOAT16)
    weight = (torch.randn(K, K, 3, 3, device=device) * 0.2).to(BFLOAT16)
    adjoint = _taps_first(weight.flip(2, 3).transpose(0, 1))
    d_prev = _unwritten(1, N, N, K).to(device)
    sums = _unwritten(1, 14, 7, 5, 2, K, K, dtype=torch.float32).to(device)
    pointers = [x.data_ptr() for x in (dz, m, adjoint, d_prev, sums)]
    run(BackwardArguments(*pointers, ALPHA), 1)
    maps = m.permute(0, 3, 1, 2).double().requires_grad_()
    exact_weight = weight.double().requires_grad_()
    convolved = F.conv2d(maps, exact_weight, padding=1)
    d_maps, d_weight = torch.autograd.grad(
        convolved, (maps, exact_weight), dz.permute(0, 3, 1, 2).double()
    )
    products = sums.double().sum((0, 1, 2))
    sums_by_tap = torch.zeros_like(d_weight)
    for number, (x, y) in enumerate(TAPS):
        sums_by_tap[:, :, 2 - x, 2 - y] = products[number // 2, number % 2]

    def relative(x: Tensor, exact: Tensor) -> float:
        return float((x.double() - exact).norm() / exact.norm())

    expected = ALPHA * d_maps
    rounding = relative(expected.to(BFLOAT16), expected)
    return {
        "d_prev": (relative(d_prev.permute(0, 3, 1, 2), expected), rounding),
        "d_weight": (relative(sums_by_tap, d_weight), 1e-6),
    }


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        errors = forward_errors(Forward(build("forward.cu", Path(folder))))
        errors |= backward_errors(build("backward_core.cu", Path(folder)))
    for name, (kernel, bound) in errors.items():
        print(f"{name}: {kernel:.2g}, beside {bound:.2g}")


if __name__ == "__main__":
    sys.exit(main())
