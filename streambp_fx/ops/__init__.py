"""The ops that rewritten graphs call; importing this package registers them."""

from . import accumulate, attention, philox, scale

IMPLEMENTATIONS = {**accumulate.IMPLEMENTATIONS, **attention.IMPLEMENTATIONS}
"""What an op does, as a function: for those who count what it allocates."""

__all__ = ["IMPLEMENTATIONS", "accumulate", "attention", "philox", "scale"]
