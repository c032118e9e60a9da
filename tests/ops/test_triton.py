"""The Triton kernels against the readable torch in float64: on a CUDA device, else in Triton's interpreter.

The interpreter must be asked for before Triton is imported, so this file runs itself again in a process of its own.
"""
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ea_vision.ops import reference, triton_tiles
from ea_vision.ops import triton_attention as ours
from ea_vision.ops.problem import Problem
from tests.ops.oracle import kept_entries
from tests.slow import slow_but

if importlib.util.find_spec("triton") is None:
    pytest.skip("needs triton", allow_module_level=True)

DEVICE = "cuda" if torch.cuda.is_available() and not ours.INTERPRETING else "cpu"
HERE = DEVICE == "cuda" or ours.INTERPRETING
kernels = pytest.mark.skipif(not HERE, reason="runs in the process of test_in_interpreter")

# Error as a share of the truth, by their norms. In half precision the signs of relu's arguments near zero decide: there
# torch's own bfloat16 errs by up to 8e-2 in these cases, and its float16 by 1e-3.
TOLERANCE = {torch.float32: 3e-6, torch.float16: 4e-3, torch.bfloat16: 8e-2}


def run_alone(*args: str, interpret: str) -> str:
    env = {**os.environ, "TRITON_INTERPRET": interpret, "OMP_NUM_THREADS": "1"}
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, *args], env=env, capture_output=True, text=True, cwd=root)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-8000:]
    return done.stdout


@pytest.mark.skipif(HERE, reason="the tests themselves run here")
@pytest.mark.parametrize("tests", slow_but({"gradients and EA"}, ["gradients and EA", "test"]))
def test_in_interpreter(tests):
    authors = Path(__file__).parents[1] / "layers" / "test_reference.py"
    assert "passed" in run_alone(
        "-m", "pytest", "--verbose", "-p", "no:cacheprovider", "-k", tests, __file__, str(authors), interpret="1")


def leaves(size, dtype, B=1, K=8, D=4, E=1, kernel=3, relative=True, prev=True, gates=None) -> dict:
    """Random arguments: q, k, v and maps in `dtype`, parameters in float32; None for those a layer has not."""
    H, W = size
    N = H * W
    x = {"qkv": torch.randn(B, H, W, K * (2 * D + E))}  # as a channels_last projection leaves them
    x["height_rel"], x["width_rel"] = ((torch.randn(2 * S - 1, D) * D ** -0.5 if relative else None) for S in size)
    x["prev_logits"] = 2 * torch.randn(B, K, N, N) if prev else None
    kernel = kernel if prev else 0
    x["weight"] = torch.randn(K, K, kernel, kernel) * (2 / (K * kernel ** 2)) ** 0.5 if kernel else None
    x["bias"] = 0.1 * torch.randn(K) if kernel else None
    if prev and gates is not None:  # (alpha, beta), or of random heads
        x["gates"] = torch.rand(2, K) * 1.5 if gates == "per head" else torch.tensor(gates).view(2, 1).repeat(1, K)
    x = {name: None if t is None else t.to(DEVICE) for name, t in x.items()}
    return {name: t.to(dtype) if name in ("qkv", "prev_logits") and t is not None else t for name, t in x.items()}


def split(qkv, K, D, E):
    """(B, H, W, channels) -> q, k (B, K, N, D) and v (B, K, N, E), views."""
    B, H, W, _ = qkv.shape
    q, k, v = qkv.permute(0, 3, 1, 2).split([K * D, K * D, K * E], dim=1)
    return [t.reshape(B, K, -1, H * W).transpose(-1, -2) for t in (q, k, v)]


def results(attend, x, dtype, size, K, D, E, need_logits=True, uses=("out", "logits"), **options) -> dict:
    """Outputs and gradients of a random weighting of them; dtype None leaves the arguments' own."""
    x = {name: None if t is None else t.to(dtype or t.dtype).requires_grad_() for name, t in x.items()}
    rest = [x[name] for name in ("height_rel", "width_rel", "prev_logits", "weight", "bias")]
    out, logits = attend(
        *split(x["qkv"], K, D, E), *rest, options["alpha"], options["beta"], predict=options["predict"],
        scale=D ** -0.5, feat_size=size, need_logits=need_logits, gates=x.get("gates"),
        dropout_p=options["dropout_p"], seed=torch.tensor([options["seed"]], device=DEVICE),
        num_prefix_tokens=options["prefix"])
    torch.manual_seed(1)
    loss = 0.0
    for name, t in (("out", out), ("logits", logits)):
        if t is not None and name in uses:
            loss = loss + (t.double() * torch.randn(t.shape).to(t.device)).sum()
    names = [name for name, t in x.items() if t is not None]
    grads = torch.autograd.grad(loss, [x[name] for name in names], allow_unused=True)
    return {"out": out.detach(), "logits": logits if logits is None else logits.detach(),
            **{"d_" + name: grad for name, grad in zip(names, grads, strict=True)}}


NAMES = ("q", "k", "v", "height_rel", "width_rel", "prev_logits", "weight", "bias", "alpha", "beta")


def stated(*args, gates=None, **options):
    """The problem of q, k, v and, if they are there, tables, prev_logits, weight, bias, alpha and beta."""
    named = dict(zip(NAMES, args, strict=False)) | ({} if gates is None else {"alpha": gates[0], "beta": gates[1]})
    return Problem(**named, **options).checked()


def ours_of(*args, seed=None, **options):
    problem = stated(*args, **options)
    assert ours.TRITON.reason_against(problem) is None
    with mock.patch.object(torch, "randint", lambda *_, **__: seed):
        return ours.TRITON.forward(problem)


def exact(*args, seed=None, **options):
    problem = stated(*args, **options)
    B, K, N, _ = problem.q.shape
    kept = kept_entries(0 if seed is None else seed.item(), B, K, N, problem.dropout_p).to(DEVICE)
    with mock.patch.object(torch.nn.functional, "dropout", lambda x, p: x * kept / (1.0 - p)):
        return reference.REFERENCE.forward(problem)


def check(size, dtype, *, K=8, D=4, E=1, alpha=0.5, beta=1.0, predict=False, need_logits=True, uses=("out", "logits"),
          dropout_p=0.0, seed=5, prefix=0, **shape):
    x = leaves(size, dtype, K=K, D=D, E=E, **shape)
    common = dict(size=size, K=K, D=D, E=E, alpha=alpha, beta=beta, predict=predict, need_logits=need_logits, uses=uses,
                  dropout_p=dropout_p, seed=seed, prefix=prefix)
    got = results(ours_of, x, None, **common)
    true = results(exact, {n: None if t is None else t.detach() for n, t in x.items()}, torch.float64, **common)
    for name, want in true.items():
        have = got[name]
        if want is None:
            assert have is None or not have.any(), name
            continue
        assert have.shape == want.shape and have.dtype == (x["qkv"].dtype if name in ("out", "logits") else
                                                           x[name[2:]].dtype), name
        least = 1e-3
        if name == "d_gates":  # a sum over all entries, most of which cancels
            least = x["prev_logits"][:, 0].numel() ** 0.5
        elif name == "d_bias":  # likewise, over the queries and keys of every image
            least = x["qkv"].shape[0] ** 0.5 * (size[0] * size[1] + prefix)
        elif name in ("d_height_rel", "d_width_rel"):  # one is nothing but rounding where a map has one row or column
            least = max(least, *(true[table].norm() for table in ("d_height_rel", "d_width_rel")))
        error = (have.double() - want).norm() / want.norm().clamp_min(least)
        assert error <= TOLERANCE[dtype], f"{name}: relative error {error:.1e}"


EA, PA = {"predict": False}, {"predict": True}
CASES = {
    "EA": dict(EA, size=(4, 5), D=20, E=6),
    "EA, two images, last layer": dict(EA, size=(3, 4), B=2, D=20, E=3, alpha=0.7, need_logits=False),
    "EA, beta 0.6, wide heads": dict(EA, size=(3, 6), K=4, D=64, E=64, beta=0.6),
    "EA without convolution": dict(EA, size=(5, 4), kernel=0),
    "EA, beta 0": dict(EA, size=(3, 3), beta=0.0),
    "EA, alpha 0": dict(EA, size=(2, 3), alpha=0.0),
    "EA, alpha 1": dict(EA, size=(3, 3), alpha=1.0),
    "EA, 1x1, not relative": dict(EA, size=(4, 4), kernel=1, relative=False),
    "PA": dict(PA, size=(6, 3), D=4, E=1),
    "PA without convolution": dict(PA, size=(2, 9), K=4, kernel=0),
    "first": dict(EA, size=(5, 4), prev=False, D=20),
    "first, last layer": dict(EA, size=(3, 2), K=3, prev=False, relative=False, need_logits=False),
    "one row": dict(PA, size=(1, 17), K=4),
    "EA, gates": dict(EA, size=(4, 5), D=20, E=6, gates="per head"),
    "EA, gates, no table": dict(EA, size=(1, 17), K=3, D=16, E=16, relative=False, gates=(0.2, -0.1)),
    "EA, gates at 0": dict(EA, size=(3, 3), K=4, gates=(0.0, 0.0)),
    "EA, gates at 1": dict(EA, size=(3, 3), K=4, gates=(1.0, 1.0)),
    "EA, gates without convolution": dict(EA, size=(3, 4), kernel=0, gates="per head"),
    "PA, gates": dict(PA, size=(4, 3), K=4, D=12, E=16, gates="per head"),
    "PA, gate at 0, without convolution": dict(PA, size=(2, 4), K=4, kernel=0, gates=(0.0, 1.0)),
    "EA, dropout": dict(EA, size=(3, 4), B=2, D=20, E=6, dropout_p=0.1, seed=123456789123456789),
    "EA, dropout, last layer": dict(EA, size=(1, 17), K=3, relative=False, dropout_p=0.6, seed=-3, need_logits=False),
    "PA, dropout": dict(PA, size=(4, 3), K=4, D=12, E=16, dropout_p=0.3, seed=1 << 40),
    "first, dropout": dict(EA, size=(5, 4), prev=False, D=20, dropout_p=0.3),
    "EA, 12 heads": dict(EA, size=(1, 19), K=12, D=16, E=16, relative=False),
    "PA, 16 heads, kernel 5": dict(PA, size=(3, 4), K=16, D=6, E=5, kernel=5),
    "EA, kernel 5": dict(EA, size=(5, 4), K=3, kernel=5),
    "EA, prefix": dict(EA, size=(1, 19), K=3, relative=False, prefix=1),
    "EA, prefix, 12 heads, gates": dict(EA, size=(1, 18), K=12, relative=False, prefix=2, gates="per head"),
    "EA, prefix, beta 0.6, last layer": dict(EA, size=(1, 18), B=2, K=4, relative=False, prefix=5, beta=0.6,
                                             need_logits=False),
    "PA, prefix": dict(PA, size=(1, 19), K=3, relative=False, prefix=1, dropout_p=0.2),
    "PA, prefix, gates": dict(PA, size=(1, 18), K=4, relative=False, prefix=2, gates="per head"),
    "only the logits are used": dict(EA, size=(3, 3), uses=("logits",)),
    "the logits are not used": dict(PA, size=(3, 3), uses=("out",)),
}
HALF = ("EA", "PA", "first", "EA, beta 0.6, wide heads", "EA, gates", "PA, gates", "first, dropout",
        "EA, prefix, 12 heads, gates", "PA, 16 heads, kernel 5")


@kernels
@pytest.mark.parametrize("case", CASES)
def test_outputs_and_gradients(case):
    check(dtype=torch.float32, **CASES[case])


@kernels
@pytest.mark.parametrize("dtype, case", [
    pytest.param(dtype, case, marks=pytest.mark.slow if DEVICE == "cpu" and dtype == torch.float16
                 and case not in HALF[:3] else ()) for dtype in (torch.float16, torch.bfloat16)
    for case in (HALF if DEVICE == "cpu" else CASES)], ids=str)
def test_half_precision(case, dtype):
    check(dtype=dtype, **CASES[case])


@kernels
@settings(max_examples=4 if DEVICE == "cpu" else 100, derandomize=True, deadline=None)
@given(st.data())
def test_any_shape(data):
    def among(*values):
        return data.draw(st.sampled_from(values))

    torch.manual_seed(data.draw(st.integers(0, 99)))
    side = st.integers(1, 5 if DEVICE == "cpu" else 15)
    prev = among(True, True, False)
    check(
        (data.draw(side), data.draw(side)), among(*TOLERANCE), B=among(1, 2), K=among(1, 4, 8, 12),
        D=data.draw(st.integers(4, 64)), E=data.draw(st.integers(1, 64)), kernel=among(0, 1, 3, 5),
        relative=among(True, False), prev=prev, alpha=among(0.5, 0.01, 0.7), beta=among(1.0, 0.6),
        predict=among(True, False), need_logits=among(True, False), gates=among(None, "per head"))


@kernels
@pytest.mark.parametrize("side", (7, pytest.param(14, marks=pytest.mark.slow if DEVICE == "cpu" else ())))
def test_maps_of_the_networks(side, monkeypatch):
    if DEVICE == "cpu":
        pixels = 32 if side == 7 else 64  # the interpreter pays by the tile
        monkeypatch.setattr(ours, "default_tile", lambda *args: ours.Tile(pixels, pixels))
    check((side, side), torch.float32, K=8 if side == 7 else 2, D=20, E=3)


@kernels
@pytest.mark.skipif(DEVICE == "cuda", reason="times are made up here")
def test_tiles_are_timed_on_first_use_and_change_no_result(monkeypatch):
    """The last candidate wins; what multiplies in place is run again without harm."""
    timed, tuners = [], {}

    def milliseconds(call, quantiles):
        call()
        timed.append(call)
        return [1.0 / len(timed)] * len(quantiles)

    def tuned(kernel, *args):
        tuners[kernel.__name__] = by_triton(kernel, *args)
        return tuners[kernel.__name__]

    by_triton = triton_tiles.tuned
    by_triton.cache_clear()
    monkeypatch.setattr(triton_tiles, "milliseconds", milliseconds)
    monkeypatch.setattr(triton_tiles, "tunes", lambda device, programs, constants: "J" in constants)
    monkeypatch.setattr(triton_tiles, "tuned", tuned)
    for timings in (True, False):
        timed.clear()
        check(dtype=torch.float32, **EA, size=(3, 4), K=3, gates="per head")
        assert bool(timed) == timings
    assert len(tuners) == 5 and all(tuner.best_config.maxnreg == 128 for tuner in tuners.values())
    by_triton.cache_clear()


@kernels
def test_chain():
    """Three layers that hand on their logits, in the layout they are made in, as the reference hands on its own."""
    size, K, D, E = (2, 5), 4, 8, 3
    first = leaves(size, torch.float32, K=K, D=D, E=E, prev=False)
    later = [leaves(size, torch.float32, K=K, D=D, E=E) for _ in range(2)]

    def chain(attend, dtype):
        total, logits, used = 0.0, None, []
        for i, x in enumerate((first, *later)):
            x = {name: t.detach().to(dtype).requires_grad_() for name, t in x.items() if t is not None}
            x.pop("prev_logits", None)
            out, logits = attend(
                *split(x["qkv"], K, D, E), x["height_rel"], x["width_rel"], logits, x.get("weight"), x.get("bias"),
                0.5, 1.0, predict=False, scale=D ** -0.5, feat_size=size, need_logits=i < 2)
            total = total + (out.double() * torch.linspace(-1, 1, out.numel(), device=DEVICE).view(out.shape)).sum()
            used += x.values()
        assert logits is None
        return torch.autograd.grad(total, used)

    for have, want in zip(chain(ours_of, torch.float32), chain(exact, torch.float64), strict=True):
        assert (have.double() - want).norm() <= 1e-6 * want.norm()


@kernels
def test_gradient_of_the_weight_lies_as_the_weight():
    """Channels-last weights get channels-last gradients, which the buckets of DDP take as they are."""
    size, K, D, E = (2, 2), 3, 4, 2
    x = leaves(size, torch.float32, K=K, D=D, E=E)
    grads = []
    for layout in (torch.contiguous_format, torch.channels_last):
        weight = x["weight"].contiguous(memory_format=layout).requires_grad_()
        out, _ = ours_of(
            *split(x["qkv"], K, D, E), x["height_rel"], x["width_rel"], x["prev_logits"], weight, x["bias"], 0.5, 1.0,
            predict=False, scale=0.5, feat_size=size, need_logits=False)
        grads += torch.autograd.grad(out.square().sum(), weight)
        assert grads[-1].stride() == weight.stride()
    assert grads[0].any() and torch.equal(*grads)


def arguments(x, K, D, E, size, predict, save, dropout_p):
    rest = [x[name] for name in ("height_rel", "width_rel", "prev_logits", "weight", "bias")]
    return (*split(x["qkv"], K, D, E), *rest, x.get("gates"), torch.tensor([5], device=DEVICE), 0.5, 1.0, predict,
            D ** -0.5, dropout_p, *size, 0, save)


@kernels
@pytest.mark.parametrize("predict, learns", ((False, True), (True, True), (False, False)))
def test_operator_is_well_formed(predict, learns):
    """Schema, fake tensors, and a traced graph with symbolic sizes, as torch checks them."""
    x = leaves((1, 2), torch.float32, K=4, D=4, E=2, gates=None if predict else "per head")
    x = {name: t.requires_grad_(learns) for name, t in x.items()}
    torch.library.opcheck(
        ours._forward, arguments(x, 4, 4, 2, (1, 2), predict, learns, dropout_p=0.2),
        test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic"))


@kernels
def test_compiles_whole_and_once():
    """torch.compile with fullgraph, forward and backward, and no second compilation for a second batch."""
    size, K, D, E = (2, 3), 4, 4, 2
    torch._dynamo.reset()
    compiled = torch.compile(results_of_layer, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        x = {name: t.requires_grad_() for name, t in leaves(size, torch.float32, K=K, D=D, E=E).items()}
        with torch._dynamo.config.patch(error_on_recompile=True):
            have = compiled(x, size, K, D, E)
        want = results_of_layer(x, size, K, D, E)
        for mine, theirs in zip(torch.autograd.grad(have, list(x.values())),
                                torch.autograd.grad(want, list(x.values())), strict=True):
            assert torch.equal(mine, theirs)


def results_of_layer(x, size, K, D, E):
    q, k, v = split(x["qkv"], K, D, E)
    problem = stated(
        q, k, v, *(x[name] for name in ("height_rel", "width_rel", "prev_logits", "weight", "bias")), scale=0.5,
        feat_size=size)
    if ours.TRITON.reason_against(problem) is not None:
        raise ValueError("this layer must be able to run")
    out, logits = ours.TRITON.forward(problem)
    return out.sin().sum() + logits.cos().sum()


SINGLE = dict.fromkeys("qkv", torch.zeros(1, 4, 6, 4))


@kernels
@pytest.mark.parametrize("reason, tensors", [
    ("kernel size 1, 3 or 5", {"prev_logits": torch.zeros(1, 4, 6, 6), "weight": torch.zeros(4, 4, 7, 7),
                               "bias": torch.zeros(4)}),
    ("float64", {name: x.double() for name, x in SINGLE.items()}), ("one dtype", {"k": SINGLE["k"].half()}),
    ("heads", dict.fromkeys("qkv", torch.zeros(1, 20, 6, 4))), ("wide", {"v": torch.zeros(1, 4, 6, 80)}),
    ("pixels", dict.fromkeys("qkv", torch.zeros(1, 4, 1200, 4)))])
def test_reasons(reason, tensors):
    problem = Problem(**{name: x.to(DEVICE) for name, x in (SINGLE | tensors).items()})
    assert reason in ours.TRITON.reason_against(problem.checked())


def test_reason_on_the_cpu():
    if ours.INTERPRETING:
        pytest.skip("the interpreter runs there")
    assert "NVIDIA GPU is required, got cpu" in ours.TRITON.reason_against(Problem(**SINGLE).checked())
