"""The Triton kernels against the readable torch in float64: on a CUDA device, else in Triton's interpreter.

The interpreter must be chosen before Triton is imported, so this file runs itself again in a separate process.
"""

import importlib.util
from contextlib import nullcontext
from functools import partial
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode

from ea_vision.ops import evolving_attention, use_implementation
from ea_vision.ops import triton_attention as ours
from ea_vision.ops.problem import Problem
from tests.ops.oracle import CASES, TOLERANCE, among, chain, check, problem, random_case, run
from tests.process import python
from tests.refused import refused
from tests.slow import slow_but

if importlib.util.find_spec("triton") is None:
    pytest.skip("needs triton", allow_module_level=True)

DEVICE = "cuda" if torch.cuda.is_available() and not ours.INTERPRETING else "cpu"
HERE = DEVICE == "cuda" or ours.INTERPRETING
kernels = pytest.mark.skipif(not HERE, reason="runs in the process of test_in_interpreter")


FEW = "gradients and last and not prefix"


@pytest.mark.skipif(HERE, reason="the tests themselves run here")
@pytest.mark.parametrize("tests", slow_but([FEW], [FEW, "test"]))
def test_in_interpreter(tests):
    words = "-m pytest --verbose -p no:cacheprovider tests/layers/test_reference.py".split()
    done = python(*words, __file__, "-k", tests, TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-8000:]
    assert "passed" in done.stdout


new = partial(problem, device=DEVICE)
HALF = (
    "EA",
    "PA",
    "first",
    "EA, beta 0.6, wide heads",
    "EA, gates",
    "PA, gates",
    "first, dropout",
    "EA, prefix, 12 heads, gates",
    "PA, 16 heads, kernel 5",
)


@kernels
@pytest.mark.parametrize("case", CASES)
def test_outputs_and_gradients(case):
    too_many = DEVICE == "cuda" and CASES[case].get("K", 0) > 8  # too large for shared memory
    with refused("at most 8 heads") if too_many else nullcontext():
        check("triton", device=DEVICE, **CASES[case])


HALF_TYPES = (torch.bfloat16, torch.float16)
HALF_CASES = [*product([torch.bfloat16], HALF), *product([torch.float16], HALF[:3])]


@kernels
@pytest.mark.parametrize(
    "kind", slow_but(HALF_CASES, product(HALF_TYPES, HALF if DEVICE == "cpu" else CASES))
)
def test_half_precision(kind):
    dtype, case = kind
    # where rounding decides what passes the ReLU, it stays positive
    bias = 6.0 if "12 heads" in case or case in ("EA, alpha 0", "EA, dropout") else 0.0
    check("triton", device=DEVICE, dtype=dtype, bias=bias, **CASES[case])


@kernels
@settings(max_examples=4 if DEVICE == "cpu" else 100, derandomize=True, deadline=None)
@given(st.data())
def test_any_shape(data):
    dtype = among(data, *TOLERANCE)
    on_gpu = DEVICE == "cuda"
    heads = (1, 4, 8) if on_gpu and dtype == torch.float32 else (1, 4, 8, 12)
    case = random_case(data, 10 if on_gpu else 3, heads, (0, 1, 3, 5), 64)
    bias = 6.0 if on_gpu and dtype != torch.float32 else 0.0
    check("triton", dtype=dtype, device=DEVICE, bias=bias, **case)


@kernels
@pytest.mark.parametrize("side", slow_but([7], [7, 14]))
def test_maps_of_the_networks(side, monkeypatch):
    if DEVICE == "cpu":
        pixels = 32 if side == 7 else 64  # the interpreter pays by the tile
        monkeypatch.setattr(ours, "default_tile", lambda *args: ours.Tile(pixels, pixels))
    check("triton", "ea", (side, side), K=8 if side == 7 else 2, D=20, E=3, device=DEVICE)


@kernels
def test_chain():
    """Layers pass their logits on in the layout of the kernel."""
    layers = chain().to(DEVICE)
    x = torch.randn(2, 8, 6, 5, device=DEVICE)

    def gradients(implementation, dtype):
        with use_implementation(implementation):
            y, _ = run(layers.to(dtype), x.to(dtype))
        weights = torch.linspace(-1, 1, y.numel(), device=DEVICE)
        total = (y.flatten().double() * weights).sum()
        return torch.autograd.grad(total, list(layers.parameters()))

    exact = gradients("reference", torch.float64)
    for have, want in zip(gradients("triton", torch.float32), exact, strict=True):
        assert (have.double() - want).norm() <= TOLERANCE[torch.float32] * want.norm()


@kernels
def test_gradient_of_the_weight_lies_as_the_weight():
    """Channels-last weights get channels-last gradients, which DDP's buckets take without a copy."""
    tensors = new("ea", (2, 2), 3, 4, 2)
    options = dict(feat_size=(2, 2), need_logits=False, implementation="triton")
    grads = []
    for layout in (torch.contiguous_format, torch.channels_last):
        weight = tensors["weight"].contiguous(memory_format=layout).requires_grad_()
        tensors["weight"] = weight
        out, _ = evolving_attention(**tensors, **options)
        grads += torch.autograd.grad(out.square().sum(), weight)
        assert grads[-1].stride() == weight.stride()
    assert grads[0].any()
    assert torch.equal(*grads)


@kernels
@pytest.mark.parametrize("kind", ["ea", "pa"])
def test_gradients_may_lie_in_any_way(kind):
    """As they arrive after a cat along any axis, and after a sum."""
    x = {name: t.requires_grad_() for name, t in new(kind, (2, 3), 4, 8, 3).items()}
    options = dict(feat_size=(2, 3), predict=kind == "pa", implementation="triton")
    results = evolving_attention(**x, **options)

    def grads(*gradients):
        return torch.autograd.grad(results, list(x.values()), gradients, retain_graph=True)

    plain = [torch.randn_like(y).contiguous() for y in results]
    expected = grads(*plain)
    for axis in range(4):
        parts = [torch.cat([y.new_ones(y.shape), y], axis).chunk(2, axis)[1] for y in plain]
        torch.testing.assert_close(grads(*parts), expected, atol=0, rtol=0)
    ones = [torch.ones_like(y).contiguous() for y in results]
    expanded = [y.new_ones(()).expand(y.shape) for y in results]
    torch.testing.assert_close(grads(*expanded), grads(*ones), atol=0, rtol=0)


@kernels
@pytest.mark.parametrize("predict, learns", ((False, True), (True, True), (False, False)))
def test_operator_is_well_formed(predict, learns):
    """Schema, fake tensors, and a traced graph with symbolic sizes, as torch checks them."""
    tensors = [t.requires_grad_(learns) for t in new("ea", (1, 2), 4, 4, 2).values()]
    gates = None if predict else torch.rand(2, 4, device=DEVICE, requires_grad=learns)
    seed = torch.tensor([5], device=DEVICE)
    options = ([0.5, 1.0, 0.5, 0.2], [1, 2, 0, int(predict)], learns)
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    arguments = (*tensors, gates, seed, *options)
    operator = torch.ops.ea_vision.triton_attention_forward.default
    torch.library.opcheck(operator, arguments, test_utils=checks)


@kernels
def test_compiles_whole_and_once():
    """torch.compile with fullgraph, forward and backward, and no second compilation for a second batch."""

    def plain(x):
        out, logits = evolving_attention(**x, feat_size=(2, 3), implementation="triton")
        return out.sin().sum() + logits.cos().sum()

    torch._dynamo.reset()
    compiled = torch.compile(plain, fullgraph=True, backend="aot_eager")
    for seed in range(2):
        x = {name: t.requires_grad_() for name, t in new("ea", (2, 3), 4, 4, 2, seed=seed).items()}
        with torch._dynamo.config.patch(error_on_recompile=True):
            have = compiled(x)
        mine = torch.autograd.grad(have, list(x.values()))
        theirs = torch.autograd.grad(plain(x), list(x.values()))
        torch.testing.assert_close(mine, theirs, atol=0, rtol=0)


SINGLE = dict.fromkeys("qkv", torch.zeros(1, 4, 6, 4))
CONVOLVED = {
    "prev_logits": torch.zeros(1, 4, 6, 6),
    "weight": torch.zeros(4, 4, 7, 7),
    "bias": torch.zeros(4),
}


@kernels
@pytest.mark.parametrize(
    "reason, tensors",
    [
        ("kernel size 1, 3 or 5", CONVOLVED),
        ("float64", {name: x.double() for name, x in SINGLE.items()}),
        ("one dtype", {"k": SINGLE["k"].half()}),
        ("heads", dict.fromkeys("qkv", torch.zeros(1, 20, 6, 4))),
        ("wide", {"v": torch.zeros(1, 4, 6, 80)}),
        ("pixels", dict.fromkeys("qkv", torch.zeros(1, 4, 4100, 4))),
    ],
)
def test_reasons(reason, tensors):
    tensors = {**SINGLE, **tensors}
    there = {name: x.to(DEVICE) for name, x in tensors.items()}
    assert reason in ours.Triton().reason_against(Problem(**there).checked())


def test_reason_on_the_cpu():
    if ours.INTERPRETING:
        pytest.skip("the interpreter runs there")
    reason = ours.Triton().reason_against(Problem(**SINGLE).checked())
    assert "NVIDIA GPU is required, got cpu" in reason


@pytest.mark.parametrize(
    "capability, dtype, feat_size, runs",
    [
        ((9, 0), torch.bfloat16, (40, 40), True),
        ((8, 6), torch.bfloat16, (28, 28), True),
        ((9, 0), torch.float32, (28, 28), True),
        ((8, 6), torch.float32, (28, 28), False),
        ((9, 0), torch.bfloat16, (41, 40), False),
    ],
)
def test_a_gpu_that_falls_back_to_the_reference_warns_with_the_memory(
    capability, dtype, feat_size, runs, monkeypatch, log
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(ours, "INTERPRETING", False)
    with FakeTensorMode():
        tensors = problem("ea", feat_size, D=4, E=4, kernel=0, dtype=dtype, device="cuda")
        evolving_attention(**tensors, feat_size=feat_size)
    [record] = [each for each in log.records if "evolving attention" in each.message]
    assert ("by 'triton'" in record.message) == runs
    assert (record.levelname == "WARNING") != runs
    if not runs:
        assert "rows and columns together" in record.message
        assert f"takes {tensors['prev_logits'].nbytes / 1e6:,.0f} MB" in record.message
