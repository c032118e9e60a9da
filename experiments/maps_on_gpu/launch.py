"""Launch this folder's kernels on a GPU: compiled by NVRTC, called by CUDA's driver. It has never run on a GPU."""

import ctypes

import torch

from experiments.maps_on_gpu.cubins import compile_cubin
from experiments.maps_on_gpu.emulate import KERNELS, H, Run

THREADS = 224  # of a block: seven warps, each for two rows of queries
SHARED_BYTES = {"forward.cu": 74240, "backward_core.cu": 98528}
MAX_DYNAMIC_SHARED_BYTES = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


def load(source: str) -> Run:
    """Compile a kernel for the current GPU and return a function that launches it, a block per image and row.

    Raises:
        RuntimeError: the compiler's log, or the driver's error and its call.
    """
    major, minor = torch.cuda.get_device_capability()
    cubin = compile_cubin(source, 10 * major + minor)
    torch.cuda.current_stream().synchronize()  # the context of this thread exists
    driver = ctypes.CDLL("libcuda.so.1")

    def call(name: str, *arguments) -> None:
        error = getattr(driver, name)(*arguments)
        if error:
            raise RuntimeError(f"{name} of {source} ended with CUDA error {error}")

    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    call("cuModuleLoadData", ctypes.byref(module), cubin)
    call("cuModuleGetFunction", ctypes.byref(function), module, KERNELS[source].encode())
    shared_bytes = SHARED_BYTES[source]
    call("cuFuncSetAttribute", function, MAX_DYNAMIC_SHARED_BYTES, shared_bytes)

    def run(arguments: ctypes.Structure, images: int) -> int:
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(arguments))
        grid, block = (images * H, 1, 1), (THREADS, 1, 1)
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        call("cuLaunchKernel", function, *grid, *block, shared_bytes, stream, pointers, None)
        return shared_bytes

    return run
