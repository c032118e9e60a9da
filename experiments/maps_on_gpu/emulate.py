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
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from ea_vision.ops import evolving_attention

FOLDER = Path(__file__).parent
B, K, D, E, H, W = 1, 8, 20, 3, 14, 14  # images, heads, widths of queries and values, the map
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


def build(source: str, folder: Path) -> ctypes.CDLL:
    """Compile a kernel for the emulator and load it."""
    library = folder / f"{source}.so"
    command = ["g++", "-O2", "-shared", "-fPIC", "-x", "c++", FOLDER / source, "-o", library]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(library))


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


def forward_errors(library: ctypes.CDLL) -> dict[str, tuple[float, float]]:
    """Return largest differences from float64 of the fused forward and of the reference in bfloat16, by output."""
    torch.manual_seed(0)
    q, k = torch.randn(2, B, N, K, D).to(BFLOAT16)
    v = torch.randn(B, N, K, E).to(BFLOAT16)
    prev = torch.randn(B, N, N, K).to(BFLOAT16)
    height_rel = (torch.randn(2 * H - 1, D) * 0.3).to(BFLOAT16)
    width_rel = (torch.randn(2 * W - 1, D) * 0.3).to(BFLOAT16)
    weight = (torch.randn(K, K, 3, 3) * 0.15).to(BFLOAT16)
    bias = torch.randn(K).to(BFLOAT16).float()
    logits = _unwritten(B, N, N, K)
    out = _unwritten(B, N, K, E)
    lse = _unwritten(B, K, N, dtype=torch.float32)
    inputs = [q, k, v, prev, height_rel, width_rel, _one_hot_positions(), _taps_first(weight)]
    pointers = [x.data_ptr() for x in (*inputs, bias, logits, out, lse)]
    library.ea_forward(ctypes.byref(ForwardArguments(*pointers, ALPHA, D**-0.5)), B)

    def reference(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        rows = [x.transpose(1, 2) for x in (q, k, v)]
        maps = prev.permute(0, 3, 1, 2)
        arguments = [x.to(dtype) for x in (*rows, height_rel, width_rel, maps, weight, bias)]
        return evolving_attention(
            *arguments, alpha=ALPHA, feat_size=(H, W), implementation="reference"
        )

    exact_out, exact_logits = reference(torch.float64)
    rounded_out, rounded_logits = reference(BFLOAT16)
    logits = logits.permute(0, 3, 1, 2)
    exact_lse = torch.logsumexp(logits.double(), -1) / math.log(2)  # of the logits that it stored

    def largest(x: Tensor, exact: Tensor) -> float:
        return float((x.double() - exact).abs().max())

    return {
        "logits": (largest(logits, exact_logits), largest(rounded_logits, exact_logits)),
        "out": (largest(out.transpose(1, 2), exact_out), largest(rounded_out, exact_out)),
        "lse": (largest(lse, exact_lse), 1e-3),
    }


def backward_errors(library: ctypes.CDLL) -> dict[str, tuple[float, float]]:
    """Return relative differences of the backward core's gradients from float64, and those of rounding alone."""
    torch.manual_seed(0)
    dz, m = torch.randn(2, B, N, N, K).to(BFLOAT16)
    weight = (torch.randn(K, K, 3, 3) * 0.2).to(BFLOAT16)
    adjoint = _taps_first(weight.flip(2, 3).transpose(0, 1))
    d_prev = _unwritten(B, N, N, K)
    sums = _unwritten(B, 14, 7, 5, 2, K, K, dtype=torch.float32)
    pointers = [x.data_ptr() for x in (dz, m, adjoint, d_prev, sums)]
    library.core(ctypes.byref(BackwardArguments(*pointers, ALPHA)), B)
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
        errors = forward_errors(build("forward.cu", Path(folder)))
        errors |= backward_errors(build("backward_core.cu", Path(folder)))
    for name, (kernel, bound) in errors.items():
        print(f"{name}: {kernel:.2g}, beside {bound:.2g}")


if __name__ == "__main__":
    sys.exit(main())
