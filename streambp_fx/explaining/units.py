"""Bytes, shares and source lines as a reader wants them."""

from __future__ import annotations

import re
from pathlib import PurePath

_UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
_SOURCE = re.compile(
    r'File "(?P<path>[^"]+)", line (?P<line>\d+), in (?P<where>[^:]+)(?:: (?P<code>.*))?'
)


def bytes_text(size: int) -> str:
    """``"1.5 MiB"`` for 1572864."""
    for unit, name in _UNITS:
        if size >= 0.95 * unit:
            return f"{size / unit:.1f} {name}"
    return f"{size} B"


def share_text(part: int, whole: int) -> str:
    """``"12 %"``; nothing of nothing is 0 %."""
    return f"{100 * part / whole:.0f} %" if whole else "0 %"


def short_source(source: str, *, code: bool = True) -> str:
    """``"modeling.py:62 in forward: x = y"`` for a frame of a stack trace; others as they are."""
    found = _SOURCE.match(source)
    if found is None:
        return source
    text = f": {found['code']}" if code and found["code"] else ""
    return f"{PurePath(found['path']).name}:{found['line']} in {found['where']}{text}"
