"""Each private torch API that the project uses still exists and still takes what it is given.

When a release of torch turns one of these red, ``streambp_fx/_torch.py`` is the file to mend.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch

from streambp_fx import _torch

PARAMETERS: dict[str, tuple[str, ...]] = {
    "_disable_current_modes": (),
    "_extract_fwd_bwd_modules": (
        "joint_module",
        "saved_values",
        "saved_sym_nodes",
        "num_fwd_outputs",
    ),
    "active_fake_mode": (),
    "aot_autograd": ("kwargs",),
    "aot_function": ("fn", "fw_compiler", "bw_compiler", "decompositions"),
    "compile_fx_inner": ("gm", "example_inputs"),
    "default_partition": ("joint_module", "_joint_inputs", "num_fwd_outputs"),
    "detect_fake_mode": ("inputs",),
    "enable_python_dispatcher": (),
    "free_unbacked_symbols": ("x",),
    "fx_graph_cse": ("fx_g",),
    "get_gpu_type": (),
    "is_big_gpu": ("index_or_device",),
    "make_boxed_func": ("f",),
    "make_fx": ("f", "decomposition_table"),
    "select_decomp_table": (),
    "statically_known_true": ("x",),
    "sympy_interp": ("analysis", "env", "expr"),
    "to_fake_tensor": ("t", "fake_mode"),
    "tracing": ("context",),
}
"""For each function that `_torch` imports: the names of the parameters that the project passes."""


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


def _value(name: str) -> Any:
    module, original = IMPORTED[name]
    return getattr(importlib.import_module(module), original)


@pytest.mark.parametrize("name", sorted(IMPORTED))
def test_private_api_exists_and_takes_what_it_is_given(name: str) -> None:
    value = _value(name)
    if not inspect.isroutine(value):
        return  # of a class, a module or a table, that it exists is all that can be asked
    assert name in PARAMETERS, f"{name} needs a row in PARAMETERS"
    signature = inspect.signature(value)
    missing = [parameter for parameter in PARAMETERS[name] if parameter not in signature.parameters]
    assert not missing, f"{name}{signature} lacks {missing}"


def test_no_row_outlives_its_import() -> None:
    assert PARAMETERS.keys() <= IMPORTED.keys()


@pytest.mark.parametrize("keep", [True, False])
def test_a_backward_tells_whether_it_may_run_again(keep: bool) -> None:
    said = []

    class Ask(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            said.append(_torch.backward_may_run_again())
            return grad

    Ask.apply(torch.ones((), requires_grad=True)).backward(retain_graph=keep)
    assert said == [keep] and _torch.backward_may_run_again()


def test_backward_graphs_can_be_compiled_at_once() -> None:
    assert _torch.functorch_config.force_non_lazy_backward_lowering is False
