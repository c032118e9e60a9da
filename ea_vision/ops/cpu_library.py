"""The library of C kernels (`cpu_kernel/kernel.c`), compiled on first use for this machine, and its structs.

The compiler is $CC, by default cc. The library is cached in ~/.cache/ea_vision ($XDG_CACHE_HOME/ea_vision). If that
folder cannot be written, each process builds the library in a temporary folder.
"""

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

from ea_vision.base.files import atomic_write, cache_root

_logger = logging.getLogger(__name__)
CPU_INFO = Path("/proc/cpuinfo")
MICROSOFTS = ("cl", "clang-cl")
SOURCES = Path(__file__).with_name("cpu_kernel")  # kernel.c includes the other files
# Not -ffast-math: a library linked with it turns off subnormal numbers in the whole process, and reordered sums would
# undo the rounding in the kernel's exp.
FLAGS = (
    "-O3",
    "-march=native",
    "-std=gnu11",
    "-fPIC",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=fast",
)
DTYPES = {torch.float32: 0, torch.bfloat16: 1}  # as in storage.h

_POOLING = [*[ctypes.c_void_p] * 2, ctypes.c_long, *[ctypes.c_int] * 3]


def _fields(**names: str) -> list[tuple[str, type]]:
    """Return a struct's fields from their names, grouped by ctypes type."""
    fields = []
    for kind, several in names.items():
        fields += [(name, getattr(ctypes, kind)) for name in several.split()]
    return fields


class AttentionStruct(ctypes.Structure):
    """The struct `problem` of problem.h."""

    _fields_ = _fields(
        c_int32="K H W D E kernel kind prefix B dtype threads window_height window_width",
        c_float="scale dropout",
        c_int64="q_step k_step v_step seed",
        c_void_p="q k v prev height_rel width_rel weight bias gates out logits norm d_out d_logits d_q d_k d_v d_prev "
        "d_height_rel d_width_rel d_weight d_bias d_gates",
    )


def _machine() -> str:
    """Return the CPU features that -march=native depends on: machines of several kinds may share one cache."""
    if CPU_INFO.exists():
        for line in CPU_INFO.read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return line
    return platform.processor()


def _openmp(compiler: list[str]) -> list[str]:
    """Return arguments that link the OpenMP library that torch has loaded: two libraries would compete for the cores.

    The list is empty for clang, whose code needs a different library from GCC's.
    """
    if "clang" in _output_of(*compiler, "--version"):
        return []
    libraries = Path(torch.__file__).parent / "lib"
    bundled = sorted(libraries.glob("libgomp*.so*"))
    if not bundled:
        return ["-fopenmp"]
    return [str(bundled[0]), f"-Wl,-rpath,{libraries}"]


def _output_of(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace")
    if done.returncode:
        message = done.stderr.strip()[-2000:]
        raise subprocess.SubprocessError(
            f"{shlex.join(command)} ended with code {done.returncode}: {message}"
        )
    return done.stdout


def library_name(compiler: list[str]) -> str:
    """Return the compiled library's file name: a digest of everything that affects what is compiled."""
    parts = []
    for file in sorted(SOURCES.glob("*.[ch]")):
        parts += [file.name, file.read_text(encoding="utf-8")]
    version = _output_of(*compiler, "--version")
    parts += [*compiler, version, *FLAGS, *_openmp(compiler), _machine(), torch.__version__]
    content = "\0".join(parts).encode()
    digest = hashlib.sha256(content).hexdigest()
    return f"cpu_kernel-{digest[:16]}.so"


def _built(compiler: list[str], folder: str) -> Path:
    """Compile the library in a folder and return its path."""
    unit = Path(folder) / "kernel.o"
    library = Path(folder) / "kernel.so"
    openmp = _openmp(compiler)
    flags = [*FLAGS, "-fopenmp"] if openmp else FLAGS
    if not openmp:
        _logger.warning("the C kernel runs on one thread: clang compiles it without OpenMP")
    _output_of(*compiler, *flags, "-c", str(SOURCES / "kernel.c"), "-o", str(unit))
    _output_of(*compiler, "-shared", str(unit), "-o", str(library), *openmp, "-lm")
    return library


def _is_whole(library: Path) -> bool:
    """Return whether the file ends with the digest of its content (which loaders ignore).

    Loading a damaged library may crash the process.
    """
    try:
        content = library.read_bytes()
    except FileNotFoundError:
        return False
    digest = hashlib.sha256(content[:-32]).digest()
    return len(content) > 32 and content.endswith(digest)


def _opened(compiler: list[str]) -> ctypes.CDLL:
    """Return the library; build it first if the cache has no intact one."""
    name = library_name(compiler)
    # a folder that cannot be written, a full disk: OSError; a user without a home: RuntimeError
    try:
        library = cache_root() / name
        if not _is_whole(library):
            library.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=library.parent) as folder:
                content = _built(compiler, folder).read_bytes()
            digest = hashlib.sha256(content).digest()
            atomic_write(library, content + digest)  # other processes may build it at the same time
        return ctypes.CDLL(str(library))
    except (OSError, RuntimeError) as error:
        _logger.warning("the C kernel is built for this process alone: %s", error)
    with tempfile.TemporaryDirectory() as folder:
        return ctypes.CDLL(str(_built(compiler, folder)))


def _compiler() -> list[str]:
    """Return the compiler's command: $CC, or cc.

    Raises:
        ValueError: $CC cannot be parsed, or the compiler is missing or Microsoft's.
    """
    is_posix = os.name == "posix"  # elsewhere a backslash is part of a path
    compiler = shlex.split(os.environ.get("CC", ""), posix=is_posix) or ["cc"]
    if shutil.which(compiler[0]) is None:
        raise ValueError(f"no C compiler: {compiler[0]} was not found (set CC, or install one)")
    if Path(compiler[0]).stem.lower() in MICROSOFTS:
        raise ValueError(f"gcc or clang is required, got CC={compiler[0]}")
    return compiler


@functools.cache
def load() -> ctypes.CDLL | str:
    """Return the compiled library, or a string saying why there is none."""
    attention = [ctypes.POINTER(AttentionStruct)]
    # ValueError: see `_compiler`; AttributeError: a function is missing
    try:
        library = _opened(_compiler())
        for name, types, result in (
            ("evolving_attention", attention, ctypes.c_int64),
            ("pool_forward", _POOLING, None),
            ("pool_backward", _POOLING, None),
        ):
            function = getattr(library, name)
            function.argtypes = types
            function.restype = result
    except (OSError, subprocess.SubprocessError, ValueError, AttributeError) as error:
        return f"the C kernel could not be built or loaded: {error}"
    return library


def run(function: str, *args) -> None:
    """Call a function of the library.

    Raises:
        RuntimeError: a thread could not allocate the memory that it needs.
    """
    missing = getattr(load(), function)(*args)
    if missing:
        raise RuntimeError(
            f"the C kernel cannot allocate memory: a thread of {function} needs {missing} bytes "
            f"({missing / 2**20:,.0f} MiB)"
        )


@torch.compiler.assume_constant_result  # else torch.compile would trace the call of the C compiler
def reason_against_library() -> str | None:
    """Return why there is no library, or None."""
    loaded = load()
    return loaded if isinstance(loaded, str) else None
