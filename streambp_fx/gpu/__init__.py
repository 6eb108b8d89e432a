"""Lower the loop bodies of a program for a GPU on a machine that has none.

`lower_for_gpu` gives the Triton kernels and the extern calls of each body, `write_lowered` puts
them into a folder, `compile_to_ptx` runs Triton's own compiler on a kernel.
"""

from .lowering import LoweredBody, lower_for_gpu, write_lowered
from .ptx import compile_to_ptx
from .targets import TARGETS, Target, TritonMissingError, find_target
from .wrapper_code import Buffer, Launch

__all__ = [
    "TARGETS",
    "Buffer",
    "Launch",
    "LoweredBody",
    "Target",
    "TritonMissingError",
    "compile_to_ptx",
    "find_target",
    "lower_for_gpu",
    "write_lowered",
]
