"""Train causal models on long sequences: a ``torch.compile`` backend that streams over chunks.

``torch.compile(model, backend="streambp")`` needs no import of this package: torch finds the
backend by its entry point.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("streambp-fx")
except PackageNotFoundError:  # a checkout that is used from its folder, not installed
    __version__ = "0.0.0+checkout"

from .report import Report, last_report

__all__ = ["Report", "__version__", "last_report"]
