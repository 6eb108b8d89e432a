"""Each private torch API that the project uses still exists and still takes what it is given.

When a release of torch turns one of these red, ``streambp_fx/_torch.py`` is the file to mend.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from pathlib import Path

import pytest

from streambp_fx import _torch

PARAMETERS: dict[str, tuple[str, ...]] = {
    "aot_function": ("fn", "fw_compiler", "bw_compiler", "decompositions"),
    "make_boxed_func": ("f",),
    "select_decomp_table": (),
}
"""For each function of `_torch`: the names of the parameters that the project passes."""

NO_SIGNATURE = {"DeviceType", "OpOverload", "inductor_prims", "op_db", "profile"}
"""Classes, constants and bound C++ names: that they exist is all that can be asked of them."""


def _imported_from_torch() -> dict[str, tuple[str, str]]:
    """Name in `_torch` -> (module it comes from, its name there)."""
    names = {}
    tree = ast.parse(Path(_torch.__file__).read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            for alias in node.names:
                names[alias.asname or alias.name] = (node.module, alias.name)
    return names


IMPORTED = _imported_from_torch()


@pytest.mark.parametrize("name", sorted(IMPORTED))
def test_private_api_is_there(name: str) -> None:
    module, original = IMPORTED[name]
    assert hasattr(importlib.import_module(module), original)
    assert (name in PARAMETERS) != (name in NO_SIGNATURE), (
        f"list {name} in PARAMETERS, or in NO_SIGNATURE if it is no function"
    )


@pytest.mark.parametrize("name", sorted(PARAMETERS))
def test_private_api_takes_what_it_is_given(name: str) -> None:
    taken = inspect.signature(getattr(_torch, name)).parameters
    missing = [parameter for parameter in PARAMETERS[name] if parameter not in taken]
    assert not missing, f"{name}{inspect.signature(getattr(_torch, name))} lacks {missing}"


def test_no_row_outlives_its_import() -> None:
    assert set(PARAMETERS) | NO_SIGNATURE == set(IMPORTED)
