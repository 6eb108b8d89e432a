"""Comparison of a streamed step with eager: exact in float64, no worse than eager elsewhere."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tests.backend import streamed
from tests.models import EXACT, Batch, loss_of, make_batch, make_dtype_preserving

Grads = dict[str, Tensor | None]
LossFunction = Callable[[Callable[..., Any], Batch], Tensor]


@dataclass(frozen=True)
class Step:
    """What one training step computed. ``grads`` has every parameter, ``None`` where frozen."""

    loss: Tensor
    grads: Grads


def call(function: Callable[..., Any], batch: Batch) -> Tensor:
    """The loss of ``function(**batch)``: the default `LossFunction`."""
    return loss_of(function(**batch))


def run(
    model: nn.Module,
    batch: Batch,
    function: Callable[..., Any] | None = None,
    *,
    loss: LossFunction = call,
    context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    scale: float = 1.0,
) -> Step:
    """One step of ``model``, eager or through its compiled ``function``.

    ``scale`` multiplies the loss before backward and divides the gradients after it, in float64.
    """
    model.zero_grad(set_to_none=True)
    with context():
        value = loss(model if function is None else function, batch)
    (value * scale).backward()
    grads: Grads = {
        name: None if weight.grad is None else weight.grad.detach().clone()
        for name, weight in model.named_parameters()
    }
    if scale != 1.0:
        grads = {n: None if g is None else g.double() / scale for n, g in grads.items()}
    model.zero_grad(set_to_none=True)
    return Step(value.detach().clone(), grads)


def total_norm(grads: Mapping[str, Tensor | None]) -> float:
    """The norm of all gradients together."""
    return sum(g.double().norm().item() ** 2 for g in grads.values() if g is not None) ** 0.5


def assert_same_step(
    got: Step, want: Step, tolerance: float = EXACT, *, floor: float = 1e-4
) -> None:
    """Fail unless loss and gradients agree to ``tolerance``, relative to the norm of each.

    A gradient that is tiny beside the others is compared relative to ``floor`` of all of them: that
    of a key bias, for one, is zero but for rounding, since softmax does not see what it adds.
    """
    assert got.loss.dtype == want.loss.dtype
    torch.testing.assert_close(got.loss, want.loss, rtol=tolerance, atol=tolerance, equal_nan=True)
    assert_same_grads(got.grads, want.grads, tolerance, floor=floor)


def assert_same_grads(
    got: Mapping[str, Tensor | None],
    want: Mapping[str, Tensor | None],
    tolerance: float = EXACT,
    *,
    floor: float = 1e-4,
) -> None:
    """The part of `assert_same_step` about gradients."""
    assert got.keys() == want.keys()
    faults = [
        f"{name}: got {_kind(got[name])}, eager has {_kind(want[name])}"
        for name in want
        if (got[name] is None) is not (want[name] is None)
    ]
    for name, error in relative_errors(got, want, floor=floor).items():
        if not error <= tolerance:  # nan is a fault too
            faults.append(f"{name}: relative error {error:.2e}")
    assert not faults, "gradients differ from eager:\n" + "\n".join(faults)


def relative_errors(
    got: Mapping[str, Tensor | None], want: Mapping[str, Tensor | None], *, floor: float = 1e-4
) -> dict[str, float]:
    """How far each gradient is from the right one, relative to that (see `assert_same_step`).

    One below 1e-5 is compared with that: such gradients are differences of numbers around 1, as of
    a probability from 1 where the loss is nearly 0.
    """
    smallest = floor * total_norm(want)
    errors = {}
    for name, right in want.items():
        left = got[name]
        if left is None or right is None:
            continue
        assert left.shape == right.shape and left.dtype == right.dtype, name
        error = (left - right).norm().item()
        size = max(right.norm().item(), smallest, 1e-5)
        errors[name] = error / size
    return errors


def rounding_of(model: nn.Module, run: Callable[[Any], Step], want: Step) -> float:
    """`EXACT`, or more where rounding alone moves gradients by more.

    It is four times the largest relative change of one when each parameter of ``model`` moves by a
    unit in the last place; ``run`` makes an eager step, ``want`` is that of ``model``.
    """
    moved = copy.deepcopy(model)
    with torch.no_grad():
        for weight in moved.parameters():
            weight.copy_(torch.nextafter(weight, torch.randn_like(weight).sign() * math.inf))
    changes = relative_errors(run(moved).grads, want.grads).values()
    return max(EXACT, *(4 * change for change in changes))


def torch_refuses(error: RuntimeError) -> bool:
    """Whether a compiled step failed on what torch itself takes from no backend.

    Writes to views that ``as_strided`` made of views; and, after a graph break, writes of one graph
    to what another keeps for its backward.
    """
    refusals = ("as_strided() is non-compositional", "modified by an inplace operation")
    return any(refusal in str(error) for refusal in refusals)


def _kind(grad: Tensor | None) -> str:
    return "no gradient" if grad is None else "a gradient"


def to_float64(batch: Batch) -> Batch:
    """``batch`` with its floating-point tensors (masks) in float64."""
    return {
        key: value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
        for key, value in batch.items()
    }


def assert_exact_fp64(
    model: nn.Module,
    batch: Batch,
    *,
    tolerance: float = EXACT,
    loss: LossFunction = call,
    dynamic: bool | None = None,
    **options: Any,
) -> None:
    """Fail unless a streamed step of ``model`` in float64 equals eager's.

    The model's own casts to float32 become dtype preserving in both runs (see `tests.models`).
    """
    model = make_dtype_preserving(copy.deepcopy(model))
    batch = to_float64(batch)
    want = run(model, batch, loss=loss)
    got = run(model, batch, streamed(model, dynamic=dynamic, **options), loss=loss)
    assert_same_step(got, want, tolerance)


def assert_error_not_larger_than_eager(
    build: Callable[[int], nn.Module],
    dtype: torch.dtype,
    *,
    batch: Callable[[int], Batch] = lambda seed: make_batch(2, 96, seed=seed),
    seeds: int = 5,
    autocast: torch.dtype | None = None,
    scale: float = 1.0,
    eps_dtype: torch.dtype | None = None,
    **options: Any,
) -> None:
    """Fail if streaming loses precision that eager in the same dtype keeps.

    ``build(seed)`` makes a model. The truth is a float64 run of the same (rounded) weights. Over
    ``seeds``, the mean error of all gradients together is at most 1.1 times eager's; the error of
    each tensor at most 2 times eager's plus 4 eps of the norm of all gradients.
    """

    def context() -> AbstractContextManager[Any]:
        return torch.autocast("cpu", autocast) if autocast else nullcontext()

    eps = torch.finfo(eps_dtype or autocast or dtype).eps
    model = build(0).to(dtype)
    function = streamed(model, **options)
    eager_total = streamed_total = 0.0
    faults = []
    for seed in range(seeds):
        model.load_state_dict(build(seed).state_dict())
        data = batch(seed)
        exact_model = make_dtype_preserving(copy.deepcopy(model))
        exact = run(exact_model, to_float64(data)).grads
        exact = {name.removeprefix("model."): grad for name, grad in exact.items()}
        eager = run(model, data, context=context, scale=scale).grads
        got = run(model, data, function, context=context, scale=scale).grads
        eager_errors, got_errors = _errors(eager, exact), _errors(got, exact)
        slack = 4 * eps * total_norm(exact)
        faults += [
            f"seed {seed}, {name}: error {error:.3e}, eager's {eager_errors[name]:.3e}"
            for name, error in got_errors.items()
            if not error <= 2 * eager_errors[name] + slack
        ]
        eager_total += _together(eager_errors)
        streamed_total += _together(got_errors)
    assert not faults, "\n".join(faults)
    assert streamed_total <= 1.1 * eager_total, (
        f"mean gradient error {streamed_total / seeds:.4e}, eager's {eager_total / seeds:.4e}"
    )


def _errors(got: Grads, exact: Grads) -> dict[str, float]:
    errors = {}
    for name, right in exact.items():
        if right is None:
            continue
        left = got[name]
        assert left is not None, f"{name} has no gradient"
        errors[name] = (left.double() - right).norm().item()
    return errors


def _together(errors: Mapping[str, float]) -> float:
    return sum(error**2 for error in errors.values()) ** 0.5
