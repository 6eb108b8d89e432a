"""The table from op overload to rule, and the public way to add to it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from .spec import Rule

_RULES: dict[Any, Rule] = {}
_TAG_RULES: list[tuple[Callable[[Any], bool], Rule]] = []


def register_rule(*targets: Any) -> Callable[[Rule], Rule]:
    """Register the decorated function as the rule of each op overload in ``targets``.

    A later registration replaces an earlier one, so that users can override a rule. Example, for
    an op that works on each row of its first input alone::

        @register_rule(torch.ops.mylib.rotate.default)
        def rotate(call):
            return elementwise_spec(call)

    Raises:
        TypeError: a target is neither an op overload nor a callable.
    """
    for target in targets:
        if not callable(target):
            raise TypeError(
                "register_rule takes op overloads such as torch.ops.aten.add.Tensor, "
                f"got {target!r}"
            )

    def decorate(rule: Rule) -> Rule:
        for target in targets:
            _RULES[target] = rule
        return rule

    return decorate


def register_tag_rule(applies: Callable[[Any], bool]) -> Callable[[Rule], Rule]:
    """Register the decorated function as the rule of every target that ``applies`` accepts.

    It is asked only for targets that have no rule of their own; used for ops that torch, or a
    user's library, tags as pointwise.
    """

    def decorate(rule: Rule) -> Rule:
        _TAG_RULES.append((applies, rule))
        return rule

    return decorate


def rule_for(target: Any) -> Rule | None:
    """The rule of ``target``, or ``None`` (which makes it a barrier, never a guess)."""
    rule = _RULES.get(target)
    if rule is not None:
        return rule
    return next((rule for applies, rule in _TAG_RULES if applies(target)), None)


def ruled_targets() -> Iterable[Any]:
    """Every op overload that is registered by name; those ruled by a tag are not listed."""
    return _RULES.keys()
