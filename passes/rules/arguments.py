"""Reading and replacing the arguments of an op call by their names in its schema."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from streambp_fx._torch import OpOverload

from .spec import Call


def overloads(namespace: Any, *names: str) -> list[OpOverload]:
    """The functional overloads of the named ops that take or give tensors.

    Left out are ``out=`` and in-place variants (the graphs that rules see are functional), and
    TorchScript's overloads on scalars, strings and lists. A name that this version of torch does
    not have is passed over, so that one table serves several versions.
    """
    found: list[OpOverload] = []
    for name in names:
        packet = getattr(namespace, name, None)
        if packet is None:
            continue
        for overload_name in packet.overloads():
            overload = getattr(packet, overload_name)
            if is_functional_tensor_op(overload):
                found.append(overload)
    return found


def is_functional_tensor_op(overload: OpOverload) -> bool:
    """Whether every result is a tensor or a list of tensors and no argument is written to."""
    schema = overload._schema
    if schema.is_mutable or not schema.returns:
        return False
    return all(str(result.type) in ("Tensor", "List[Tensor]") for result in schema.returns)


def argument(call: Call, name: str) -> Any:
    """The value of the argument ``name``, the schema's default if it was not given.

    Raises:
        KeyError: the op has no such argument.
    """
    if name in call.kwargs:
        return call.kwargs[name]
    for index, parameter in enumerate(call.target._schema.arguments):
        if parameter.name == name:
            if not parameter.kwarg_only and index < len(call.args):
                return call.args[index]
            return parameter.default_value
    raise KeyError(f"{call.target} has no argument {name!r}")


def has_argument(call: Call, name: str) -> bool:
    """Whether the op's schema has an argument ``name``."""
    return any(parameter.name == name for parameter in call.target._schema.arguments)


def replaced(
    target: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any], changes: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """``(args, kwargs)`` with the arguments in ``changes`` set to new values.

    An argument that the call left at its default is passed by keyword.
    """
    new_args, new_kwargs = list(args), dict(kwargs)
    positions = {
        parameter.name: index
        for index, parameter in enumerate(target._schema.arguments)
        if not parameter.kwarg_only
    }
    for name, value in changes.items():
        position = positions.get(name)
        if position is not None and position < len(new_args):
            new_args[position] = value
        else:
            new_kwargs[name] = value
    return tuple(new_args), new_kwargs


def tensors_in(args: Any, kwargs: Mapping[str, Any]) -> tuple[torch.Tensor, ...]:
    """The tensors of a call in flattened order: args, then kwargs, lists opened."""
    found: list[torch.Tensor] = []

    def visit(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            for item in value:
                visit(item)

    visit(tuple(args))
    visit(tuple(kwargs.values()))
    return tuple(found)


def outputs_in(result: Any) -> tuple[torch.Tensor | None, ...]:
    """The outputs of a call, lists opened; ``None`` for one that is not a tensor."""
    items = result if isinstance(result, (list, tuple)) else (result,)
    return tuple(item if isinstance(item, torch.Tensor) else None for item in items)
