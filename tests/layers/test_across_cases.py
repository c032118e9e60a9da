"""The mechanisms against numbers from their authors' code: ../shared/across/cases, described in SPEC.md beside it."""

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from ea_vision.layers import ValueResidual, create_evolution
from tests.conftest import SHARED

CASES = SHARED / "across" / "cases"
pytestmark = pytest.mark.skipif(not CASES.is_dir(), reason="../shared/across/cases is not there")


@pytest.fixture(autouse=True, params=[torch.float32, torch.float64], ids=["float32", "float64"])
def dtype(request):
    """Make it the dtype of every tensor and module of a test."""
    torch.set_default_dtype(request.param)
    yield request.param
    torch.set_default_dtype(torch.float32)


class Case:
    """The tensors of a case in the default dtype, by their names in its file."""

    def __init__(self, name):
        self.tensors = {}
        with np.load(CASES / f"{name}.npz") as arrays:
            self.meta = json.loads(str(arrays["meta"]))
            for key in arrays.files:
                if key != "meta":
                    tensor = torch.from_numpy(arrays[key])
                    self.tensors[key] = tensor.to(torch.get_default_dtype())

    def __getitem__(self, name):
        return self.tensors[name]

    def under(self, prefix):
        """Return the tensors whose names begin with the prefix, by their names without it."""
        prefixed = beginning(self.tensors, prefix)
        return {key.removeprefix(prefix): value for key, value in prefixed.items()}

    def heads(self, x, *weights, heads=None):
        """Return the parts of one projection, (parts, B, K, N, D)."""
        K = heads or self.meta["heads"]
        projected = F.linear(x, *weights)
        return projected.unflatten(2, (-1, K, x.shape[2] // K)).permute(2, 0, 3, 1, 4)


def beginning(tensors, *prefixes):
    """Return the tensors whose names begin with one of the prefixes."""
    return {key: value for key, value in tensors.items() if key.startswith(prefixes)}


def assert_close(actual, expected, rounding=1.0):
    """Compare to 1e-5 of the largest entry; in float64 to 1e-5."""
    scale = 1.0
    if actual.dtype != torch.float64:
        largest = expected.abs().max().item()
        scale = rounding * max(1.0, largest)
    torch.testing.assert_close(actual, expected, atol=1e-5 * scale, rtol=1e-5)


def assert_statistics(case, module, name, rounding=1.0):
    """Compare a batch norm's running statistics after one forward, if the case is in training mode."""
    if not case.meta["train"]:
        return
    for statistic in ("running_mean", "running_var"):
        assert_close(module.get_buffer(statistic), case[f"after.{name}.{statistic}"], rounding)


def scores(q, k):
    return q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5


def joined(heads):
    """(B, K, N, D) -> (B, N, K*D)"""
    return heads.transpose(1, 2).flatten(2)


@pytest.mark.parametrize("name", ["realformer_a", "realformer_b"])
def test_realformer(name):
    case = Case(name)
    for number in range(1, case.meta["layers"]):
        options = {}
        if case.meta["mode"] == "mean":
            options = {"mixture": True, "alpha": number / (number + 1)}
        mechanism = create_evolution("residual", case.meta["heads"], **options)
        assert_close(mechanism(case[f"S{number}"], case[f"L{number - 1}"]), case[f"L{number}"])


def test_revit():
    case = Case("revit_a")
    for number in (1, 2):
        K = case.meta["layers"][number]["num_heads"]
        weights = case.under(f"layer{number}.qkv.")
        q, k, _ = case.heads(case[f"x{number}"], weights["weight"], weights["bias"], heads=K)
        alpha = 1 - case["alpha"].item()
        mechanism = create_evolution("residual", K, mixture=True, learnable=True, alpha=alpha)
        assert_close(mechanism(scores(q, k), case[f"L{number - 1}"]), case[f"L{number}"])


def test_talking_heads_of_cait():
    case = Case("talking_a")
    w = case.under("layer0.")
    q, k, v = case.heads(case["x"], w["qkv.weight"], w["qkv.bias"])
    mechanism = create_evolution("talking_heads", case.meta["heads"])
    mechanism.load_state_dict(beginning(w, "proj_l", "proj_w"))
    assert_close(mechanism(scores(q, k), scores(q, k)), case["L0"])
    out = joined(mechanism.mix_attn(case["A0"]) @ v)
    assert_close(F.linear(out, w["proj.weight"], w["proj.bias"]), case["out0"])


@pytest.mark.parametrize("name", ["deepvit_a", "deepvit_b"])
def test_deepvit(name):
    case = Case(name)
    for number in range(case.meta["layers"]):
        mechanism = create_evolution("reattention", case.meta["heads"]).train(case.meta["train"])
        weights = case.under(f"layer{number}.")
        mechanism.load_state_dict(beginning(weights, "reatten", "var_norm"), strict=False)
        assert_close(mechanism.mix_attn(case[f"A{number}"]), case[f"A_mixed{number}"])
        assert_statistics(case, mechanism.var_norm, f"layer{number}.var_norm")


@pytest.mark.parametrize("name", ["refiner_a", "refiner_b"])
def test_refiner(name):
    """The released form: the second layer refines the first one's maps."""
    case = Case(name)
    # three norms over a batch's probabilities, whose deviations are small, make float32's rounding larger
    rounding = 3.0 if case.meta["train"] else 1.0
    mechanism = create_evolution("refiner", case.meta["heads"]).train(case.meta["train"])
    norm = beginning(case.under("layer1."), "adapt_bn.")
    mechanism.load_state_dict({**case.under("layer1.DLA."), **norm}, strict=False)
    assert_close(mechanism.mix_attn(case["carried0"]), case["adapt_bn_out1"], rounding)
    for name_there in ("DLA.bn1", "DLA.bn2", "DLA.bn3", "adapt_bn"):
        norm = mechanism.get_submodule(name_there.removeprefix("DLA."))
        assert_statistics(case, norm, f"layer1.{name_there}", rounding)


def _centred(weight):
    """Return the kernel with zeros appended, so that the authors' last row, the current query, is in the middle."""
    return F.pad(weight, (0, 0, 0, weight.shape[2] - 1))


@pytest.mark.parametrize("name", ["mta_a", "mta_b"])
def test_multi_token_attention(name):
    """The authors pad queries causally, as our centred kernel does with zeros below its middle. The test itself applies
    the authors' mask, norm and gate."""
    case = Case(name)
    w = case.under("layer0.")
    args = case.meta["args"]
    x = case["x"]
    q, k, v = (case.heads(x, w[f"w{n}.weight"])[0] for n in "qkv")
    kernel = _centred(w["mta_kernel"])
    sizes = {"map_kernel": tuple(kernel.shape[2:]), "head_kernel": args["head_kernel_size"]}
    mechanism = create_evolution("mta", case.meta["heads"], **sizes)
    with torch.no_grad():
        mechanism.conv_before.copy_(kernel)
        mechanism.heads_after.copy_(w["head_kernel"])
        if "mta_kernel_after_sm" in w:
            mechanism.conv_after.copy_(_centred(w["mta_kernel_after_sm"]))
        if "wpsm.weight" in w:
            mechanism.heads_before.copy_(w["wpsm.weight"])
    hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1) & case.meta["causal"]
    plain_scores = scores(q, k).masked_fill(hidden, 0.0)
    seen = mechanism(plain_scores, plain_scores).masked_fill(hidden, 0.0)
    assert_close(seen, case["L0"].masked_fill(hidden, 0.0))
    out = mechanism.mix_attn(case["A0"]).masked_fill(hidden, 0.0) @ v
    if args.get("group_norm"):
        mean_square = out.square().mean(-1, keepdim=True) + 1e-5
        out = out * mean_square.rsqrt() * w["subln.weight"]
    if args.get("add_gating"):
        out = out * F.linear(out, w["gate.weight"], w["gate.bias"]).sigmoid()
    assert_close(F.linear(joined(out), w["wo.weight"]), case["out0"])


def test_value_residual():
    case = Case("valueres_a")
    x = case["x"]
    first = case.heads(x, case["layer0.v_proj.weight"])[0]
    for number in (1, 2):
        x = x + case[f"out{number - 1}"]
        values = case.heads(x, case[f"layer{number}.v_proj.weight"])[0]
        v = ValueResidual(identity=False)(values, first)
        heads = joined(case[f"A{number}"] @ v)
        out = F.linear(heads, case[f"layer{number}.o_proj.weight"])
        assert_close(out, case[f"out{number}"])
