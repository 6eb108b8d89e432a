"""Packages of a peer that do not go with those installed: a folder that its process finds first."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from .published import REQUIREMENTS

FOLDER = Path(__file__).parent.parent / "build" / "peers" / "streambp-1.0"
INSTALLED = "installed.txt"
"""What the folder was made of, so that it is made anew once that is no longer asked for."""


class PeerError(RuntimeError):
    """A peer's packages could not be installed; the message has pip's last line."""


def folder_of_published() -> str:
    """The folder with `published.REQUIREMENTS`, installed at the first call, without torch.

    Raises:
        PeerError: see there.
    """
    asked, installed = "\n".join(REQUIREMENTS), FOLDER / INSTALLED
    if not installed.exists() or installed.read_text() != asked:
        shutil.rmtree(FOLDER, ignore_errors=True)
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
        done = subprocess.run(
            [*command, "--target", str(FOLDER), *REQUIREMENTS],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            last = done.stderr.strip().rpartition("\n")[2]
            raise PeerError(f"pip install {' '.join(REQUIREMENTS)}: {last}")
        installed.write_text(asked)
    return str(FOLDER)
