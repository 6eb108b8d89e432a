"""What a number was measured on: kind of processor, sizes and versions, no names or paths."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

PACKAGES = ("streambp-fx", "torch", "transformers", "triton")


ROOT = Path(__file__).parent.parent


def describe(device: str) -> dict[str, object]:
    """The machine and the versions, as they go into a results file."""
    facts: dict[str, object] = {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": {name: found for name in PACKAGES if (found := _version(name))},
    }
    if torch.device(device).type == "cuda":
        facts["gpu"] = torch.cuda.get_device_name(device)
        facts["cuda"] = torch.version.cuda
    return facts


def commit() -> str | None:
    """The commit that is checked out, with "+" if files differ from it; ``None`` outside git.

    Results do not count as files: a run writes them as it goes on.
    """
    found = _git("rev-parse", "--short", "HEAD")
    if not found:
        return None
    return found + ("+" if _git("status", "--porcelain", "--", ".", ":!benchmarks/results") else "")


def _git(*arguments: str) -> str | None:
    """What git prints of this checkout; ``None`` where it fails or is not there."""
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
