"""Launch this folder's kernels on a GPU: compiled by NVRTC, called by CUDA's driver. It has never run on a GPU."""

import ctypes

import torch

from experiments.maps_on_gpu.cubins import compile_cubin
from experiments.maps_on_gpu.emulate import Arguments, Run, Variant

MAX_DYNAMIC_SHARED_BYTES = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


def load(kernel: str, variant: Variant) -> Run:
    """Compile a kernel for the current GPU and return a function that launches it.

    Raises:
        RuntimeError: the compiler's log, or the driver's error and its call.
    """
    major, minor = torch.cuda.get_device_capability()
    cubin = compile_cubin(kernel, variant, 10 * major + minor)
    torch.cuda.current_stream().synchronize()  # the context of this thread exists
    driver = ctypes.CDLL("libcuda.so.1")

    def call(name: str, *arguments) -> None:
        error = getattr(driver, name)(*arguments)
        if error:
            raise RuntimeError(f"{name} of {kernel} ended with CUDA error {error}")

    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    address, size = ctypes.c_uint64(), ctypes.c_size_t()
    layout = (ctypes.c_int * 3)()
    call("cuModuleLoadData", ctypes.byref(module), cubin)
    call("cuModuleGetFunction", ctypes.byref(function), module, kernel.encode())
    call("cuModuleGetGlobal_v2", ctypes.byref(address), ctypes.byref(size), module, b"layout")
    call("cuMemcpyDtoH_v2", layout, address, size)
    shared_bytes, threads, parts = layout
    call("cuFuncSetAttribute", function, MAX_DYNAMIC_SHARED_BYTES, shared_bytes)

    def run(arguments: Arguments, images: int) -> None:
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(arguments))
        grid, block = (images * parts, 1, 1), (threads, 1, 1)
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        call("cuLaunchKernel", function, *grid, *block, shared_bytes, stream, pointers, None)

    return run
