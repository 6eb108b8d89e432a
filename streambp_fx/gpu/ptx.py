"""Compile a kernel that Inductor wrote with Triton's own compiler, for a GPU that is not there."""

from __future__ import annotations

from typing import Any

from streambp_fx._torch import PyCodeCache

from .device import pretended_gpu
from .targets import WARP_SIZE, Target


def compile_to_ptx(name: str, source: str, target: Target) -> str:
    """The PTX of a kernel in the first configuration that Inductor would try.

    Args:
        name: of the kernel, as in `LoweredBody.kernels`.
        source: its Triton source.
        target: what to compile for.

    Raises:
        triton.CompilationError: the source is no valid Triton program.
    """
    with pretended_gpu(target):
        # Decorating a kernel chooses its configurations for the GPU, and compiles nothing.
        return _compile(getattr(PyCodeCache.load(source), name), target)


def _compile(kernel: Any, target: Target) -> str:
    import triton
    from triton.backends.compiler import GPUTarget

    config, meta = kernel.configs[0], kernel.triton_meta
    program = triton.compiler.ASTSource(
        kernel.fn,
        meta["signature"],
        {**meta["constants"], **config.kwargs},
        meta["configs"][0],
    )
    compiled = triton.compile(
        program,
        target=GPUTarget("cuda", target.capability, WARP_SIZE),
        options={
            "num_warps": config.num_warps,
            "num_stages": config.num_stages,
            "enable_fp_fusion": meta.get("enable_fp_fusion", True),
        },
    )
    ptx: str = compiled.asm["ptx"]
    return ptx
