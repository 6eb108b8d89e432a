"""Bytes, shares and source lines as a reader wants them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import PurePath

_UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
_SOURCE = re.compile(
    r'File "(?P<path>[^"]+)", line (?P<line>\d+), in (?P<where>[^:]+)(?:: (?P<code>.*))?'
)


def unit_of(size: float) -> tuple[int, str]:
    """The unit to show ``size`` in: its bytes and its name."""
    return next((unit for unit in _UNITS if size >= 0.95 * unit[0]), (1, "B"))


def bytes_text(size: int) -> str:
    """``"1.5 MiB"`` for 1572864."""
    unit, name = unit_of(size)
    return f"{size} B" if unit == 1 else f"{size / unit:.1f} {name}"


def share_text(part: int, whole: int) -> str:
    """``"12 %"``; nothing of nothing is 0 %."""
    return f"{100 * part / whole:.0f} %" if whole else "0 %"


def line_of(source: str) -> tuple[str, int] | None:
    """``("modeling.py", 62)`` for a frame of a stack trace."""
    found = _SOURCE.match(source)
    return None if found is None else (PurePath(found["path"]).name, int(found["line"]))


def code_of(source: str) -> str:
    """The code of a frame of a stack trace; nothing where it is not known."""
    found = _SOURCE.match(source)
    return (found["code"] or "") if found else ""


def places_text(sources: Sequence[str]) -> str:
    """``"modeling.py:61-63, 90; loss.py:36"``: the lines of each file, in order."""
    lines: dict[str, set[int]] = {}
    others = []
    for source in sources:
        line = line_of(source)
        if line is None:
            others.append(source)
        else:
            lines.setdefault(line[0], set()).add(line[1])
    files = [f"{name}:{', '.join(_runs(sorted(found)))}" for name, found in lines.items()]
    return "; ".join([*files, *dict.fromkeys(others)])


def _runs(numbers: Sequence[int]) -> list[str]:
    """``["61-63", "90"]`` for 61, 62, 63, 90."""
    starts = [n for n in numbers if n - 1 not in numbers]
    ends = [n for n in numbers if n + 1 not in numbers]
    return [
        str(start) if start == end else f"{start}-{end}"
        for start, end in zip(starts, ends, strict=True)
    ]


def first_few(names: Sequence[str], shown: int = 3) -> str:
    """``"a, b, c and 4 more"``; one that would be left out alone is not."""
    if len(names) <= shown + 1:
        return ", ".join(names)
    return f"{', '.join(names[:shown])} and {len(names) - shown} more"


def short_source(source: str, *, code: bool = True) -> str:
    """``"modeling.py:62 in forward: x = y"`` for a frame of a stack trace; others as they are."""
    found = _SOURCE.match(source)
    if found is None:
        return source
    text = f": {found['code']}" if code and found["code"] else ""
    return f"{PurePath(found['path']).name}:{found['line']} in {found['where']}{text}"
