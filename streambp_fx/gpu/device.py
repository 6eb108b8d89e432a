"""Let Inductor believe, for the length of a with-block, that a GPU is there.

What Inductor reads of a GPU while it lowers is a handful of answers of ``torch.cuda`` and the
target of Triton's active driver. They are replaced by the wanted GPU's; nothing is ever launched
or allocated there. Answers that torch caches are dropped when the block begins and when it ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from streambp_fx._torch import (
    CudaInterface,
    clear_gpu_caches,
    cuda_worker_caches,
    without_algorithm_selector,
    without_gpu_context,
)

from .targets import WARP_SIZE, Target

AS_OPS: dict[str, Any] = {
    "__invert__": torch.ops.aten.bitwise_not.default,
    "contiguous": torch.ops.aten.contiguous.default,
    "copy_": torch.ops.aten.copy_.default,
}
"""Methods that switch to the tensor's device before they come to the dispatcher, and so to the fake
mode. Where torch has no CUDA that fails; the ops of the same meaning do not."""


@contextmanager
def pretended_gpu(target: Target) -> Iterator[None]:
    """Make ``target`` the only GPU that torch and Triton know of, for fake tensors alone.

    Not for use in several threads at once: what is replaced belongs to the process.
    """
    answers = _cuda_answers(target)
    # `CudaInterface` took its functions from torch.cuda when it was imported.
    taken = [name for name in answers if name in vars(CudaInterface) and name != "is_available"]
    with ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(patch.object(torch.cuda, name, answer))
        for name in taken:
            stack.enter_context(patch.object(CudaInterface, name, staticmethod(answers[name])))
        for name, op in AS_OPS.items():
            method = getattr(torch.Tensor, name)
            stack.enter_context(patch.object(torch.Tensor, name, _by_op(op, method)))
        for cache in cuda_worker_caches():
            stack.enter_context(patch.dict(cache, clear=True))
        stack.enter_context(without_algorithm_selector())
        stack.enter_context(without_gpu_context())
        stack.enter_context(_triton_driver(target))
        clear_gpu_caches()
        stack.callback(clear_gpu_caches)
        yield


def _by_op(op: Any, method: Callable[..., Any]) -> Callable[..., Any]:
    """The method ``method`` of tensors, by ``op`` for those on a GPU."""

    def call(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return (op if tensor.is_cuda else method)(tensor, *args, **kwargs)

    return call


def _cuda_answers(target: Target) -> dict[str, Callable[..., Any]]:
    """For each function of ``torch.cuda`` that Inductor calls while it lowers, a stand-in."""
    return {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_properties": lambda device=None: target,
        "get_device_capability": lambda device=None: (target.major, target.minor),
        "get_device_name": lambda device=None: target.name,
        "get_rng_state": lambda device=None: torch.empty(0, dtype=torch.uint8),
        "set_rng_state": lambda state, device=None: None,
        "_exchange_device": lambda device: 0,
        "_maybe_exchange_device": lambda device: 0,
    }


@contextmanager
def _triton_driver(target: Target) -> Iterator[None]:
    """A driver of Triton that names ``target`` as what to compile for."""
    # Imported here: the package is optional, and its import takes a second.
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.driver import CudaDriver
    from triton.runtime import driver

    class PretendedDriver(CudaDriver):
        # A subclass, so that kernels which ask for a CUDA driver find it active. The constructor
        # of the real one would load the driver's library.
        def __init__(self) -> None:
            properties = {
                "max_shared_mem": target.shared_memory_per_block_optin,
                "multiprocessor_count": target.multi_processor_count,
                "warpSize": target.warp_size,
            }
            self.utils = SimpleNamespace(get_device_properties=lambda device: properties)

        def get_current_target(self) -> Any:
            return GPUTarget("cuda", target.capability, WARP_SIZE)

        def get_current_device(self) -> int:
            return 0

    # `set_active` has no way back where no driver was active.
    with patch.object(driver, "_active", PretendedDriver()):
        yield
