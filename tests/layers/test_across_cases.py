"""The mechanisms against numbers from their authors' code: ../shared/across/cases, described in SPEC.md beside it."""

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from ea_vision.layers import MRLALight, ValueResidual, create_evolution
from tests.conftest import SHARED

CASES = SHARED / "across" / "cases"
pytestmark = pytest.mark.skipif(not CASES.is_dir(), reason="../shared/across/cases is not there")


@pytest.fixture(autouse=True, params=[torch.float32, torch.float64], ids=["float32", "float64"])
def dtype(request):
    """Every tensor and module of a test has it."""
    torch.set_default_dtype(request.param)
    yield request.param
    torch.set_default_dtype(torch.float32)


class Case:
    """Tensors in the default dtype, by their names in the file."""

    def __init__(self, name: str) -> None:
        with np.load(CASES / f"{name}.npz") as arrays:
            self.meta = json.loads(str(arrays["meta"]))
            self.tensors = {
                key: torch.from_numpy(arrays[key]).to(torch.get_default_dtype())
                for key in arrays.files
                if key != "meta"
            }

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.tensors[name]

    def under(self, prefix: str) -> dict[str, torch.Tensor]:
        """The tensors whose names begin so, without that."""
        return {
            key.removeprefix(prefix): value
            for key, value in self.tensors.items()
            if key.startswith(prefix)
        }

    def heads(
        self, x: torch.Tensor, *weights: torch.Tensor, heads: int | None = None
    ) -> torch.Tensor:
        """(parts, B, K, N, D) of one projection."""
        K = heads or self.meta["heads"]
        return F.linear(x, *weights).unflatten(2, (-1, K, x.shape[2] // K)).permute(2, 0, 3, 1, 4)


def assert_close(actual: torch.Tensor, expected: torch.Tensor, rounding: float = 1.0) -> None:
    """To 1e-5 of the largest entry, in float64 of each entry, too."""
    scale = (
        1.0 if actual.dtype == torch.float64 else rounding * max(1.0, expected.abs().max().item())
    )
    torch.testing.assert_close(actual, expected, atol=1e-5 * scale, rtol=1e-5)


def assert_statistics(
    case: Case, module: torch.nn.Module, name: str, rounding: float = 1.0
) -> None:
    """Of a batch norm after one forward in training."""
    for statistic in ("running_mean", "running_var") if case.meta["train"] else ():
        assert_close(module.get_buffer(statistic), case[f"after.{name}.{statistic}"], rounding)


def scores(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5


def joined(heads: torch.Tensor) -> torch.Tensor:
    """(B, K, N, D) -> (B, N, K*D)"""
    return heads.transpose(1, 2).flatten(2)


@pytest.mark.parametrize("name", ["realformer_a", "realformer_b"])
def test_realformer(name):
    case = Case(name)
    for number in range(1, case.meta["layers"]):
        mean = (
            {"mixture": True, "alpha": number / (number + 1)} if case.meta["mode"] == "mean" else {}
        )
        mechanism = create_evolution("residual", case.meta["heads"], **mean)
        assert_close(mechanism(case[f"S{number}"], case[f"L{number - 1}"]), case[f"L{number}"])


def test_revit():
    case = Case("revit_a")
    for number in (1, 2):
        K, weights = case.meta["layers"][number]["num_heads"], case.under(f"layer{number}.qkv.")
        q, k, _ = case.heads(case[f"x{number}"], weights["weight"], weights["bias"], heads=K)
        mechanism = create_evolution(
            "residual", K, mixture=True, learnable=True, alpha=1 - case["alpha"].item()
        )
        assert_close(mechanism(scores(q, k), case[f"L{number - 1}"]), case[f"L{number}"])


def test_talking_heads_of_cait():
    case = Case("talking_a")
    w = case.under("layer0.")
    q, k, v = case.heads(case["x"], w["qkv.weight"], w["qkv.bias"])
    mechanism = create_evolution("talking_heads", case.meta["heads"])
    mechanism.load_state_dict({n: x for n, x in w.items() if n.startswith(("proj_l", "proj_w"))})
    assert_close(mechanism(scores(q, k), scores(q, k)), case["L0"])
    out = joined(mechanism.mix_attn(case["A0"]) @ v)
    assert_close(F.linear(out, w["proj.weight"], w["proj.bias"]), case["out0"])


@pytest.mark.parametrize("name", ["deepvit_a", "deepvit_b"])
def test_deepvit(name):
    case = Case(name)
    for number in range(case.meta["layers"]):
        mechanism = create_evolution("reattention", case.meta["heads"]).train(case.meta["train"])
        weights = case.under(f"layer{number}.")
        mechanism.load_state_dict(
            {n: w for n, w in weights.items() if n.startswith(("reatten", "var_norm"))},
            strict=False,
        )
        assert_close(mechanism.mix_attn(case[f"A{number}"]), case[f"A_mixed{number}"])
        assert_statistics(case, mechanism.var_norm, f"layer{number}.var_norm")


@pytest.mark.parametrize("name", ["refiner_a", "refiner_b"])
def test_refiner(name):
    """The released form: the second layer refines the first one's maps."""
    case = Case(name)
    # three norms over a batch's probabilities, whose deviations are small, make float32's rounding larger
    rounding = 3.0 if case.meta["train"] else 1.0
    mechanism = create_evolution("refiner", case.meta["heads"]).train(case.meta["train"])
    norm = {f"adapt_bn.{n}": w for n, w in case.under("layer1.adapt_bn.").items()}
    mechanism.load_state_dict({**case.under("layer1.DLA."), **norm}, strict=False)
    assert_close(mechanism.mix_attn(case["carried0"]), case["adapt_bn_out1"], rounding)
    for bn in ("DLA.bn1", "DLA.bn2", "DLA.bn3", "adapt_bn"):
        assert_statistics(
            case, mechanism.get_submodule(bn.removeprefix("DLA.")), f"layer1.{bn}", rounding
        )


def _centred(weight: torch.Tensor) -> torch.Tensor:
    """The same convolution with the authors' last query row, the present one, in the middle: zeros below it."""
    return F.pad(weight, (0, 0, 0, weight.shape[2] - 1))


@pytest.mark.parametrize("name", ["mta_a", "mta_b"])
def test_multi_token_attention(name):
    """Their causal padding of queries is ours with a kernel of zeros below the middle; mask, norm and gate are here."""
    case = Case(name)
    w, args, x = case.under("layer0."), case.meta["args"], case["x"]
    q, k, v = (case.heads(x, w[f"w{n}.weight"])[0] for n in "qkv")
    kernel = _centred(w["mta_kernel"])
    mechanism = create_evolution(
        "mta",
        case.meta["heads"],
        map_kernel=tuple(kernel.shape[2:]),
        head_kernel=args["head_kernel_size"],
    )
    with torch.no_grad():
        mechanism.conv_before.copy_(kernel)
        mechanism.heads_after.copy_(w["head_kernel"])
        if "mta_kernel_after_sm" in w:
            mechanism.conv_after.copy_(_centred(w["mta_kernel_after_sm"]))
        if "wpsm.weight" in w:
            mechanism.heads_before.copy_(w["wpsm.weight"])
    hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1) & case.meta["causal"]
    own = scores(q, k).masked_fill(hidden, 0.0)
    assert_close(mechanism(own, own).masked_fill(hidden, 0.0), case["L0"].masked_fill(hidden, 0.0))
    out = mechanism.mix_attn(case["A0"]).masked_fill(hidden, 0.0) @ v
    if args.get("group_norm"):
        out = out * (out.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * w["subln.weight"]
    if args.get("add_gating"):
        out = out * F.linear(out, w["gate.weight"], w["gate.bias"]).sigmoid()
    assert_close(F.linear(joined(out), w["wo.weight"]), case["out0"])


def test_value_residual():
    case = Case("valueres_a")
    x = case["x"]
    first = case.heads(x, case["layer0.v_proj.weight"])[0]
    for number in (1, 2):
        x = x + case[f"out{number - 1}"]
        v = ValueResidual(identity=False)(
            case.heads(x, case[f"layer{number}.v_proj.weight"])[0], first
        )
        assert_close(
            F.linear(joined(case[f"A{number}"] @ v), case[f"layer{number}.o_proj.weight"]),
            case[f"out{number}"],
        )


@pytest.mark.parametrize("name", ["mrlalight_a", "mrlalight_b"])
def test_mrla_light(name):
    case = Case(name)
    for number in (1, 2):  # of which the shortcut is the output before
        names = {
            "mrla.lambda_t": "shortcut_scale",
            "mrla.mrla.Wq.weight": "query.weight",
            "mrla.mrla.Wk.weight": "key.weight",
            "mrla.mrla.Wv.weight": "value.weight",
        }
        mrla, before_norm = MRLALight(64, case.meta["dim_perhead"]).train(case.meta["train"]), []
        mrla.load_state_dict(
            {
                names.get(n, n.replace("bn_mrla", "bn")): w
                for n, w in case.under(f"layer{number}.").items()
                if "mrla" in n
            },
            strict=False,
        )
        mrla.bn.register_forward_pre_hook(lambda _, args, kept=before_norm: kept.append(args[0]))
        x = case[f"mrla_in{number}"]
        assert_close(x + mrla(x, case[f"out{number - 1}"]), case[f"out{number}"])
        assert_close(before_norm[0], case[f"mrla_out{number}"])
        assert_statistics(case, mrla.bn, f"layer{number}.bn_mrla")
