"""Products of bfloat16 on the CPU, added to fp32 sums without rounding (``narrow_products.cpp``).

Inductor's C++ builder compiles the source once and caches it on disk, as it does its own kernels.
"""

from __future__ import annotations

import logging
from ctypes import CDLL, c_bool, c_char_p, c_int64, c_void_p
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from streambp_fx._torch import CppCodeCache

log = logging.getLogger(__name__)

_SOURCE = Path(__file__).with_suffix(".cpp").read_text()
"""Read with this file, whose calls it has to go with: an upgrade may change both."""

_ROWS, _COLUMNS = 64, 256
"""Block of the sum that a thread adds to at once; its operands stay in a core's L2 cache."""

_DEPTH = 64
"""Depths are padded to a multiple: oneDNN keeps a kernel for each that it has ever met."""


@cache
def _library() -> CDLL | None:
    """The compiled source, or ``None`` where it would be of no use or doesn't compile."""
    if not torch.cpu.get_capabilities().get("amx_bf16", False):
        return None
    try:
        library = CppCodeCache.load(_SOURCE)
    except (RuntimeError, OSError) as error:  # no compiler, a failure of it, or of loading
        log.warning("bfloat16 products into fp32 sums run in fp32, which is slower: %s", error)
        return None
    library.supported.restype, library.add_product.restype = c_bool, c_char_p
    return library


def is_narrow_product(total: Tensor, left: Tensor, right: Tensor) -> bool:
    """Whether `add_narrow_product` takes these operands, on this machine and with oneDNN as set."""
    takes = (
        total.device.type == "cpu"
        and total.dtype == torch.float32
        and left.dtype == right.dtype == torch.bfloat16
        and total.stride(-1) == 1
        and total.stride(-2) >= total.size(-1)
        and min(*total.shape, left.size(-1)) > 0
    )
    library = _library() if takes else None
    return library is not None and library.supported()


def add_narrow_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """``total += left @ right``, each product and sum in fp32, where `is_narrow_product`.

    Args:
        total: fp32 ``[m, n]`` or ``[b, m, n]``, columns contiguous.
        left: bfloat16 ``[m, k]`` or ``[b, m, k]``; right: bfloat16 ``[k, n]`` or ``[b, k, n]``.

    The workspace is a copy of ``right``, and 64 rows of ``left`` for each thread.

    Raises:
        RuntimeError: the machine has no such product, or it failed with a part of the sum done.
    """
    if total.dim() == 3:
        for one in zip(total, left, right, strict=True):
            add_narrow_product(*one)
        return
    n, k = right.shape[-1], left.shape[1]
    missing = -k % _DEPTH
    padded = torch.cat([right, right.new_zeros(missing, n)]) if missing else right
    pairs = padded.unflatten(0, (-1, 2)).transpose(1, 2).contiguous()
    torch.ops.streambp.add_narrow_product_(total, left, pairs)


def _call_library(total: Tensor, left: Tensor, pairs: Tensor) -> None:
    library = _library()
    if library is None:
        raise RuntimeError("this machine has no product of bfloat16 with an fp32 result")
    pointers = [c_void_p(tensor.data_ptr()) for tensor in (total, left, pairs)]
    sizes = (*total.shape, left.shape[1], 2 * pairs.shape[0])
    strides = (total.stride(0), *left.stride())
    shares = (_ROWS, _COLUMNS, torch.get_num_threads())
    failure = library.add_product(*pointers, *map(c_int64, (*sizes, *strides, *shares)))
    if failure is not None:
        raise RuntimeError(f"oneDNN's product of bfloat16 failed: {failure.decode()}")


# An op, so that fake tensors, which have no data, never come to the library.
_LIBRARY = torch.library.Library("streambp", "FRAGMENT")
_LIBRARY.define("add_narrow_product_(Tensor(a!) total, Tensor left, Tensor pairs) -> ()")
_LIBRARY.impl("add_narrow_product_", _call_library, "CPU")
torch.library.register_fake(
    "streambp::add_narrow_product_", lambda total, left, pairs: None, lib=_LIBRARY
)
