"""Train causal models on long sequences: a ``torch.compile`` backend that streams over chunks.

``torch.compile(model, backend="streambp")`` needs no import of this package: torch finds the
backend by its entry point.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

try:
    __version__ = version("streambp-fx")
except PackageNotFoundError:  # a checkout that is used from its folder, not installed
    __version__ = "0.0.0+checkout"

from .report import Report, last_report

if TYPE_CHECKING:
    from .checking import Check, check
    from .explaining.explanation import Explanation, explain

__all__ = ["Check", "Explanation", "Report", "__version__", "check", "explain", "last_report"]

# Imported when they are asked for: training needs none of them.
_LATER = {
    "Check": ".checking",
    "check": ".checking",
    "Explanation": ".explaining.explanation",
    "explain": ".explaining.explanation",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LATER[name], __name__), name)
