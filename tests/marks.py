"""Which cases of a parametrized test the default run leaves out."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest

SLOW = pytest.mark.slow


def slow_but(chosen: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """``cases``, slow but for those in ``chosen``. A tuple is a case of several arguments."""
    return [
        case
        if case in chosen
        else pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=SLOW)
        for case in cases
    ]
