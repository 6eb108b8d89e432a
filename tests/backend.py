"""The one place that says which backend the end-to-end tests compile with.

``STREAMBP_TEST_BACKEND=aot_eager`` checks the tests themselves against another right backend; tests
that read the report are skipped then.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

BACKEND = os.environ.get("STREAMBP_TEST_BACKEND", "streambp")

needs_report = pytest.mark.skipif(BACKEND != "streambp", reason="only streambp writes a report")


def streamed(
    function: Callable[..., Any],
    *,
    dynamic: bool | None = None,
    fresh: bool = True,
    **options: Any,
) -> Any:
    """``function`` compiled with the backend under test; a module stays one.

    Starts from an empty Dynamo cache if ``fresh``. Loop bodies run eagerly unless
    ``compile_bodies=True`` is among ``options``.
    """
    if fresh:
        torch._dynamo.reset()
    if BACKEND != "streambp":
        return torch.compile(function, backend=BACKEND, dynamic=dynamic)
    options = {"compile_bodies": False, **options}
    return torch.compile(function, backend=BACKEND, dynamic=dynamic, options=options)


def last_report() -> Any:
    """The report of the last compilation."""
    import streambp_fx

    return streambp_fx.last_report()


def assert_streamed_whole() -> None:
    """Fail if the last compilation left anything unstreamed, or streamed nothing.

    Does nothing with a stand-in backend.
    """
    if BACKEND != "streambp":
        return
    report = last_report()
    problems = "\n".join(report.problems())
    assert not problems, f"left unstreamed:\n{problems}"
    assert report.loops, "nothing was streamed"
