"""The layer against the EA authors' own TensorFlow layer, by every implementation.

tests/ops/test_triton.py runs this file again in Triton's interpreter.
"""

import ast
from pathlib import Path

import numpy as np
import pytest
import torch

from ea_vision.layers import AugmentedConv2d, EvolvingAttention
from ea_vision.ops import use_implementation
from ea_vision.ops.triton_attention import INTERPRETING

CASES = ["aa_norel", "aa_rect", "aa_square", "ea_chain2", "ea_chain_a50_b100", "ea_chain_a70_b30"]


def from_tensorflow(case, layer: int, meta: dict) -> dict[str, torch.Tensor]:
    """State dict of a layer from the variables of the authors', whose kernels are HWIO and whose projection is ordered
    k, q, v."""

    def var(name):
        value = torch.from_numpy(case[f"var.layer{layer}/{name}"])
        return value.permute(3, 2, 0, 1) if value.ndim == 4 else value

    names = {"conv": "conv2d", "qkv": "conv2d_1", "proj": "conv2d_3" if layer else "conv2d_2"}
    names |= {"evolution.convs.0": "conv2d_2"} if layer else {}
    state = {
        f"{ours}.{part}": var(f"{theirs}/{name}")
        for ours, theirs in names.items()
        for part, name in (("weight", "kernel"), ("bias", "bias"))
        if (ours, part) != ("conv", "bias")
    }
    dim_qk = int(meta["k"] * meta["filters"])
    for part in ("weight", "bias"):
        k, q, v = state[f"qkv.{part}"].tensor_split([dim_qk, 2 * dim_qk])
        state[f"qkv.{part}"] = torch.cat([q, k, v])
    if meta["relative"]:
        state |= {"height_rel": var("r_height"), "width_rel": var("r_width")}
    return state


def build_chain(case, meta: dict) -> list:
    """The layers of a case with its weights."""
    layers = []
    channels = case["input"].shape[-1]
    for i in range(meta["layers"]):
        K, width = meta["heads"], meta["filters"]
        layer = AugmentedConv2d(
            channels,
            width,
            3,
            meta["first_stride"] if i == 0 else 1,
            dim_qk=int(meta["k"] * width),
            dim_v=int(meta["v"] * width),
            num_heads=K,
            feat_size=case["input"].shape[1:3],
            position="relative" if meta["relative"] else "none",
            evolution=EvolvingAttention(K, meta["paper_alpha"], meta["paper_beta"]) if i else None,
        )
        layer.load_state_dict(from_tensorflow(case, i, meta))
        layers.append(layer)
        channels = width
    return layers


WAYS = ["triton"] if INTERPRETING else ["reference", "cpu"]


@pytest.mark.parametrize(
    "name,implementation",
    [
        *((name, way) for name in CASES[:-2] for way in WAYS),
        *((name, "sdpa") for name in CASES[:3]),
        *(
            pytest.param(
                name, way, marks=pytest.mark.slow if INTERPRETING else ()
            )  # ea_chain2 is a chain, of beta 0.5
            for name in CASES[-2:]
            for way in WAYS
        ),
    ],
)
def test_matches_the_authors_layer(shared: Path, name: str, implementation: str):
    case = np.load(shared / "reference" / f"{name}.npz")
    layers = build_chain(case, ast.literal_eval(str(case["meta"])))
    x, logits = torch.from_numpy(case["input"]).permute(0, 3, 1, 2), None
    for i, layer in enumerate(layers):
        with torch.no_grad(), use_implementation(implementation):
            x, logits = layer(x, logits, implementation != "sdpa")
        torch.testing.assert_close(
            x.permute(0, 2, 3, 1), torch.from_numpy(case[f"output.{i}"]), atol=1e-5, rtol=0
        )
        if implementation != "sdpa":
            torch.testing.assert_close(
                logits, torch.from_numpy(case[f"logits.{i}"]), atol=1e-5, rtol=0
            )
