"""The GPUs that can be lowered for, with the properties that Inductor's choices depend on."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec

WARP_SIZE = 32


class TritonMissingError(ImportError):
    """The package ``triton``, which kernels for a GPU are written in, is not installed."""


@dataclass(frozen=True)
class Target:
    """One GPU, by the names of ``torch.cuda.get_device_properties``.

    Sources: NVIDIA's data sheets, and the table of technical specifications per compute capability
    in the CUDA programming guide.
    """

    name: str
    major: int
    minor: int
    multi_processor_count: int
    total_memory: int
    shared_memory_per_block_optin: int
    shared_memory_per_multiprocessor: int
    L2_cache_size: int
    regs_per_multiprocessor: int = 65536
    max_threads_per_multi_processor: int = 2048
    max_threads_per_block: int = 1024
    warp_size: int = WARP_SIZE

    @property
    def gcnArchName(self) -> str:
        """The GPU's name, which torch built without CUDA looks for here."""
        return self.name

    @property
    def capability(self) -> int:
        """The compute capability as one number: 90 for sm_90."""
        return 10 * self.major + self.minor


_KIB, _MIB, _GIB = 2**10, 2**20, 2**30

TARGETS = {
    "a100": Target(
        "NVIDIA A100-SXM4-80GB", 8, 0, 108, 80 * _GIB, 163 * _KIB, 164 * _KIB, 40 * _MIB
    ),
    "h100": Target(
        "NVIDIA H100 80GB HBM3", 9, 0, 132, 80 * _GIB, 227 * _KIB, 228 * _KIB, 50 * _MIB
    ),
    "h200": Target("NVIDIA H200", 9, 0, 132, 141 * _GIB, 227 * _KIB, 228 * _KIB, 50 * _MIB),
}


def find_target(name: str) -> Target:
    """The GPU called ``name``, in any case.

    Raises:
        ValueError: there is no such target.
        TritonMissingError: the package ``triton`` is not installed.
    """
    target = TARGETS.get(name.lower())
    if target is None:
        raise ValueError(f"no GPU target {name!r}; there are {', '.join(sorted(TARGETS))}")
    if find_spec("triton") is None:
        raise TritonMissingError(
            "lowering for a GPU needs the package triton: pip install triton (Linux only)"
        )
    return target
