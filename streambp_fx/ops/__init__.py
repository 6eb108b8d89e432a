"""The ops that rewritten graphs call; importing this package registers them."""

from . import accumulate, attention, philox

__all__ = ["accumulate", "attention", "philox"]
