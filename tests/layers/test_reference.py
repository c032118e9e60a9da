"""The layer against the EA authors' own TensorFlow layer, by every implementation.

tests/ops/test_triton.py runs this file again in Triton's interpreter.
"""

import ast
from itertools import product

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from ea_vision.layers import AugmentedConv2d, EvolvingAttention
from ea_vision.ops import use_implementation
from ea_vision.ops.triton_attention import INTERPRETING
from tests.slow import slow_but

CASES = ["aa_norel", "aa_rect", "aa_square", "ea_chain2", "ea_chain_a50_b100", "ea_chain_a70_b30"]


def from_tensorflow(case, layer, meta):
    """Return the state dict of a layer from the authors' variables.

    The authors' kernels are HWIO, and their projection has the order k, q, v.
    """

    def variable(name):
        return torch.from_numpy(case[f"var.layer{layer}/{name}"])

    def kernel(name):
        return variable(f"{name}/kernel").permute(3, 2, 0, 1)

    names = {"qkv": "conv2d_1", "proj": "conv2d_2"}
    if layer > 0:
        names = {"qkv": "conv2d_1", "evolution.convs.0": "conv2d_2", "proj": "conv2d_3"}
    state = {"conv.weight": kernel("conv2d")}
    for ours, theirs in names.items():
        state[f"{ours}.weight"] = kernel(theirs)
        state[f"{ours}.bias"] = variable(f"{theirs}/bias")
    dim_qk = int(meta["k"] * meta["filters"])
    for part in ("qkv.weight", "qkv.bias"):
        k, q, v = state[part].tensor_split([dim_qk, 2 * dim_qk])
        state[part] = torch.cat([q, k, v])
    if meta["relative"]:
        state["height_rel"] = variable("r_height")
        state["width_rel"] = variable("r_width")
    return state


def build_chain(case, meta):
    """Return the layers of a case with its weights."""
    layers = []
    channels = case["input"].shape[-1]
    width = meta["filters"]
    options = dict(
        dim_qk=int(meta["k"] * width),
        dim_v=int(meta["v"] * width),
        num_heads=meta["heads"],
        feat_size=case["input"].shape[1:3],
        position="relative" if meta["relative"] else "none",
    )
    for i in range(meta["layers"]):
        stride = 1
        evolution = None
        if i == 0:
            stride = meta["first_stride"]
        else:
            gates = (meta["paper_alpha"], meta["paper_beta"])
            evolution = EvolvingAttention(meta["heads"], *gates)
        layer = AugmentedConv2d(channels, width, 3, stride, evolution=evolution, **options)
        layer.load_state_dict(from_tensorflow(case, i, meta))
        layers.append(layer)
        channels = width
    return layers


WAYS = ["triton"] if INTERPRETING else ["reference", "cpu"]
# torch's fused attention for the cases without evolution
PAIRS = [*product(["sdpa"], CASES[:3]), *product(WAYS, CASES)]
# in the interpreter one chain, ea_chain2 with beta 0.5, is enough for every day
DAILY = PAIRS[:-2] if INTERPRETING else PAIRS


@pytest.mark.parametrize("pair", slow_but(DAILY, PAIRS), ids=str)
@torch.no_grad()
def test_matches_the_authors_layer(shared, pair):
    implementation, name = pair
    case = np.load(shared / "reference" / f"{name}.npz")
    layers = build_chain(case, ast.literal_eval(str(case["meta"])))
    need_logits = implementation != "sdpa"
    x = torch.from_numpy(case["input"]).permute(0, 3, 1, 2)
    logits = None
    for i, layer in enumerate(layers):
        with use_implementation(implementation):
            x, logits = layer(x, logits, need_logits)
        output = torch.from_numpy(case[f"output.{i}"]).permute(0, 3, 1, 2)
        assert_close(x, output, atol=1e-5, rtol=0)
        if need_logits:
            assert_close(logits, torch.from_numpy(case[f"logits.{i}"]), atol=1e-5, rtol=0)
