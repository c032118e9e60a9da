"""Every implementation against the reference in float64, outputs and all gradients; and the choice between them."""

import logging
import os
import resource
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.autograd import forward_ad
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import ea_vision.ops as ops
from ea_vision.layers import AugmentedConv2d, EvolvingAttention
from ea_vision.ops import cpu, cpu_library, evolving_attention, halve, use_implementation
from ea_vision.ops.problem import Problem
from tests.engine import runner
from tests.ops.oracle import (
    CASES,
    assert_as_reference,
    check,
    kept_entries,
    outputs_and_gradients,
    problem,
    random_case,
    same_bits,
)

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")),
]
HALF = dict(
    size=(7, 6), D=20, E=3, dtype=torch.bfloat16
)  # near zero, rounding would decide what passes the ReLU
FURTHER = [  # what the C kernel has beside `CASES`, and maps of many of its blocks
    dict(HALF, kind="aa"),
    *(
        dict(HALF, kind=kind, bias=6.0, gates=gates, dropout_p=p)
        for kind, gates, p in (
            ("ea", None, 0.0),
            ("ea", "one", 0.6),
            ("pa", None, 0.0),
            ("pa", "heads", 0.0),
        )
    ),
    *(
        dict(
            kind=kind,
            size=(7, 5),
            K=4,
            E=20,
            window=window,
            gates=gates,
            channels_last=kind == "aa",
        )
        for kind, window, gates in (
            ("aa", 3, None),
            ("aa", (1, 5), None),
            ("ea", 3, None),
            ("ea", (5, 3), "heads"),
            ("pa", (3, 21), None),
        )
    ),
    *(
        dict(kind=kind, size=(4, 5), gates=gates)
        for kind, gates in (("ea", (0.0, 1.0)), ("ea", (1.0, 0.0)), ("pa", (0.0,)), ("pa", (1.0,)))
    ),
    *(
        dict(
            kind=kind,
            size=(1, 38),
            B=2,
            K=3,
            D=8,
            E=6,
            prefix=prefix,
            kernel=kernel,
            gates=gates,
            beta=0.6,
        )
        for kind, prefix, kernel, gates in (
            ("ea", 2, 3, "one"),
            ("ea", 5, 5, None),
            ("pa", 5, 1, None),
        )
    ),
    *(
        dict(kind=kind, size=size, K=K, D=8, E=E, kernel=kernel, gates=gates, channels_last=K > 2)
        for kind, size, K, E, kernel, gates in (
            ("ea", (14, 14), 8, 2, 3, None),
            ("ea", (1, 197), 3, 64, 3, "one"),
            ("ea", (21, 20), 2, 3, 3, None),
            ("pa", (21, 20), 2, 6, 3, None),
            ("ea", (3, 140), 2, 3, 5, "heads"),
            ("ea", (7, 6), 4, 64, 5, "heads"),
            ("pa", (1, 2), 3, 5, 3, "one"),
            ("pa", (7, 6), 4, 64, 1, None),
        )
    ),
    dict(kind="ea", size=(1, 2), prefix=2),
    dict(kind="aa", size=(4, 4), B=2, K=2, E=16, dropout_p=0.6),
    dict(kind="pa", size=(7, 6), B=2, E=8, D=20, gates="one", dropout_p=0.1),
]


@pytest.mark.parametrize("case", [*CASES.values(), *FURTHER], ids=str)
def test_cpu_kernel(case):
    """The C kernel is the reference, whether logits are wanted or not."""
    for need_logits in (True,) if "uses" in case else (True, False):
        check("cpu", **case | {"need_logits": need_logits})


def test_a_number_beside_a_gate_that_learns():
    tensors = problem("ea", (4, 5), gates="one")
    for other in ("alpha", "beta"):
        assert_as_reference(
            {n: t for n, t in tensors.items() if n != other}, feat_size=(4, 5), **{other: 1.0}
        )
    with pytest.raises(ValueError, match=r"1 or num_heads=8 numbers, got shape \[3\]"):
        evolving_attention(
            **tensors | {"beta": torch.ones(3)}, feat_size=(4, 5), implementation="cpu"
        )


def test_dropout_drops_what_it_says_and_by_the_generator():
    def attention(p):
        """The kernel's probabilities, which are uniform without dropout."""
        q, v = torch.zeros(2, 4, 50, 4), torch.eye(50).expand(2, 4, 50, 50)
        return evolving_attention(q, q, v, implementation="cpu", dropout_p=p, need_logits=False)[0]

    for p in (0.0, 0.25, 1.0):
        torch.manual_seed(3)
        attn = attention(p)
        torch.manual_seed(3)
        assert torch.equal(attention(p), attn)
        kept = kept_entries(
            int(torch.randint(2**62, (1,), generator=torch.Generator().manual_seed(3))), 2, 4, 50, p
        )
        assert_close(attn, kept / (50 * (1 - p)) if p < 1 else torch.zeros_like(attn))
        assert torch.equal(attention(p), attn) == (p != 0.25)  # the generator has moved on


def test_dropout_is_independent_between_entries_heads_images_and_draws():
    """No two of these are correlated by more than four standard errors."""
    p, above = 0.3, torch.ones(100, 100).triu(1).bool()
    x, *others = (
        kept_entries(seed, 2, 8, 100, p).double() - (1 - p)
        for seed in (0, 1, 1 << 32, (1 << 32) + 1, -1)
    )
    pairs = [(x, other) for other in (*others, torch.ones_like(x), x.roll(1, 0), x.roll(1, 1))]
    pairs += [(x[..., above], x.mT[..., above]), (x[:, :, 1:], others[0][:, :, :-1])]
    pairs += [
        (x, x.roll(shifts, (2, 3)))
        for n in (1, 2, 16, 49)
        for shifts in ((0, n), (n, 0), (n, n), (n, -n))
    ]
    for a, b in pairs:
        assert abs(float((a * b).sum() / (p * (1 - p)) / a.numel() ** 0.5)) < 4
    rows = x.sum(-1).square() / (100 * p * (1 - p))  # of each query; chi-square, mean 1
    assert abs(float(rows.mean()) - 1) < 4 * (2 / rows.numel()) ** 0.5


@settings(max_examples=12, derandomize=True, deadline=None, database=None)
@given(st.data())
def test_cpu_kernel_on_random_shapes(data):
    check("cpu", scale=0.3, **random_case(data, 9, range(1, 11), (1, 3, 5, 7), 40))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("relative", [True, False])
@pytest.mark.parametrize("size,K,D,E", [((5, 7), 8, 20, 3), ((1, 5), 3, 4, 6), ((7, 6), 4, 64, 64)])
def test_folded_position_is_the_reference(size, K, D, E, relative, device):
    check(
        "sdpa", "aa", size, K=K, D=D, E=E, B=2, relative=relative, device=device, need_logits=False
    )


@pytest.mark.parametrize(
    "gates,dropout_p,prefix", [(None, 0.0, 0), ("one", 0.0, 0), (None, 0.2, 0), ("one", 0.0, 3)]
)
def test_cpu_kernel_gives_the_same_bits_however_the_work_is_cut(
    gates, dropout_p, prefix, monkeypatch
):
    tensors = problem("ea", (9, 7), batch=3, gates=gates, channels_last=dropout_p > 0)
    options = {
        "implementation": "cpu",
        "feat_size": (9, 7),
        "dropout_p": dropout_p,
        "num_prefix_tokens": prefix,
    }
    monkeypatch.setattr(torch, "randint", lambda *args, **_: torch.tensor([123456789123456789]))
    out, *_ = same_bits(lambda: [*outputs_and_gradients(tensors, **options).values()])
    second = {n: t[:1] if n in ("q", "k", "v", "prev_logits") else t for n, t in tensors.items()}
    assert torch.equal(evolving_attention(**second, **options)[0], out[:1])
    without = evolving_attention(**tensors, **options, need_logits=False)
    assert torch.equal(without[0], out) and without[1] is None


@pytest.mark.parametrize("dim_v", [3, 6, 8])
def test_cpu_kernel_takes_rows_of_logits_far_from_zero(dim_v):
    tensors = problem("ea", (4, 5), dim_v=dim_v, kernel=0)
    shift = torch.tensor([0.0, -20.0, 30.0, -45.0, 60.0, 85.0, -85.0, 1000.0, -1000.0, 0.0])
    tensors["prev_logits"] += shift.repeat(2)[:, None]  # a row is a query
    assert_as_reference(tensors, alpha=1.0, feat_size=(4, 5), need_logits=False)
    tensors["prev_logits"][..., 7] = -torch.inf
    out = evolving_attention(**tensors, alpha=1.0, feat_size=(4, 5), implementation="cpu")[0]
    assert_close(out, tensors["prev_logits"].softmax(-1) @ tensors["v"], atol=1e-5, rtol=1e-5)


def test_cpu_kernel_makes_no_subnormal_number_and_hides_no_nan():
    tensors = problem("aa", (5, 5), dim_qk=8, dim_v=4, relative=False)
    tensors["q"] = tensors["q"] * 60  # rows so peaked that exp would underflow
    results = outputs_and_gradients(tensors, implementation="cpu", feat_size=(5, 5))
    tiny = torch.finfo(torch.float32).tiny
    for name in ("out", "q", "k", "v"):
        assert not ((results[name] != 0) & (results[name].abs() < tiny)).any(), name
    assert_as_reference(tensors, feat_size=(5, 5))
    tensors["k"][0, 0, 3] = torch.nan
    out, logits = evolving_attention(**tensors, implementation="cpu", feat_size=(5, 5))
    assert out[0, 0].isnan().all() and logits[0, 0, :, 3].isnan().all() and not out[1].isnan().any()
    tensors = problem("ea", (5, 5))
    tensors["prev_logits"][1, 0, 4, 4] = torch.inf
    assert (
        not evolving_attention(**tensors, implementation="cpu", feat_size=(5, 5))[0][1]
        .isfinite()
        .all()
    )


def test_pytorch_accepts_the_custom_operators():
    arguments = [
        tensor.requires_grad_()
        for tensor in problem("ea", (3, 4), num_heads=4, dim_qk=4, dim_v=2).values()
    ]
    for learns in (False, True):
        seed, dropout_p = (torch.tensor([5]), 0.2) if learns else (None, 0.0)
        gates = torch.rand(2, 4, requires_grad=learns)
        torch.library.opcheck(
            torch.ops.ea_vision.cpu_attention.default,
            (*arguments, gates, seed, 0.3, dropout_p, [cpu.MIX, 0, 3, 4, 0, 0], True),
            test_utils=(
                "test_schema",
                "test_faketensor",
                *(["test_aot_dispatch_dynamic"] if learns else []),
            ),
        )
    x = torch.randn(2, 3, 6, 4, requires_grad=True)
    torch.library.opcheck(torch.ops.ea_vision.cpu_pool.default, (x,))


@pytest.mark.parametrize("size", [(5, 7), (8, 6), (1, 1), (2, 9)])
def test_halving_is_average_pooling(size):
    x = torch.randn(2, 3, *size, requires_grad=True)
    plain = F.avg_pool2d(x, 3, stride=2, padding=1, count_include_pad=False)
    weight = torch.randn_like(plain)
    assert_close(halve(x), plain)
    assert_close(*(torch.autograd.grad((y * weight).sum(), x) for y in (halve(x), plain)))
    assert halve(x).grad_fn.name() != plain.grad_fn.name()


# ---- the compiled library


@pytest.fixture
def use_compiler(monkeypatch, tmp_path):
    """Called with a compiler, it has the kernel compiled anew by it, for this test."""

    def use(compiler):
        monkeypatch.setenv("CC", compiler)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        cpu_library.load.cache_clear()

    yield use
    monkeypatch.undo()
    cpu_library.load.cache_clear()
    assert reason_against(problem("ea", (3, 4))) is None


def compiler(folder: Path, commands: str) -> str:
    """Make a compiler of the commands of a shell."""
    path = folder / f"cc{len(list(folder.glob('cc*')))}"
    path.write_text(f"#!/bin/sh\ncd {folder}\n{commands}\n")
    path.chmod(0o755)
    return str(path)


def compiler_with(folder: Path, *flags: str) -> str:
    """Make a compiler that adds flags to whatever it is told."""
    return compiler(folder, f'exec {os.environ.get("CC") or "cc"} "$@" {shlex.join(flags)}')


def reason_against(tensors):
    """Why the C kernel cannot solve the problem, on a map of any height."""
    H = 1 if "height_rel" not in tensors else (len(tensors["height_rel"]) + 1) // 2
    return cpu.Cpu().reason_against(
        Problem(**tensors, feat_size=(H, tensors["q"].shape[2] // H)).checked()
    )


def load_library(_) -> int:
    print(cpu_library.load())
    return 0


def test_a_damaged_library_is_built_again(use_compiler, tmp_path):
    """What is cut in two processes of their own, which build it at once: to load it would kill them."""
    use_compiler(compiler_with(tmp_path, "-O0"))
    assert reason_against(problem("ea", (3, 4))) is None
    (library,) = (tmp_path / "cache").rglob("cpu_kernel-*.so")
    whole = library.read_bytes()
    library.unlink()  # this process has it loaded
    library.write_bytes((Path(torch.__file__).parent / "lib" / "libc10.so").read_bytes())
    cpu_library.load.cache_clear()
    assert reason_against(problem("ea", (3, 4))) is None and library.read_bytes() == whole
    library.unlink()
    library.write_bytes(whole[: len(whole) // 2])
    log = tmp_path / "log"
    assert (
        runner.run_world(2, [], log, main=load_library) == [0, 0]
        and log.read_text().count(str(library)) == 2
    )
    assert library.read_bytes() == whole and [*library.parent.iterdir()] == [library]


BROKEN = {  # compilers by name: commands of a shell, if any, and what the log says
    "cc 'x": ("", "No closing quotation"),
    "no-such-compiler": ("", "no C compiler: no-such-compiler was not found"),
    "strange": ("printf '\\377\\376' >&2; exit 3", "ended with code 3: \N{REPLACEMENT CHARACTER}"),
    "links another": (
        'case "$*" in *-shared*) echo > e.c; cc -shared -o "$4" e.c;; *) cc "$@" -O0; esac',
        "undefined symbol: evolving_attention",
    ),
    "writes text": (
        'case "$*" in *-shared*) echo text > "$4";; *) cc "$@" -O0;; esac',
        "file too short",
    ),
}


@pytest.mark.parametrize("cc", BROKEN)
def test_whatever_goes_wrong_with_the_library_the_reference_runs_and_the_log_says_why(
    use_compiler, tmp_path, caplog, cc
):
    commands, reason = BROKEN[cc]
    use_compiler(compiler(tmp_path, commands) if commands else cc)
    tensors = problem("ea", (3, 4))
    ops._logged.clear()
    with caplog.at_level(logging.INFO, "ea_vision.ops"):
        out = evolving_attention(**tensors, feat_size=(3, 4))
    assert "by 'reference'; not cpu: " in caplog.messages[-1] and reason in caplog.messages[-1]
    assert torch.equal(
        out[0], evolving_attention(**tensors, feat_size=(3, 4), implementation="reference")[0]
    )


def test_clang_builds_a_kernel_of_one_thread(use_compiler, tmp_path, caplog):
    """Apple's refuses OpenMP, others need another library of it than torch's."""
    version = 'if [ "$1" = --version ]; then echo Apple clang version 17; exit; fi'
    refuses = 'case "$*" in *-fopenmp*|*gomp*) echo unsupported >&2; exit 1;; esac'
    use_compiler(compiler(tmp_path, f'{version}\n{refuses}\nexec cc -O1 "$@"'))
    assert reason_against(problem("ea", (3, 4))) is None
    assert "one thread" in caplog.text
    for gates in (None, "one"):
        check("cpu", "ea", (3, 4), B=3, gates=gates)


def test_microsofts_compiler_is_refused_in_a_line(use_compiler, tmp_path):
    path = tmp_path / "cl"
    path.write_text("#!/bin/sh\nexit 2\n")
    path.chmod(0o755)
    use_compiler(str(path))
    assert f"gcc or clang is required, got CC={path}" in reason_against(problem("ea", (3, 4)))


@pytest.mark.parametrize("flag", ["-mno-avx512f", "-mno-avx"])
def test_narrower_vectors(use_compiler, tmp_path, flag):
    use_compiler(compiler_with(tmp_path, "-O1", flag))
    if isinstance(cpu_library.load(), str):
        pytest.skip(cpu_library.load())
    for kind, size, dim_v in (
        ("aa", (3, 3), 3),
        ("ea", (5, 7), 3),
        ("ea", (2, 9), 6),
        ("pa", (4, 4), 2),
    ):
        for need_logits in (True, False):
            check("cpu", kind, size, D=20, E=dim_v, B=2, beta=0.6, need_logits=need_logits)


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
def test_where_nothing_can_be_kept_each_process_builds_the_library(
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
    assert reason_against(problem("ea", (3, 4))) is None
    assert caplog.messages[0].startswith("the C kernel is built for this process alone: ")
    assert_as_reference(problem("ea", (3, 4)), feat_size=(3, 4))


def without_memory(_) -> int:
    """Ask for more than there is, then for less."""
    x = torch.zeros(1, 64, 16, 4000).transpose(2, 3)
    torch.set_num_threads(2)
    few = x[:, :, :50].detach().requires_grad_()
    evolving_attention(few, few, few)  # the library is loaded, and its threads run
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**26, resource.RLIM_INFINITY))
    start = "the C kernel cannot allocate memory: a thread of"
    with pytest.raises(
        RuntimeError, match=rf"{start} evolving_attention needs \d+ bytes \(.* MiB\)"
    ):
        evolving_attention(x, x, x, need_logits=False)
    evolving_attention(few, few, few, need_logits=False)[0].sum().backward()
    return 0 if few.grad.isfinite().all() else 1


def test_memory_that_cannot_be_had_is_an_error_that_says_how_much(tmp_path):
    assert runner.run_world(1, [], tmp_path / "log", main=without_memory) == [0], (
        tmp_path / "log"
    ).read_text()


@pytest.mark.slow
def test_memory_errors_and_undefined_behaviour(tmp_path):
    """The kernel under the address and undefined-behaviour sanitizers, with the widest and the narrowest vectors."""
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
    done = subprocess.run(
        [sys.executable, "-m", "tests.ops.sanitized", *compilers],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        env={
            **os.environ,
            "LD_PRELOAD": str(runtime),
            "XDG_CACHE_HOME": str(tmp_path),
            # the check of use after return may misalign vectors on the stack (GCC 13; its bug 110027)
            "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0",
            "UBSAN_OPTIONS": "print_stacktrace=1",
        },
    )
    assert done.stdout.splitlines() == ["clean"] * len(compilers), done.stderr[-4000:]
    # and last, on purpose, a read beyond the end: were it not found, nothing above would have been
    assert (
        done.returncode
        and "heap-buffer-overflow" in done.stderr
        and "in pool_forward" in done.stderr
    )


# ---- the choice


def test_implementation_can_be_forced_by_argument_by_context_and_by_environment(monkeypatch):
    tensors = problem("aa", (3, 4))

    def made_by(**options):
        out, _ = evolving_attention(
            **{n: t.requires_grad_() for n, t in tensors.items()}, feat_size=(3, 4), **options
        )
        return type(out.grad_fn.next_functions[0][0]).__name__

    fast, slow = made_by(), made_by(implementation="reference")
    assert "cpu_attention" in fast and "cpu_attention" not in slow
    with use_implementation("reference"):
        assert made_by() == slow and made_by(implementation="cpu") == fast
        with use_implementation("cpu"):
            assert made_by() == fast
    assert made_by() == fast
    monkeypatch.delenv("EA_VISION_IMPLEMENTATION", raising=False)
    assert runpy.run_path(ops.__file__)["forced"] == []
    monkeypatch.setenv("EA_VISION_IMPLEMENTATION", "reference")
    assert runpy.run_path(ops.__file__)["forced"] == ["reference"]


def test_what_cannot_be_had_is_an_error():
    aa, ea = problem("aa", (3, 4)), problem("ea", (3, 4))
    few = dict(aa, k=aa["k"][:, :, :4], v=aa["v"][:, :, :4])
    plain = {name: few[name] for name in "qkv"}
    with (
        pytest.raises(ValueError, match="must be one of .* got 'quick'"),
        use_implementation("quick"),
    ):
        pass
    for tensors, options, message in (
        (
            ea,
            {"implementation": "sdpa"},
            "'sdpa' cannot run this: it has no place for previous logits",
        ),
        (
            {n: t.double() for n, t in ea.items()},
            {"implementation": "cpu"},
            "'cpu' cannot run this: it needs float32 or bfloat16, got torch.float64",
        ),
        (
            aa,
            {"implementation": "flex", "dropout_p": 0.1, "window": 3},
            "'flex' cannot run this: it has no drop",
        ),
        (
            plain,
            {"implementation": "cpu"},
            "'cpu' cannot run this: it needs as many keys as queries, got 4 and 12",
        ),
        (few, {}, "need as many keys as queries .* got 4 keys and 12 queries"),
        (
            plain,
            {"prev_logits": ea["prev_logits"]},
            r"prev_logits of shape \[2, 8, 12, 4\] required, got \[2, 8, 12, 12\]",
        ),
        (ea, {"dropout_p": 1.5}, "dropout_p must be a probability, from 0 to 1, got 1.5"),
        (ea, {"feat_size": (3, 5)}, r"N = 3\*5 required, got \[2, 8, 12, 20\]"),
        *(
            (ea, {name: wrong, "implementation": "cpu"}, f"{name} of shape .* required, got")
            for name, wrong in (
                ("prev_logits", ea["prev_logits"][:1]),
                ("weight", ea["weight"][:, :7]),
                ("weight", ea["weight"][..., :2]),
                ("bias", None),
                ("bias", ea["bias"][:7]),
                ("height_rel", ea["height_rel"][:, :7]),
            )
        ),
    ):
        with pytest.raises(ValueError, match=message):
            evolving_attention(**{**tensors, "feat_size": (3, 4), **options})


@pytest.mark.parametrize(
    "kind, need_logits, name",
    [("aa", False, "sdpa"), ("aa", True, "reference"), ("ea", False, "reference")],
)
def test_devices_without_kernels_take_torchs_fused_attention_where_it_suffices(
    kind, need_logits, name, caplog
):
    """Here the meta device; that `sdpa` and the reference agree is tested on the CPU."""
    caplog.set_level("INFO", logger="ea_vision.ops")
    ops._logged.clear()
    tensors = problem(kind, (3, 4), device="meta")
    out, logits = evolving_attention(**tensors, feat_size=(3, 4), need_logits=need_logits)
    assert f"evolving attention on meta in torch.float32 by {name!r}" in caplog.messages[-1]
    assert out.shape == tensors["v"].shape
    assert (logits is not None) == need_logits


def test_the_reason_is_logged_once(caplog):
    tensors = problem("aa", (3, 4))
    ops._logged.clear()
    with caplog.at_level(logging.INFO, "ea_vision.ops"):
        for each in (tensors, tensors, {n: t.double() for n, t in tensors.items()}):
            evolving_attention(**each, feat_size=(3, 4))
    assert caplog.messages == [
        "evolving attention on cpu in torch.float32 by 'cpu'",
        "evolving attention on cpu in torch.float64 by 'reference'; not cpu: it needs float32 or bfloat16, got "
        "torch.float64",
    ]


def test_maps_of_more_than_2500_pixels_are_logged_once(caplog):
    ops._logged.clear()
    with caplog.at_level(logging.INFO, "ea_vision.ops"):
        layers = [
            AugmentedConv2d(
                4,
                4,
                dim_qk=2,
                dim_v=2,
                num_heads=2,
                feat_size=(50, 50),
                evolution=EvolvingAttention(2),
            )
            for _ in range(2)
        ]
        assert not caplog.messages
        for layer in layers:
            layer.set_feat_size((52, 50))
        x = torch.zeros(1, 2, 2600, 1)
        evolving_attention(
            x,
            x,
            x,
            prev_logits=torch.zeros(1, 2, 2600, 2600),
            feat_size=(52, 50),
            need_logits=False,
        )
    (line,) = (message for message in caplog.messages if "map of" in message)
    assert line.startswith(
        "a map of 52 x 50 takes 54 MB per image and layer in float32; map_reduction=32, attn_stages"
    )


def test_what_the_kernel_would_misread_goes_elsewhere_or_is_an_error():
    tensors = problem("ea", (3, 4))
    assert "it needs q, k and v of one dtype, got torch.bfloat16, torch.float32" in reason_against(
        tensors | {"q": tensors["q"].bfloat16()}
    )
    empty = {n: t[:0] if n in ("q", "k", "v", "prev_logits") else t for n, t in tensors.items()}
    results = outputs_and_gradients(empty, feat_size=(3, 4))
    assert results["out"].shape == (0, 8, 12, 3) and not results["weight"].any()
    # attention that does not evolve has no use for a convolution
    del tensors["prev_logits"]
    made = [
        outputs_and_gradients(tensors, feat_size=(3, 4), implementation=each)
        for each in ("cpu", "reference")
    ]
    assert_close(*made)
    assert not made[0]["weight"].any() and made[0]["q"].any()


EA = {name: x for name, x in problem("ea", (3, 4), 2, 12).items() if name not in "qkv"}
OPERATORS = {
    "attention": lambda x: evolving_attention(x, x, x, **EA, feat_size=(3, 4))[0],
    "first": lambda x: evolving_attention(
        x, x, x, EA["height_rel"], EA["width_rel"], feat_size=(3, 4)
    )[0],
    "pooling": halve,
}


@pytest.mark.parametrize("name", ["attention", "first"])
def test_operations_are_counted_like_the_references(name):
    counts = []
    for implementation in ("cpu", "reference"):
        with FlopCounterMode(display=False) as counter, use_implementation(implementation):
            OPERATORS[name](torch.randn(2, 2, 12, 12))
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


@pytest.mark.parametrize("name", OPERATORS)
def test_second_derivatives_are_refused_and_the_reference_has_them(name):
    x = torch.randn(2, 2, 12, 12, requires_grad=True)

    def second():
        (first,) = torch.autograd.grad(OPERATORS[name](x).square().sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), x)[0]

    with pytest.raises(
        RuntimeError,
        match=r"second derivatives are not supported by .*use_implementation\('reference'\)",
    ):
        second()
    with use_implementation("reference"):
        assert second().any()


@pytest.mark.parametrize("name", OPERATORS)
def test_forward_derivatives_and_transforms_are_the_references(name):
    operator, x, tangent = OPERATORS[name], torch.randn(2, 2, 12, 12), torch.randn(2, 2, 12, 12)

    def loss(x):
        return operator(x).square().sum()

    def forward(x):
        return torch.func.jvp(operator, (x,), (tangent,))[1]

    def dual():
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(operator(forward_ad.make_dual(x, tangent))).tangent

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

    made = all_of_them()
    with use_implementation("reference"):
        assert_close(made, all_of_them())
        near = (operator(x + 1e-2 * tangent) - operator(x - 1e-2 * tangent)) / 2e-2
    assert_close(made[0], near, atol=2e-2, rtol=1e-2)
    if name == "attention":
        with (
            use_implementation("cpu"),
            pytest.raises(ValueError, match="'cpu' cannot run this: forward-mode deriv"),
        ):
            forward(x)


@pytest.mark.parametrize("kind", ["aa", "ea", "pa"])
def test_fewer_keys_than_queries(kind):
    """Keys and values that a network has reduced: maps (B, K, N, M)."""
    q, k, v, prev, weight, bias = (
        torch.randn(shape, dtype=torch.float64)
        for shape in ((2, 3, 6, 5), (2, 3, 4, 5), (2, 3, 4, 2), (2, 3, 6, 4), (3, 3, 3, 3), 3)
    )
    logits = q @ k.mT / 5**0.5
    further = {} if kind == "aa" else {"prev_logits": prev, "weight": weight, "bias": bias}
    if kind == "ea":
        mixed = 0.3 * prev + 0.7 * logits
        logits = 0.6 * F.conv2d(mixed, weight, bias, padding=1).relu() + 0.4 * mixed
    elif kind == "pa":
        logits = 0.3 * F.conv2d(prev, weight, bias, padding=1).relu() + 0.7 * logits
    out, made = evolving_attention(q, k, v, **further, alpha=0.3, beta=0.6, predict=kind == "pa")
    assert_close((out, made), (logits.softmax(-1) @ v, logits))
    if kind == "aa":
        assert_close(evolving_attention(q, k, v, need_logits=False, implementation="sdpa")[0], out)


# ---- the layer


def chain(dropout_p=0.0, **options):
    torch.manual_seed(0)
    layers = nn.ModuleList(
        AugmentedConv2d(
            8,
            8,
            dim_qk=8,
            dim_v=4,
            num_heads=4,
            feat_size=(6, 5),
            evolution=EvolvingAttention(4, **options) if i else None,
        )
        for i in range(3)
    )
    for layer in layers:
        layer.attn_drop.p = dropout_p
    return layers


def run(layers, x):
    logits = None
    for i, layer in enumerate(layers):
        x, logits = layer(x, logits, i + 1 < len(layers))
    return x, logits


@pytest.mark.parametrize("learnable,dropout_p", [(False, 0.0), (True, 0.0), ("per_head", 0.1)])
def test_training_keeps_one_map_a_layer_and_none_of_the_last(learnable, dropout_p):
    layers, kept = chain(dropout_p, learnable=learnable), set()

    def pack(tensor):
        if tensor.shape == (2, 4, 30, 30):
            kept.add(tensor.data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        _, logits = run(layers, torch.randn(2, 8, 6, 5))
    assert logits is None and len(kept) == 2


def test_hooks_see_the_maps():
    layers, x, seen = chain(), torch.randn(2, 8, 6, 5), []
    fast, _ = run(layers, x)
    with use_implementation("reference"):
        slow, _ = run(layers, x)
    assert_close(fast, slow)
    assert not torch.equal(fast, slow)  # two implementations ran
    handle = layers[0].attn_drop.register_forward_hook(lambda _, args, output: seen.append(output))
    assert_close(run(layers, x)[0], fast)
    handle.remove()
    assert torch.equal(run(layers, x)[0], fast) and [maps.shape for maps in seen] == [
        (2, 4, 30, 30)
    ]


@pytest.mark.parametrize("learnable,dropout_p", [(False, 0.0), (True, 0.2)])
def test_compiles_whole_and_once(learnable, dropout_p):
    layers, x, graphs = chain(dropout_p, learnable=learnable), torch.randn(2, 8, 6, 5), []

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
    assert len(graphs) == 1 and str(graphs[0].code).count("ea_vision.cpu_attention") == 3


def test_what_is_computed_again_for_backward_drops_the_same():
    layers, x = chain(0.3, learnable=True), torch.randn(2, 8, 6, 5)

    def gradients(seed, again):
        torch.manual_seed(seed)
        y, logits = x, None
        for layer in layers:
            y, logits = (
                checkpoint(layer, y, logits, use_reentrant=False) if again else layer(y, logits)
            )
        return torch.autograd.grad(y.square().sum(), layers[0].qkv.weight)[0]

    assert torch.equal(gradients(1, False), gradients(1, True))
    assert not torch.equal(gradients(1, False), gradients(2, False))
