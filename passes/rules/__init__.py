"""Op rules: how each op relates the dims of its inputs and outputs.

One file is one family of ops; importing this package fills the table. See `spec` for the words.
"""

from __future__ import annotations

from . import (
    along,
    attention,
    creation,
    elementwise,
    indexing,
    matrix,
    parts,
    random,
    reductions,
    views,
)
from .calls import call_of
from .check import check_spec
from .elementwise import elementwise_spec
from .matrix import einsum_spec
from .registry import register_rule, rule_for, ruled_targets
from .spec import Call, Chunk, Rule, Spec

FAMILIES = (
    along,
    attention,
    creation,
    elementwise,
    indexing,
    matrix,
    parts,
    random,
    reductions,
    views,
)

__all__ = [
    "FAMILIES",
    "Call",
    "Chunk",
    "Rule",
    "Spec",
    "call_of",
    "check_spec",
    "einsum_spec",
    "elementwise_spec",
    "register_rule",
    "rule_for",
    "ruled_targets",
]
