"""``streambp::scale_saved``: a gradient made in forward, times the tangent that backward brings.

The product takes the place of what was saved, which may be as large as the head's weight, unless
backward may run again (``retain_graph=True``) and would need it once more.
"""

from __future__ import annotations

import torch
from torch import Tensor

from streambp_fx._torch import backward_may_run_again

_LIBRARY = torch.library.Library("streambp", "FRAGMENT")
_LIBRARY.define("scale_saved(Tensor(a!) saved, Tensor factor) -> Tensor(a!)")


def scale_saved(saved: Tensor, factor: Tensor) -> Tensor:
    """``saved * factor`` in the dtype of ``saved``.

    Args:
        saved: floating, of any shape, read by nothing else once backward has run.
        factor: floating, without dims.
    """
    overlaps = any(
        stride == 0 and size > 1 for stride, size in zip(saved.stride(), saved.shape, strict=True)
    )
    return saved * factor if overlaps or backward_may_run_again() else saved.mul_(factor)


_LIBRARY.impl("scale_saved", scale_saved, "CompositeExplicitAutograd")
torch.library.register_fake("streambp::scale_saved", lambda saved, factor: saved, lib=_LIBRARY)
