"""Run the fused kernels of this folder on a CPU, in an emulator of a GPU's 32 lanes, and compare with float64.

    python -m experiments.maps_on_gpu.emulate              # about a minute, needs g++

The same source is a GPU's kernel and, with `warp.h`'s other half, C++ for a CPU. All memory that a kernel should write
is filled with NaN before, and so is its shared memory.
"""

import ctypes
import math
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from ea_vision.ops import evolving_attention

FOLDER = Path(__file__).parent
KERNELS = ("forward", "backward")
K, D, E = 8, 20, 3  # heads, widths of queries and values
QUERIES = 14  # of a block
CONVOLVING = 7  # warps of a block
BFLOAT16 = torch.bfloat16
# tap (x, y) of the adjoint that each half of the backward's five products sums; the tenth half is not used
TAPS = ((0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1), (0, 2), (1, 2), (2, 2))
ARGUMENTS = """q k v height width prev weight adjoint hot pixels bias gates logits out signs lse
    d_out d_logits d_maps d_q d_k d_v d_weight d_tables d_alpha done""".split()


class Arguments(ctypes.Structure):
    """The struct `Args` of layer.h."""

    _fields_ = [*((name, ctypes.c_void_p) for name in ARGUMENTS), ("scale", ctypes.c_float)]


@dataclass(frozen=True)
class Variant:
    """What the kernels are compiled for.

    Attributes:
        side: of the square map.
        prev: whether there are previous logits and a convolution; without them it is AA, or a chain's first layer.
        gated: whether beta may be below 1, alpha 0, and gates have gradients.
    """

    side: int = 14
    prev: bool = True
    gated: bool = False

    def options(self) -> list[str]:
        """Return the compiler's options."""
        sizes = [f"-DH={self.side}", f"-DW={self.side}"]
        return [*sizes, f"-DPREV={int(self.prev)}", f"-DGATED={int(self.gated)}"]

    def __str__(self) -> str:
        kind = "AA" if not self.prev else "EA, gated" if self.gated else "EA"
        return f"{kind}, {self.side}x{self.side}"


VARIANTS = tuple(
    Variant(side, **kind) for side in (14, 7) for kind in ({}, {"gated": True}, {"prev": False})
)
Run = Callable[[Arguments, int], Any]  # runs a kernel with its arguments for so many images


@dataclass(frozen=True)
class Emulated:
    """A kernel in the emulator, called with its arguments and the number of images; the bytes of its shared memory."""

    function: Callable[..., None]
    shared_bytes: int

    def __call__(self, arguments: Arguments, images: int) -> None:
        self.function(ctypes.byref(arguments), images)


def build(kernel: str, variant: Variant, folder: Path) -> Emulated:
    """Compile a kernel for the emulator and load it."""
    library = folder / f"{kernel} {variant}.so"
    command = ["g++", "-O1", "-fno-inline", "-shared", "-fPIC", *variant.options(), "-x", "c++"]
    subprocess.run([*command, FOLDER / f"{kernel}.cu", "-o", library], check=True)
    loaded = ctypes.CDLL(str(library))
    shared_bytes, _, _ = (ctypes.c_int * 3).in_dll(loaded, "layout")
    return Emulated(getattr(loaded, kernel), shared_bytes)


def load_all(load: Callable[[str, Variant], Run], variant: Variant) -> dict[str, Run]:
    """Compile all kernels of a layer by `build` or by `launch.load`."""
    return {kernel: load(kernel, variant) for kernel in KERNELS}


def _taps_first(weight: Tensor) -> Tensor:
    """Return a weight (made, taken, 3, 3) as (9, made, taken)."""
    return weight.permute(2, 3, 0, 1).reshape(9, K, K).to(BFLOAT16).contiguous()


def _positions(side: int) -> Tensor:
    """Return one-hot rows and columns of the pixels, whole tiles of 16: (pixels, 32)."""
    pixel = torch.arange(side * side)
    hot = torch.zeros(math.ceil(len(pixel) / 16) * 16, 32)
    hot[pixel, pixel // side] = 1
    hot[pixel, side + pixel % side] = 1
    return hot.to(BFLOAT16)


class Layer:
    """A layer on random bfloat16 inputs, forward and backward by the fused kernels, and by the reference.

    Attributes:
        inputs: tensors of `evolving_attention` by name, heads before pixels.
        outputs: the gradients of out and logits, likewise.
        tensors: what the kernels read and write, by its name in `Args`; unwritten memory is NaN.
    """

    def __init__(
        self, kernels: dict[str, Run], variant: Variant, images: int = 1, device: str = "cpu"
    ):
        torch.manual_seed(0)
        self.kernels = kernels
        self.variant = variant
        self.images = images
        B, side = images, variant.side
        N = side * side
        tiles = math.ceil(N / 16)
        parts = math.ceil(N / QUERIES)

        def normal(*shape: int, factor: float = 1.0) -> Tensor:
            return (torch.randn(shape, device=device) * factor).to(BFLOAT16)

        def unwritten(*shape: int, dtype: torch.dtype = BFLOAT16) -> Tensor:
            return torch.full(shape, float("nan"), dtype=dtype, device=device)

        sums = partial(unwritten, dtype=torch.float32)
        rows = {"q": normal(B, N, K, D), "k": normal(B, N, K, D), "v": normal(B, N, K, E)}
        tables = {name: normal(2 * side - 1, D, factor=0.3) for name in ("height", "width")}
        maps = {"prev": normal(B, N, N, K)} if variant.prev else {}
        weight = normal(K, K, 3, 3, factor=0.15)
        bias = normal(K).float()
        gates = torch.tensor([[0.5], [1.0]], device=device).repeat(1, K)
        if variant.gated:  # with values at which a gate is closed
            gates = torch.rand(2, K, device=device)
            gates[:, 0], gates[:, 1] = 0.0, 1.0
        d_outputs = {"d_out": normal(B, N, K, E), "d_logits": normal(B, N, N, K, factor=0.1)}
        by_gate = gates[1].view(K, 1, 1, 1)
        adjoint = (by_gate * weight.float()).flip(2, 3).transpose(0, 1)
        hot = _positions(side).to(device)
        constants = {
            "weight": _taps_first(weight),
            "adjoint": _taps_first(adjoint),
            "hot": torch.nn.functional.pad(hot, (D, 48 - D - 32 + 4))[:, :48].contiguous(),
            "pixels": hot.T.contiguous(),
            "bias": bias,
            "gates": gates,
        }
        self.tensors = {
            **(rows | tables | maps | d_outputs | constants),
            "logits": unwritten(B, N, N, K),
            "out": unwritten(B, N, K, E),
            "signs": torch.full((B, N, 2 * tiles, 2), -1, dtype=torch.int32, device=device),
            "lse": sums(B, K, N),
            "d_maps": unwritten(B, N, N, K),
            **{f"d_{name}": torch.full_like(x, float("nan")) for name, x in rows.items()},
            "d_weight": sums(B * parts * CONVOLVING, 5 * 2 * K * K + 2 * K),
            "d_tables": sums(B * parts * 2, 2, 32, D),
            "d_alpha": sums(B * parts, K),
            "done": torch.zeros(B, dtype=torch.int32, device=device),
        }
        self.inputs = {name: x.transpose(1, 2) for name, x in rows.items()}
        self.inputs |= {"height_rel": tables["height"], "width_rel": tables["width"]}
        if variant.prev:
            maps = maps["prev"].permute(0, 3, 1, 2)
            self.inputs |= {"prev_logits": maps, "weight": weight, "bias": bias}
            self.inputs |= {"alpha": gates[0], "beta": gates[1]}
        self.d_outputs = [
            d_outputs["d_out"].transpose(1, 2),
            d_outputs["d_logits"].permute(0, 3, 1, 2),
        ]

    def run(self, *kernels: str) -> None:
        pointers = [
            self.tensors[name].data_ptr() if name in self.tensors else None for name in ARGUMENTS
        ]
        arguments = Arguments(*pointers, D**-0.5)
        for kernel in kernels:
            self.kernels[kernel](arguments, self.images)

    def forward(self) -> None:
        self.run("forward")

    def step(self) -> None:
        self.run(*KERNELS)

    def results(self) -> dict[str, Tensor]:
        """Return what the kernels stored, by the names of `reference`."""
        x = self.tensors
        side, n_taps = self.variant.side, 5 * 2 * K * K
        results = {"out": x["out"].transpose(1, 2), "logits": x["logits"].permute(0, 3, 1, 2)}
        results |= {f"d_{name}": x[f"d_{name}"].transpose(1, 2) for name in "qkv"}
        tables = x["d_tables"].sum(0)[:, : 2 * side - 1]
        results |= {"d_height_rel": tables[0], "d_width_rel": tables[1]}
        if not self.variant.prev:
            return results
        sums = x["d_weight"].sum(0)
        products = sums[:n_taps].view(5, 2, K, K)
        d_weight = torch.zeros(K, K, 3, 3, device=sums.device)
        for number, (column, row) in enumerate(TAPS):
            d_weight[:, :, 2 - column, 2 - row] = products[number // 2, number % 2]
        d_bias, d_beta = sums[n_taps:].view(2, K)
        beta = x["gates"][1]
        results["d_prev_logits"] = x["d_maps"].permute(0, 3, 1, 2)
        results["d_weight"] = beta.view(K, 1, 1, 1) * d_weight
        results["d_bias"] = beta * d_bias
        if self.variant.gated:
            weight, bias = self.inputs["weight"].float(), self.inputs["bias"]
            convolved = (weight * d_weight).sum((1, 2, 3)) + bias * d_bias
            results |= {"d_alpha": x["d_alpha"].sum(0), "d_beta": convolved + d_beta}
        return results

    def passes(self) -> Tensor:
        """Return where the ReLU passed in the kernels, (B, K, N, N)."""
        if not self.variant.gated:
            return self.tensors["logits"].permute(0, 3, 1, 2) > 0
        signs = self.tensors["signs"]  # (B, N, groups, even and odd heads)
        bit = torch.arange(32, device=signs.device)
        bits = (signs.unsqueeze(-1) >> bit & 1).bool()  # the last axis: 8 keys, 4 heads
        bits = bits.unflatten(-1, (8, 4)).permute(0, 5, 3, 1, 2, 4)  # (B, 4, 2, N, groups, 8)
        return bits.flatten(4)[..., : self.variant.side**2].flatten(1, 2)

    def operator(
        self, dtype: torch.dtype = BFLOAT16, implementation: str | None = None
    ) -> Callable[[], dict[str, Tensor]]:
        """Return a call of `evolving_attention`, which returns its outputs and gradients by name."""
        fixed = () if self.variant.gated else ("alpha", "beta")
        inputs = {name: x.detach().to(dtype) for name, x in self.inputs.items()}
        learned = {name: x.requires_grad_() for name, x in inputs.items() if name not in fixed}
        names = [f"d_{name}" for name in learned]
        d_outputs = [x.to(dtype) for x in self.d_outputs]
        options = {"feat_size": (self.variant.side,) * 2, "implementation": implementation}

        def call() -> dict[str, Tensor]:
            out, logits = evolving_attention(**inputs, **options)
            gradients = torch.autograd.grad([out, logits], list(learned.values()), d_outputs)
            by_name = dict(zip(names, gradients, strict=True))
            return {"out": out.detach(), "logits": logits.detach(), **by_name}

        return call

    def reference(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return outputs and gradients of the reference, with a ReLU that passes where the kernels' did: near zero
        rounding decides."""
        passes = self.passes()
        with mock.patch("torch.nn.functional.relu", lambda x: x * passes):
            return self.operator(dtype, "reference")()


def errors(layer: Layer) -> dict[str, tuple[float, float]]:
    """Return relative differences from float64 of the kernels' outputs and gradients, and of the reference's in
    bfloat16."""
    layer.step()
    exact = layer.reference(torch.float64)
    rounded = layer.reference(BFLOAT16)

    def relative(x: Tensor, name: str) -> float:
        return float((x.double() - exact[name]).norm() / exact[name].norm())

    return {
        name: (relative(x, name), relative(rounded[name], name))
        for name, x in layer.results().items()
    }


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for variant in VARIANTS:
            layer = Layer(load_all(partial(build, folder=Path(folder)), variant), variant)
            for name, (kernel, bound) in errors(layer).items():
                print(f"{variant}: {name} {kernel:.2g}, beside {bound:.2g}")


if __name__ == "__main__":
    sys.exit(main())
