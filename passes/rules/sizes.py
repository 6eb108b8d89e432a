"""Comparing and dividing sizes that may be symbolic, without ever adding a guard.

Everything here reads the sympy expression of a `torch.SymInt`. Asking ``bool(a == b)`` instead
would specialise the graph and recompile it at the next length.
"""

from __future__ import annotations

from collections.abc import Iterable

import sympy
import torch

from .spec import Size


def expr_of(size: Size) -> sympy.Expr:
    """The size as an expanded sympy expression."""
    if isinstance(size, torch.SymInt):
        return sympy.expand(size.node.expr)
    return sympy.Integer(size)


def same_size(a: Size, b: Size) -> bool:
    """Whether the sizes are equal for every value of their symbols."""
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    return bool(expr_of(a) == expr_of(b))


def same_shape(a: Iterable[Size], b: Iterable[Size]) -> bool:
    """Whether the shapes have the same dims, for every value of their symbols."""
    a, b = tuple(a), tuple(b)
    return len(a) == len(b) and all(map(same_size, a, b))


def product(sizes: Iterable[Size]) -> Size:
    """The product of the sizes, 1 for none."""
    result: Size = 1
    for size in sizes:
        # A factor of 1 would be traced as a product of its own.
        result = size if isinstance(result, int) and result == 1 else result * size
    return result


def exact_quotient(a: Size, b: Size) -> Size | None:
    """``a / b`` if ``b`` divides ``a`` for every value of their symbols, else ``None``."""
    if isinstance(a, int) and isinstance(b, int):
        return a // b if b > 0 and a % b == 0 else None
    quotient = sympy.cancel(expr_of(a) / expr_of(b))
    if not all(coefficient.is_integer for coefficient in quotient.as_coefficients_dict().values()):
        return None
    if quotient.as_numer_denom()[1] != 1:
        return None
    if quotient.is_Integer:
        return int(quotient)
    # SymInt division does not guard; it gives back the same quotient as a SymInt.
    return a // b
