"""Every implementation against the float64 reference: outputs and all gradients; which implementation is chosen."""

import os
import resource
import runpy
import shlex
import shutil
import subprocess
from functools import partial
from pathlib import Path

import pytest
import timm
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import forward_ad
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import ea_vision.ops as ops
from ea_vision.layers import AugmentedConv2d, EvolvingAttention
from ea_vision.ops import (
    cpu,
    cpu_library,
    evolving_attention,
    halve,
    normalise_heads,
    use_implementation,
)
from ea_vision.ops.problem import Problem
from tests.engine import runner
from tests.layers.oracle import assert_same
from tests.ops.oracle import (
    CASES,
    assert_as_reference,
    chain,
    check,
    kept_entries,
    outputs_and_gradients,
    problem,
    random_case,
    random_form,
    run,
)
from tests.process import python
from tests.refused import refused

AA_PROBLEM = problem("aa", (3, 4), B=2)
EA_PROBLEM = problem("ea", (3, 4), B=2)
attend = partial(evolving_attention, feat_size=(3, 4))
HALF = dict(size=(7, 6), D=20, E=3, dtype=torch.bfloat16)
POSITIVE = dict(HALF, bias=6.0)  # near zero, rounding would decide what passes the ReLU
BLOCKS = dict(D=8)
PAIR = dict(BLOCKS, K=2, channels_last=False)
FURTHER = [  # half precision, and maps that need many blocks of the C kernel
    dict(HALF, kind="aa"),
    dict(POSITIVE, kind="ea", gates="one", dropout_p=0.6),
    dict(POSITIVE, kind="pa", gates="heads"),
    dict(BLOCKS, kind="ea", size=(14, 14), E=2),
    dict(BLOCKS, kind="ea", size=(1, 197), K=3, E=64, gates="one"),
    dict(PAIR, kind="ea", size=(21, 20), E=3),
    dict(PAIR, kind="pa", size=(21, 20), E=6),
    dict(PAIR, kind="ea", size=(3, 140), E=3, kernel=5, gates="heads"),
    dict(BLOCKS, kind="ea", size=(7, 6), K=4, E=64, kernel=5, gates="heads"),
]


@pytest.mark.parametrize("case", [*CASES.values(), *FURTHER], ids=str)
def test_cpu_kernel(case):
    """The C kernel equals the reference, with and without returned logits."""
    for need_logits in (True,) if "uses" in case else (True, False):
        check("cpu", **case | {"need_logits": need_logits})


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_windows_in_half_precision(dtype):
    options = dict(window=3, head_window=3, need_logits=False)
    check("reference", "aa", (6, 6), K=4, D=8, E=8, B=2, dtype=dtype, **options)


@pytest.mark.parametrize("number", ["alpha", "beta"])
def test_a_number_beside_a_gate_that_learns(number):
    tensors = problem("ea", (4, 5), gates="one")
    del tensors[number]
    assert_as_reference(tensors, feat_size=(4, 5), **{number: 1.0})


def test_dropout_drops_what_it_says_and_by_the_generator():
    q = torch.zeros(2, 4, 50, 4)
    v = torch.eye(50).expand(2, 4, 50, 50)
    generator = torch.Generator().manual_seed(3)
    seed = torch.randint(2**62, (1,), generator=generator).item()

    def attention(p):
        """The kernel's probabilities, which are uniform without dropout."""
        return evolving_attention(q, q, v, implementation="cpu", dropout_p=p, need_logits=False)[0]

    for p in (0.0, 0.25, 1.0):
        torch.manual_seed(3)
        attn = attention(p)
        torch.manual_seed(3)
        assert torch.equal(attention(p), attn)
        kept = kept_entries(seed, 2, 4, 50, p)
        expected = kept / (50 * (1 - p)) if p < 1 else torch.zeros_like(attn)
        assert_close(attn, expected)
        assert torch.equal(attention(p), attn) == (p != 0.25)  # the generator has moved on


def test_dropout_is_independent_between_entries_heads_images_and_draws():
    """No two of these are correlated by more than four standard errors."""
    p = 0.3
    variance = p * (1 - p)
    above = torch.ones(100, 100).triu(1).bool()

    def entries(seed):
        return kept_entries(seed, 2, 8, 100, p).double() - (1 - p)

    x = entries(0)
    others = [entries(seed) for seed in (1, 1 << 32, (1 << 32) + 1, -1)]
    pairs = [(x, other) for other in (*others, torch.ones_like(x), x.roll(1, 0), x.roll(1, 1))]
    pairs += [(x[..., above], x.mT[..., above]), (x[:, :, 1:], others[0][:, :, :-1])]
    for n in (1, 2, 16, 49):
        for shifts in ((0, n), (n, 0), (n, n), (n, -n)):
            pairs.append((x, x.roll(shifts, (2, 3))))
    for a, b in pairs:
        covariance = (a * b).sum() / a.numel() ** 0.5
        assert abs(covariance / variance) < 4
    chi_square = x.sum(-1).square() / (100 * variance)  # chi-square, mean 1
    assert abs(chi_square.mean() - 1) < 4 * (2 / chi_square.numel()) ** 0.5


@settings(max_examples=60, derandomize=True, deadline=None, database=None)
@given(st.data())
def test_cpu_kernel_on_random_shapes_and_forms(data):
    case = random_case(data, 9, range(1, 11), (1, 3, 5, 7), 40)
    check("cpu", scale=0.3, **{**case, **random_form(data, case, 3, (5, 3), (3, 21))})


@pytest.mark.parametrize("relative", [True, False])
@pytest.mark.parametrize("size,K,D,E", [((5, 7), 8, 20, 3), ((1, 5), 3, 4, 6), ((7, 6), 4, 64, 64)])
def test_folded_position_is_the_reference(size, K, D, E, relative):
    check("sdpa", "aa", size, K=K, D=D, E=E, B=2, relative=relative, need_logits=False)


def some_images(tensors, count):
    """Return the problem with only its first `count` images."""
    per_image = ("q", "k", "v", "prev_logits")
    return {name: x[:count] if name in per_image else x for name, x in tensors.items()}


@pytest.mark.parametrize(
    "gates,dropout_p,prefix", [(None, 0.0, 0), (None, 0.2, 0), ("one", 0.0, 3)]
)
def test_cpu_kernel_gives_the_same_bits_however_the_work_is_cut(
    gates, dropout_p, prefix, monkeypatch
):
    tensors = problem("ea", (9, 7), D=20, E=3, B=3, gates=gates, channels_last=dropout_p > 0)
    options = dict(
        implementation="cpu", feat_size=(9, 7), dropout_p=dropout_p, num_prefix_tokens=prefix
    )
    monkeypatch.setattr(torch, "randint", lambda *args, **_: torch.tensor([123456789123456789]))

    threads = torch.get_num_threads()
    results = []
    try:
        for count in (threads, 1, 2, 5):
            torch.set_num_threads(count)
            results.append(outputs_and_gradients(tensors, **options))
    finally:
        torch.set_num_threads(threads)
    for result in results:
        assert_close(result, results[0], atol=0, rtol=0)
    out = results[0]["out"]
    of_first, _ = evolving_attention(**some_images(tensors, 1), **options)
    assert torch.equal(of_first, out[:1])
    without, no_logits = evolving_attention(**tensors, **options, need_logits=False)
    assert torch.equal(without, out)
    assert no_logits is None


@pytest.mark.parametrize("dim_v", [3, 6, 8])
def test_cpu_kernel_takes_rows_of_logits_far_from_zero(dim_v):
    tensors = problem("ea", (4, 5), E=dim_v, kernel=0)
    shift = torch.tensor([0.0, -20.0, 30.0, -45.0, 60.0, 85.0, -85.0, 1000.0, -1000.0, 0.0])
    tensors["prev_logits"] += shift.repeat(2)[:, None]  # a row is a query
    assert_as_reference(tensors, alpha=1.0, feat_size=(4, 5), need_logits=False)
    tensors["prev_logits"][..., 7] = -torch.inf
    out = evolving_attention(**tensors, alpha=1.0, feat_size=(4, 5), implementation="cpu")[0]
    assert_close(out, tensors["prev_logits"].softmax(-1) @ tensors["v"], atol=1e-5, rtol=1e-5)


def test_cpu_kernel_makes_no_subnormal_number_and_hides_no_nan():
    tensors = problem("aa", (5, 5), D=8, E=4, B=2, relative=False)
    tensors["q"] = tensors["q"] * 60  # rows so peaked that exp would underflow
    results = outputs_and_gradients(tensors, implementation="cpu", feat_size=(5, 5))
    tiny = torch.finfo(torch.float32).tiny
    for name in ("out", "q", "k", "v"):
        size = results[name].abs()
        subnormal = (size > 0) & (size < tiny)
        assert not subnormal.any(), name
    assert_as_reference(tensors, feat_size=(5, 5))
    tensors["k"][0, 0, 3] = torch.nan
    out, logits = evolving_attention(**tensors, implementation="cpu", feat_size=(5, 5))
    assert out[0, 0].isnan().all()
    assert logits[0, 0, :, 3].isnan().all()
    assert not out[1].isnan().any()
    tensors = problem("ea", (5, 5), B=2)
    tensors["prev_logits"][1, 0, 4, 4] = torch.inf
    out, _ = evolving_attention(**tensors, implementation="cpu", feat_size=(5, 5))
    assert not out[1].isfinite().all()


def test_pytorch_accepts_the_custom_operators():
    opcheck = torch.library.opcheck
    ours = torch.ops.ea_vision
    tensors = [tensor.requires_grad_() for tensor in problem("ea", (3, 4), 4, 4, 2, B=2).values()]
    form = [cpu.MIX, 0, 3, 4, 0, 0]
    tests = ["test_schema", "test_faketensor"]
    fixed = (*tensors, torch.rand(2, 4), None, 0.3, 0.0, form, True)
    opcheck(ours.cpu_attention.default, fixed, test_utils=tests)
    gates = torch.rand(2, 4, requires_grad=True)
    learned = (*tensors, gates, torch.tensor([5]), 0.3, 0.2, form, True)
    tests.append("test_aot_dispatch_dynamic")
    opcheck(ours.cpu_attention.default, learned, test_utils=tests)
    opcheck(ours.cpu_pool.default, (torch.randn(2, 3, 6, 4, requires_grad=True),))


@pytest.mark.parametrize("size", [(5, 7), (8, 6), (1, 1), (2, 9)])
def test_halving_is_average_pooling(size):
    x = torch.randn(2, 3, *size, requires_grad=True)
    plain = F.avg_pool2d(x, 3, stride=2, padding=1, count_include_pad=False)
    halved = halve(x)
    assert_same(halved, plain, [x])
    assert halved.grad_fn.name() != plain.grad_fn.name()


# ---- the compiled library


@pytest.fixture
def use_compiler(monkeypatch, tmp_path):
    """A function that makes this test compile the kernel anew with the given compiler."""

    def use(compiler):
        monkeypatch.setenv("CC", compiler)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        cpu_library.load.cache_clear()

    yield use
    monkeypatch.undo()
    cpu_library.load.cache_clear()
    assert reason_against() is None


def compiler(folder, commands, name="cc"):
    """Write a shell script that acts as a compiler; return its path."""
    path = folder / name
    path.write_text(f"#!/bin/sh\ncd {folder}\n{commands}\n")
    path.chmod(0o755)
    return str(path)


def compiler_with(folder, *flags):
    """Write a compiler script that adds flags to its arguments; return its path."""
    cc = os.environ.get("CC") or "cc"
    return compiler(folder, f'exec {cc} "$@" {shlex.join(flags)}', f"cc{flags[-1]}")


def reason_against():
    """Return the reason why the C kernel cannot run a 3x4 problem; None if it can."""
    return cpu.Cpu().reason_against(Problem(**EA_PROBLEM, feat_size=(3, 4)).checked())


def load_library(_):
    print(cpu_library.load())
    return 0


def test_a_damaged_library_is_built_again(use_compiler, tmp_path):
    """Two processes find a truncated library, which would crash them if loaded, and both rebuild it."""
    use_compiler(compiler_with(tmp_path, "-O0"))
    assert reason_against() is None
    (library,) = (tmp_path / "cache").rglob("cpu_kernel-*.so")
    whole = library.read_bytes()
    library.unlink()  # this process has it loaded
    shutil.copy(Path(torch.__file__).parent / "lib" / "libc10.so", library)
    cpu_library.load.cache_clear()
    assert reason_against() is None
    assert library.read_bytes() == whole
    library.unlink()
    library.write_bytes(whole[: len(whole) // 2])
    log = tmp_path / "log"
    assert runner.run_world(2, [], log, main=load_library) == [0, 0]
    assert log.read_text().count(str(library)) == 2
    assert library.read_bytes() == whole
    assert list(library.parent.iterdir()) == [library]


BROKEN = {  # compilers by name: commands of a shell, if any, and what the log says
    "cc 'x": ("", "No closing quotation"),
    "no-such-compiler": ("", "no C compiler: no-such-compiler was not found"),
    "strange": ("printf '\\377\\376' >&2; exit 3", "ended with code 3: \N{REPLACEMENT CHARACTER}"),
    "links-another": (
        'case "$*" in *-shared*) echo > e.c; cc -shared -o "$4" e.c;; *) cc "$@" -O0; esac',
        "undefined symbol: evolving_attention",
    ),
    "writes-text": (
        'case "$*" in *-shared*) echo text > "$4";; *) cc "$@" -O0;; esac',
        "file too short",
    ),
    "cl": ("exit 2", "gcc or clang is required, got CC=/"),  # Microsoft's
}


@pytest.mark.parametrize("cc", BROKEN)
def test_whatever_goes_wrong_with_the_library_the_reference_runs_and_the_log_says_why(
    use_compiler, tmp_path, log, cc
):
    commands, reason = BROKEN[cc]
    use_compiler(compiler(tmp_path, commands, cc) if commands else cc)
    out = attend(**EA_PROBLEM)
    assert "by 'reference'; not cpu: " in log.messages[-1]
    assert reason in log.messages[-1]
    expected = attend(**EA_PROBLEM, implementation="reference")
    assert torch.equal(out[0], expected[0])


def test_clang_builds_a_kernel_of_one_thread(use_compiler, tmp_path, caplog):
    """Apple's clang refuses OpenMP; other clangs link another OpenMP library than torch's."""
    version = 'if [ "$1" = --version ]; then echo Apple clang version 17; exit; fi'
    refuses = 'case "$*" in *-fopenmp*|*gomp*) echo unsupported >&2; exit 1;; esac'
    use_compiler(compiler(tmp_path, f'{version}\n{refuses}\nexec cc -O1 "$@"'))
    assert reason_against() is None
    assert "one thread" in caplog.text
    for gates in (None, "one"):
        check("cpu", "ea", (3, 4), B=3, gates=gates)


@pytest.mark.parametrize("flag", ["-mno-avx512f", "-mno-avx"])
def test_narrower_vectors(use_compiler, tmp_path, flag):
    use_compiler(compiler_with(tmp_path, "-O1", flag))
    if isinstance(cpu_library.load(), str):
        pytest.skip(cpu_library.load())
    for case in CASES.values():
        check("cpu", **case)


def test_the_library_is_another_after_any_change(monkeypatch, tmp_path):
    changed = shutil.copytree(cpu_library.SOURCES, tmp_path / "changed")
    names = [cpu_library.library_name(compiler) for compiler in (["cc"], ["cc", "-m64"])]
    monkeypatch.setattr(cpu_library, "SOURCES", changed)
    assert cpu_library.library_name(["cc"]) == names[0]
    for file in changed.iterdir():
        file.write_text(file.read_text() + "\n")
        names.append(cpu_library.library_name(["cc"]))
    assert len(set(names)) == len(names) > 10


@pytest.mark.parametrize("home", ["a file", "none"])
def test_without_a_writable_cache_each_process_builds_the_library(
    use_compiler, tmp_path, monkeypatch, caplog, home
):
    use_compiler(compiler_with(tmp_path, "-O0"))
    if home == "none":
        monkeypatch.delenv("XDG_CACHE_HOME")

        def nowhere():
            raise RuntimeError("Could not determine home directory.")

        monkeypatch.setattr(Path, "home", nowhere)
    else:
        (tmp_path / "cache").write_text("")
    assert reason_against() is None
    assert caplog.messages[0].startswith("the C kernel is built for this process alone: ")
    assert_as_reference(EA_PROBLEM, feat_size=(3, 4))


def without_memory(_):
    """Request more memory than there is, then less."""
    x = torch.zeros(1, 64, 16, 4000).transpose(2, 3)
    torch.set_num_threads(2)
    few = torch.zeros(1, 64, 50, 16, requires_grad=True)
    evolving_attention(few, few, few)  # the library is loaded, and its threads run
    pages = Path("/proc/self/statm").read_text().split()[0]
    used = int(pages) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**26, resource.RLIM_INFINITY))
    start = "the C kernel cannot allocate memory: a thread of"
    message = rf"{start} evolving_attention needs \d+ bytes \(.* MiB\)"
    with pytest.raises(RuntimeError, match=message):
        evolving_attention(x, x, x, need_logits=False)
    out, _ = evolving_attention(few, few, few, need_logits=False)
    out.sum().backward()
    return 0 if few.grad.isfinite().all() else 1


def test_a_failed_allocation_says_how_much_was_needed(tmp_path):
    log = tmp_path / "log"
    assert runner.run_world(1, [], log, main=without_memory) == [0], log.read_text()


@pytest.mark.slow
def test_memory_errors_and_undefined_behaviour(tmp_path):
    """The kernel runs under the address and undefined-behaviour sanitizers, with the widest and narrowest vectors."""
    sanitize = ("-O0", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
    plain = compiler_with(tmp_path, *sanitize)
    (tmp_path / "main.c").write_text("int main(void) { return 0; }")
    trial = subprocess.run(
        f"{plain} main.c -o main && ./main && {plain} -print-file-name=libasan.so",
        shell=True,
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    runtime = Path(trial.stdout.strip()).resolve()
    if trial.returncode or not runtime.is_file() or not runtime.is_absolute():
        pytest.skip(f"the compiler has no shared sanitizer runtime: {trial.stdout} {trial.stderr}")
    compilers = [plain, compiler_with(tmp_path, *sanitize, "-mno-avx")]
    done = python(
        "-m",
        "tests.ops.sanitized",
        *compilers,
        LD_PRELOAD=str(runtime),
        XDG_CACHE_HOME=str(tmp_path),
        # the check of use after return may misalign vectors on the stack (GCC 13; its bug 110027)
        ASAN_OPTIONS="detect_leaks=0:detect_stack_use_after_return=0",
        UBSAN_OPTIONS="print_stacktrace=1",
    )
    assert done.stdout.splitlines() == ["clean"] * len(compilers), done.stderr[-4000:]
    # the process ends with a deliberate read beyond the end, which proves that the sanitizer works
    assert done.returncode
    assert "heap-buffer-overflow" in done.stderr
    assert "in pool_forward" in done.stderr


# ---- the choice


def test_implementation_can_be_forced_by_argument_by_context_and_by_environment(monkeypatch):
    tensors = {name: tensor.clone().requires_grad_() for name, tensor in AA_PROBLEM.items()}

    def made_by(**options):
        out, _ = attend(**tensors, **options)
        return type(out.grad_fn.next_functions[0][0]).__name__

    fast = made_by()
    slow = made_by(implementation="reference")
    assert "cpu_attention" in fast
    assert "cpu_attention" not in slow
    with use_implementation("reference"):
        assert made_by() == slow
        assert made_by(implementation="cpu") == fast
        with use_implementation("cpu"):
            assert made_by() == fast
    assert made_by() == fast
    monkeypatch.delenv("EA_VISION_IMPLEMENTATION", raising=False)
    assert runpy.run_path(ops.__file__)["forced"] == []
    monkeypatch.setenv("EA_VISION_IMPLEMENTATION", "reference")
    assert runpy.run_path(ops.__file__)["forced"] == ["reference"]


FEW_KEYS = dict(AA_PROBLEM, k=AA_PROBLEM["k"][:, :, :4], v=AA_PROBLEM["v"][:, :, :4])
QKV = {name: AA_PROBLEM[name] for name in "qkv"}
NO_TABLES = {name: FEW_KEYS[name] for name in "qkv"}
LOCAL = {"window": 3, "need_logits": False}
WRONG_SHAPES = [
    ("prev_logits", EA_PROBLEM["prev_logits"][:1]),
    ("weight", EA_PROBLEM["weight"][:, :7]),
    ("weight", EA_PROBLEM["weight"][..., :2]),
    ("bias", None),
    ("bias", EA_PROBLEM["bias"][:7]),
    ("height_rel", EA_PROBLEM["height_rel"][:, :3]),
]


@pytest.mark.parametrize(
    "tensors, options, message",
    [
        (
            EA_PROBLEM,
            {"implementation": "sdpa"},
            "'sdpa' cannot run this: it has no place for previous logits",
        ),
        (
            {name: x.double() for name, x in EA_PROBLEM.items()},
            {"implementation": "cpu"},
            "'cpu' cannot run this: it needs float32 or bfloat16, got torch.float64",
        ),
        (
            {**EA_PROBLEM, "q": EA_PROBLEM["q"].bfloat16()},
            {"implementation": "cpu"},
            "'cpu' cannot run this: it needs q, k and v of one dtype, got torch.bfloat16, torch.float32",
        ),
        (
            NO_TABLES,
            {"implementation": "cpu"},
            "'cpu' cannot run this: it needs as many keys as queries, got 4 and 12",
        ),
        (QKV, {"implementation": "sdpa"}, "'sdpa' cannot run this: it does not return logits"),
        (QKV, {"implementation": "sdpa", **LOCAL}, "'sdpa' cannot run this: it has no windows"),
        (
            QKV,
            {"implementation": "cpu", "head_window": 3, **LOCAL},
            "'cpu' cannot run this: it has no windows of heads",
        ),
        (
            {**QKV, "prev_logits": EA_PROBLEM["prev_logits"]},
            {"head_window": 3, **LOCAL},
            "head_window must be 1 where maps evolve",
        ),
        (FEW_KEYS, {}, "need as many keys as queries .* got 4 keys and 12 queries"),
        (
            NO_TABLES,
            {"prev_logits": EA_PROBLEM["prev_logits"]},
            r"prev_logits of shape \[2, 8, 12, 4\] required, got \[2, 8, 12, 12\]",
        ),
        ({**EA_PROBLEM, "beta": torch.ones(3)}, {}, r"1 or num_heads=8 numbers, got shape \[3\]"),
        (EA_PROBLEM, {"dropout_p": 1.5}, "dropout_p must be a probability, from 0 to 1, got 1.5"),
        (EA_PROBLEM, {"num_prefix_tokens": 13}, "num_prefix_tokens must be 0 to N=12 .* got 13"),
        (EA_PROBLEM, {"num_prefix_tokens": -1}, "num_prefix_tokens must be 0 to N=12 .* got -1"),
        (EA_PROBLEM, {"feat_size": (3, 5)}, r"N = 3\*5 required, got \[2, 8, 12, 4\]"),
        *[
            (
                {**EA_PROBLEM, name: wrong},
                {"implementation": "cpu"},
                f"{name} of shape .* required, got",
            )
            for name, wrong in WRONG_SHAPES
        ],
    ],
)
def test_invalid_arguments_are_refused(tensors, options, message):
    with refused(message, ValueError):
        attend(**tensors, **options)


def test_an_unknown_implementation_is_named():
    with refused("must be one of .* got 'quick'", ValueError):
        use_implementation("quick").__enter__()


@pytest.mark.parametrize(
    "kind, need_logits, name",
    [("aa", False, "sdpa"), ("aa", True, "reference"), ("ea", False, "reference")],
)
def test_devices_without_kernels_take_torchs_fused_attention_where_it_suffices(
    kind, need_logits, name, log
):
    """Uses the meta device; the CPU tests check that `sdpa` equals the reference."""
    tensors = problem(kind, (3, 4), device="meta")
    out, logits = attend(**tensors, need_logits=need_logits)
    assert f"evolving attention on meta in torch.float32 by {name!r}" in log.messages[-1]
    assert out.shape == tensors["v"].shape
    assert (logits is not None) == need_logits


def test_the_reason_is_logged_once(log):
    for each in (AA_PROBLEM, AA_PROBLEM, {n: t.double() for n, t in AA_PROBLEM.items()}):
        attend(**each)
    assert log.messages == [
        "evolving attention on cpu in torch.float32 by 'cpu'",
        "evolving attention on cpu in torch.float64 by 'reference'; not cpu: it needs float32 or bfloat16, got "
        "torch.float64",
    ]


def test_maps_of_more_than_2500_pixels_are_logged_once(log):
    sizes = dict(dim_qk=2, dim_v=2, num_heads=2, feat_size=(50, 50))
    layer = AugmentedConv2d(4, 4, **sizes, evolution=EvolvingAttention(2))
    assert not log.messages
    layer.set_feat_size((52, 50))
    x = torch.zeros(1, 2, 2600, 1)
    prev = torch.zeros(1, 2, 2600, 2600)
    evolving_attention(x, x, x, prev_logits=prev, feat_size=(52, 50), need_logits=False)
    (line,) = [message for message in log.messages if "map of" in message]
    start = "a map of 52 x 50 takes 54 MB per image and layer in float32; map_reduction=32"
    assert line.startswith(start)


def test_no_images_and_convolutions_without_a_use():
    tensors = dict(EA_PROBLEM)
    results = outputs_and_gradients(some_images(tensors, 0), feat_size=(3, 4))
    assert results["out"].shape == (0, 8, 12, 1)
    assert not results["weight"].any()
    # attention that does not evolve has no use for a convolution
    del tensors["prev_logits"]
    computed = assert_as_reference(tensors, feat_size=(3, 4))
    assert not computed["weight"].any()
    assert computed["q"].any()


EA = problem("ea", (3, 4), 2, 12, B=2)
del EA["q"], EA["k"], EA["v"]
TABLES = {"height_rel": EA["height_rel"], "width_rel": EA["width_rel"]}


def attention(x, tensors):
    """Attend with tensors of the input's type."""
    alike = {name: value.to(x.dtype) for name, value in tensors.items()}
    return evolving_attention(x, x, x, **alike, feat_size=(3, 4))[0]


KERNELS = {
    "attention": lambda x: attention(x, EA),
    "first": lambda x: attention(x, TABLES),
    "pooling": halve,
}
GAIN = torch.tensor([0.5])
OPERATORS = {**KERNELS, "norm": lambda x: torch.cat(normalise_heads(x, GAIN))}


@pytest.mark.parametrize("name", KERNELS)
def test_second_derivatives_are_refused_and_the_reference_has_them(name):
    check_refusal(KERNELS[name], torch.randn(2, 2, 12, 12))


def test_second_derivatives_through_torchs_fused_attention_are_refused_likewise():
    layer = AugmentedConv2d(2, 4, dim_qk=8, dim_v=2, num_heads=1, feat_size=(3, 4))
    model = timm.create_model("vit_mini_patch4_32", depth=2, value_residual=True)
    with use_implementation("sdpa"):
        check_refusal(lambda x: layer(x, need_logits=False)[0], torch.randn(2, 2, 3, 4))
    check_refusal(model, torch.randn(2, 3, 32, 32))


def check_refusal(function, x):
    """Check that the second derivative is refused in one line that names the reference, which has it."""
    x.requires_grad_()

    def second():
        (first,) = torch.autograd.grad(function(x).square().sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), x)[0]

    with pytest.raises(
        RuntimeError, match=r"not supported by .*use_implementation\('reference'\)$"
    ):
        second()
    with use_implementation("reference"):
        assert second().any()


@pytest.mark.parametrize("name", OPERATORS)
def test_forward_derivatives_and_transforms_are_the_references(name):
    operator = OPERATORS[name]
    x = torch.randn(2, 2, 12, 12)
    tangent = torch.randn(2, 2, 12, 12)

    def loss(x):
        return operator(x).square().sum()

    def forward(x):
        return torch.func.jvp(operator, (x,), (tangent,))[1]

    def dual():
        with forward_ad.dual_level():
            result = operator(forward_ad.make_dual(x, tangent))
            return forward_ad.unpack_dual(result).tangent

    def all_of_them():
        both = torch.stack([x, tangent])
        return [
            forward(x),
            dual(),
            torch.compile(forward, backend="eager")(x),
            torch.func.grad(loss)(x),
            torch.func.jacfwd(loss)(x),
            torch.vmap(operator)(both),
            torch.vmap(torch.func.grad(loss))(both),
        ]

    results = all_of_them()
    with use_implementation("reference"):
        assert_close(results, all_of_them())
        step = 1e-5 * tangent.double()
        near = (operator(x + step) - operator(x - step)) / 2e-5
    assert_close(results[0].double(), near, atol=1e-3, rtol=1e-3)
    if name == "attention":
        refused = pytest.raises(ValueError, match="'cpu' cannot run this: forward-mode deriv")
        with use_implementation("cpu"), refused:
            forward(x)


def test_fewer_keys_than_queries():
    """Keys and values that the network has pooled; tests/layers has maps (B, K, N, M) that evolve."""
    q = torch.randn(2, 3, 6, 4, dtype=torch.float64)
    k, v = torch.randn(2, 2, 3, 4, 4, dtype=torch.float64)
    out, _ = evolving_attention(q, k, v, need_logits=False, implementation="sdpa")
    attn = (q @ k.mT / 2).softmax(-1)
    assert_close(out, attn @ v)


# ---- the layer


@pytest.mark.parametrize("learnable,dropout_p", [(False, 0.0), ("per_head", 0.1)])
def test_training_keeps_one_map_a_layer_and_none_of_the_last(learnable, dropout_p):
    layers = chain(dropout_p, learnable=learnable)
    kept = set()

    def pack(tensor):
        if tensor.shape == (2, 4, 30, 30):
            kept.add(tensor.data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        _, logits = run(layers, torch.randn(2, 8, 6, 5))
    assert logits is None
    assert len(kept) == 2


def test_hooks_see_the_maps():
    layers = chain()
    x = torch.randn(2, 8, 6, 5)
    seen = []
    fast, _ = run(layers, x)
    with use_implementation("reference"):
        slow, _ = run(layers, x)
    assert_close(fast, slow)
    assert not torch.equal(fast, slow)  # two implementations ran
    handle = layers[0].attn_drop.register_forward_hook(lambda _, args, output: seen.append(output))
    assert_close(run(layers, x)[0], fast)
    handle.remove()
    assert torch.equal(run(layers, x)[0], fast)
    assert [maps.shape for maps in seen] == [(2, 4, 30, 30)]


@pytest.mark.parametrize("learnable,dropout_p", [(False, 0.0), (True, 0.2)])
def test_compiles_whole_and_once(learnable, dropout_p):
    layers = chain(dropout_p, learnable=learnable)
    x = torch.randn(2, 8, 6, 5)
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph

    def results(function, x):
        torch.manual_seed(1)
        y, _ = function(layers, x)
        return y, torch.autograd.grad(y.square().sum(), list(layers.parameters()))

    compiled = torch.compile(run, fullgraph=True, backend=backend)
    for batch in (x, x + 1, x * 2):
        assert_close(results(compiled, batch), results(run, batch), atol=1e-4, rtol=1e-5)
    (graph,) = graphs
    assert graph.code.count("ea_vision.cpu_attention") == 3


def test_recomputation_for_backward_uses_the_same_dropout():
    layers = chain(0.3, learnable=True)
    x = torch.randn(2, 8, 6, 5)

    def gradients(seed, again):
        torch.manual_seed(seed)
        y = x
        logits = None
        for layer in layers:
            if again:
                y, logits = checkpoint(layer, y, logits, use_reentrant=False)
            else:
                y, logits = layer(y, logits)
        return torch.autograd.grad(y.square().sum(), layers[0].qkv.weight)[0]

    assert torch.equal(gradients(1, False), gradients(1, True))
    assert not torch.equal(gradients(1, False), gradients(2, False))
