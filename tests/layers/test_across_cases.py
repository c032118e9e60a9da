"""The mechanisms against numbers from their authors' code: ../shared/across/cases, described in SPEC.md beside it."""
import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from ea_vision.layers import MRLALight, ValueResidual, create_evolution, relative_logits

CASES = Path(__file__).parents[3] / "shared" / "across" / "cases"
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
            self.tensors = {key: torch.from_numpy(arrays[key]).to(torch.get_default_dtype())
                            for key in arrays.files if key != "meta"}

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.tensors[name]

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def layer(self, number: int) -> dict[str, torch.Tensor]:
        """The weights of a layer, without a prefix."""
        start = f"layer{number}."
        return {key.removeprefix(start): value for key, value in self.tensors.items() if key.startswith(start)}

    def heads(self, x: torch.Tensor, number: int, names: str = "qkv", heads: int | None = None) -> list[torch.Tensor]:
        """(B, K, N, D) each, of one projection."""
        y = F.linear(x, self[f"layer{number}.qkv.weight"], self[f"layer{number}.qkv.bias"])
        return list(y.unflatten(2, (len(names), heads or self.meta["heads"], -1)).permute(2, 0, 3, 1, 4))

    def out(self, attn: torch.Tensor, v: torch.Tensor, number: int) -> torch.Tensor:
        y = (attn @ v).transpose(1, 2).flatten(2)
        return F.linear(y, self[f"layer{number}.proj.weight"], self[f"layer{number}.proj.bias"])


def assert_close(actual: torch.Tensor, expected: torch.Tensor, rounding: float = 1.0) -> None:
    """To 1e-5 of the largest entry, in float64 of each entry, too."""
    scale = 1.0 if actual.dtype == torch.float64 else rounding * max(1.0, expected.abs().max().item())
    torch.testing.assert_close(actual, expected, atol=1e-5 * scale, rtol=1e-5)


def scores(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5


@pytest.mark.parametrize("name", ["realformer_a", "realformer_b"])
def test_realformer(name):
    case = Case(name)
    x, carried = case["x"], None
    for number in range(case.meta["layers"]):
        w = case.layer(number)
        q, k, v = ((x @ w[f"{n}.weight_in_out"] + w[f"{n}.bias"]).unflatten(2, (case.meta["heads"], -1)).transpose(1, 2)
                   for n in "qkv")
        logits = scores(q, k)
        assert_close(logits, case[f"S{number}"])
        if number > 0:
            mean = {"mixture": True, "alpha": number / (number + 1)} if case.meta["mode"] == "mean" else {}
            logits = create_evolution("residual", case.meta["heads"], **mean)(logits, carried)
        carried = logits
        assert_close(logits, case[f"L{number}"])
        out = (logits.softmax(-1) @ v).transpose(1, 2).flatten(2) @ w["o.weight_in_out"] + w["o.bias"]
        assert_close(out, case[f"out{number}"])
        x = x + out
    assert_close(x, case["x_final"])


@pytest.mark.parametrize("name", ["revit_a", "revit_b"])
def test_revit(name):
    case = Case(name)
    carried = None
    for number, layer in enumerate(case.meta["layers"]):
        K, (H, W) = layer["num_heads"], layer["hw"]
        q, k, v = case.heads(case[f"x{number}"], number, heads=K)
        logits = scores(q, k)
        if layer.get("rel_pos_spatial"):  # the bias comes after the mixture, in place: what is handed on has it
            tables = (case[f"layer{number}.rel_pos_{axis}"].flip(0) for axis in "hw")
            row, col = relative_logits(q.unflatten(2, (H, W)), *tables)
            bias = (row.unsqueeze(-1) + col.unsqueeze(-2)).reshape(logits.shape)
        else:
            bias = 0.0
        if number > 0:
            mechanism = create_evolution("residual", K, mixture=True, learnable=True, alpha=1 - case["alpha"].item())
            logits = mechanism(logits, carried)
        logits = carried = logits + bias
        assert_close(logits, case[f"L{number}"])
        out = logits.softmax(-1) @ v + (q if layer["residual_pooling"] else 0.0)
        out = F.linear(out.transpose(1, 2).flatten(2), *(case[f"layer{number}.proj.{n}"] for n in ("weight", "bias")))
        assert_close(out, case[f"out{number}"])


def test_talking_heads_of_cait():
    case = Case("talking_a")
    q, k, v = case.heads(case["x"], 0)
    mechanism = create_evolution("talking_heads", case.meta["heads"])
    mechanism.load_state_dict({n: w for n, w in case.layer(0).items() if n.startswith(("proj_l", "proj_w"))})
    logits = mechanism(scores(q, k), scores(q, k))
    assert_close(logits, case["L0"])
    assert_close(logits.softmax(-1), case["A0"])
    assert_close(case.out(mechanism.mix_attn(logits.softmax(-1)), v, 0), case["out0"])


def test_talking_heads_of_the_paper():
    """Unequal numbers of heads, by its equation: ours, square, mixes them embedded among zeros."""
    case = Case("talking_b")
    mechanism = create_evolution("talking_heads", 4)
    with torch.no_grad():
        for proj, weight in (mechanism.proj_l, case["P_l"]), (mechanism.proj_w, case["P_w"]):
            proj.weight.zero_()[:weight.shape[1], :weight.shape[0]] = weight.T
    own = F.pad(case["S0"], (0, 0, 0, 0, 0, 2))
    logits = mechanism(own, own)
    assert_close(logits, case["L0"])
    mixed = mechanism.mix_attn(logits.softmax(-1))
    assert_close(mixed[:, :3], case["A_mixed0"])
    v = torch.einsum("bnc,cdh->bhnd", case["mem"], case["Wv"])
    assert_close(torch.einsum("bhnd,cdh->bnc", mixed[:, :3] @ v, case["Wo"]), case["out0"])


@pytest.mark.parametrize("name", ["deepvit_a", "deepvit_b"])
def test_deepvit(name):
    case = Case(name)
    x = case["x"]
    for number in range(case.meta["layers"]):
        q, k, v = case.heads(x, number)
        mechanism = create_evolution("reattention", case.meta["heads"]).train(case.meta["train"])
        weights = {n: w for n, w in case.layer(number).items() if n.startswith(("reatten", "var_norm"))}
        mechanism.load_state_dict(weights, strict=False)
        attn = mechanism.mix_attn(mechanism(scores(q, k), scores(q, k)).softmax(-1))
        assert_close(attn, case[f"A_mixed{number}"])
        out = case.out(attn, v, number)
        assert_close(out, case[f"out{number}"])
        for statistic in ("running_mean", "running_var") if case.meta["train"] else ():
            assert_close(mechanism.var_norm.get_buffer(statistic), case[f"after.layer{number}.var_norm.{statistic}"])
        x = x + out


@pytest.mark.parametrize("name", ["refiner_a", "refiner_b"])
def test_refiner(name):
    """The released form: the second layer refines the first one's maps, times head_dim ** -0.5."""
    case = Case(name)
    x, carried = case["x"], None
    # three norms over a batch's probabilities, whose deviations are small, make float32's rounding larger
    close = partial(assert_close, rounding=3.0 if case.meta["train"] else 1.0)
    for number, shared in enumerate(case.meta["share"]):
        if shared:
            (v,) = case.heads(x, number, "v")
            mechanism = create_evolution("refiner", case.meta["heads"]).train(case.meta["train"])
            weights = {n.removeprefix("DLA."): w for n, w in case.layer(number).items()
                       if n.startswith(("DLA.", "adapt_bn."))}
            mechanism.load_state_dict(weights, strict=False)
            refined = mechanism.mix_attn(carried)
            close(refined, case[f"adapt_bn_out{number}"])
            attn = refined * v.shape[-1] ** -0.5
            for bn in ("bn1", "bn2", "bn3", "adapt_bn") if case.meta["train"] else ():
                for statistic in "running_mean", "running_var":
                    name_there = f"after.layer{number}.{'' if bn == 'adapt_bn' else 'DLA.'}{bn}.{statistic}"
                    close(mechanism.get_submodule(bn).get_buffer(statistic), case[name_there])
        else:
            q, k, v = case.heads(x, number)
            attn = scores(q, k).softmax(-1)
            close(attn, case[f"A{number}"])
            attn = attn if carried is None else attn + v.shape[-1] ** -0.5 * carried
            carried = attn
        close(carried, case[f"carried{number}"])
        out = case.out(attn, v, number)
        close(out, case[f"out{number}"])
        x = x + out


def _centred(weight: torch.Tensor) -> torch.Tensor:
    """The same convolution with the authors' last query row, the present one, in the middle: zeros below it."""
    return F.pad(weight, (0, 0, 0, weight.shape[2] - 1))


@pytest.mark.parametrize("name", ["mta_a", "mta_b"])
def test_multi_token_attention(name):
    """Their causal padding of queries is ours with a kernel of zeros below the middle; mask, norm and gate are here."""
    case = Case(name)
    w, args, K = case.layer(0), case.meta["args"], case.meta["heads"]
    x = case["x"]
    q, k, v = (F.linear(x, w[f"w{n}.weight"]).unflatten(2, (K, -1)).transpose(1, 2) for n in "qkv")
    kernel = _centred(w["mta_kernel"])
    mechanism = create_evolution("mta", K, map_kernel=tuple(kernel.shape[2:]), head_kernel=args["head_kernel_size"])
    with torch.no_grad():
        mechanism.conv_before.copy_(kernel)
        mechanism.heads_after.copy_(w["head_kernel"])
        if "mta_kernel_after_sm" in w:
            mechanism.conv_after.copy_(_centred(w["mta_kernel_after_sm"]))
        if "wpsm.weight" in w:
            mechanism.heads_before.copy_(w["wpsm.weight"])
    hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1) & case.meta["causal"]
    own = scores(q, k).masked_fill(hidden, 0.0)
    logits = mechanism(own, own)
    assert_close(logits.masked_fill(hidden, 0.0), case["L0"].masked_fill(hidden, 0.0))
    attn = logits.masked_fill(hidden, float("-inf")).softmax(-1)
    assert_close(attn, case["A0"])
    out = mechanism.mix_attn(attn).masked_fill(hidden, 0.0) @ v
    if args.get("group_norm"):
        out = out * (out.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * w["subln.weight"]
    if args.get("add_gating"):
        out = out * F.linear(out, w["gate.weight"], w["gate.bias"]).sigmoid()
    assert_close(F.linear(out.transpose(1, 2).flatten(2), w["wo.weight"]), case["out0"])


@pytest.mark.parametrize("name", ["valueres_a", "valueres_b"])
def test_value_residual(name):
    case = Case(name)
    x, first, K = case["x"], None, case.meta["heads"]
    for number in range(3):
        w = case.layer(number)
        if "qkv.weight" in w:
            q, k, v = case.heads(x, number)
        else:
            q, k, v = (F.linear(x, w[f"{n}_proj.weight"]).unflatten(2, (K, -1)).transpose(1, 2) for n in "qkv")
        if first is None:
            first = v
        else:
            mixture = ValueResidual(identity=False)
            if "lam" in case:
                mixture.load_state_dict({"lambdas": case["lam"][number]})
            v = mixture(v, first)
        if "lam" in case:
            assert_close(v, case[f"V_used{number}"])
        attn = scores(q, k).softmax(-1)
        out = case.out(attn, v, number) if "proj.weight" in w else F.linear((attn @ v).transpose(1, 2).flatten(2),
                                                                           w["o_proj.weight"])
        assert_close(out, case[f"out{number}"])
        x = x + out


@pytest.mark.parametrize("name", ["mrlalight_a", "mrlalight_b"])
def test_mrla_light(name):
    """The mechanism in timm's bottleneck, which the authors' is but for the mechanism."""
    from timm.models.resnet import Bottleneck

    case = Case(name)
    x = case["x"]
    for number in range(3):
        w = case.layer(number)
        downsample = None
        if "downsample.0.weight" in w:
            downsample = torch.nn.Sequential(torch.nn.Conv2d(32, 64, 1, 2, bias=False), torch.nn.BatchNorm2d(64))
        block = Bottleneck(x.shape[1], 16, stride=2 if downsample else 1, downsample=downsample)
        names = {"mrla.lambda_t": "shortcut_scale", "mrla.mrla.Wq.weight": "query.weight",
                 "mrla.mrla.Wk.weight": "key.weight", "mrla.mrla.Wv.weight": "value.weight"}
        mrla = MRLALight(64, case.meta["dim_perhead"])
        block.load_state_dict({n: v for n, v in w.items() if "mrla" not in n}, strict=False)
        mrla.load_state_dict({names.get(n, n.replace("bn_mrla", "bn")): v for n, v in w.items() if "mrla" in n},
                             strict=False)
        block.train(case.meta["train"])
        mrla.train(case.meta["train"])
        shortcut = x if downsample is None else downsample(x)
        if downsample is not None and case.meta["train"]:  # its statistics are to move once
            block.load_state_dict({n: v for n, v in w.items() if "mrla" not in n}, strict=False)
        y = block(x)
        assert_close(y, case[f"mrla_in{number}"])
        before_norm = []
        mrla.bn.register_forward_pre_hook(lambda _, args, kept=before_norm: kept.append(args[0]))
        out = y + mrla(y, shortcut)
        assert_close(before_norm[0], case[f"mrla_out{number}"])
        assert_close(out, case[f"out{number}"])
        for statistic in ("running_mean", "running_var") if case.meta["train"] else ():
            assert_close(mrla.bn.get_buffer(statistic), case[f"after.layer{number}.bn_mrla.{statistic}"])
        x = out
