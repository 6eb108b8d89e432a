"""The one home of private torch APIs.

Everything that this project uses of torch and that torch does not document as public is imported
here, each with a line that says what for, and from here by the other modules. A release of torch
that moves or changes one of them then fails in this file and in its test, which checks every
name's existence and signature, and nowhere else.
"""

from __future__ import annotations

