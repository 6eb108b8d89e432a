"""`check`: loss and gradients of one step, streamed against unstreamed.

The step is run four times: streamed and not, in the program's own dtypes and in float64. In float64
the two agree to rounding, since streaming changes the order of sums alone. In the program's own
dtypes neither is right; what can be asked is that streaming loses no more than eager does.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from streambp_fx._torch import TorchDispatchMode, pytree

from .backend import Compilation
from .explaining.loss import NoLossError, loss_of
from .explaining.trace import with_own_cache
from .measure import gradient_errors
from .options import Options, parse_options
from .passes.loops import chunk_count
from .report import Report

Gradients = dict[str, Tensor | None]

FP64_TOLERANCE = 1e-10
"""How far float64 gradients may be apart, relative, in a program that truly computes in float64."""
ROUNDINGS = 16
"""In a program with narrower parts: how many of their roundings gradients may be apart."""
WORSE_THAN_EAGER = 2.0
"""How many times eager's error in the program's own dtypes a parameter's may be."""


class RandomnessError(RuntimeError):
    """The program draws random numbers, which streaming draws otherwise than eager does."""


class NoGradientError(ValueError):
    """No parameter of the program has a gradient that could be compared."""


@dataclass(frozen=True)
class Row:
    """The gradient of one parameter. Errors are relative to its norm.

    apart
        Streamed from eager, in the program's own dtypes.
    eager_error, streamed_error
        Of each in the program's own dtypes, from eager in float64.
    fp64_apart
        Streamed from eager, both in float64.
    right
        Whether `fp64_apart` is within the tolerance and `streamed_error` not much over eager's.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    apart: float
    eager_error: float
    streamed_error: float
    fp64_apart: float
    right: bool


@dataclass(frozen=True)
class Check:
    """What `check` found; prints as a table by parameter.

    loss, loss_streamed, loss_fp64, loss_fp64_streamed
        The loss in the four runs.
    rows
        One for each parameter with a gradient.
    fp64_tolerance
        How far float64 gradients may be apart.
    narrowest
        The narrowest dtype in which the program computes even in float64; ``"float64"`` if none.
    reports
        What was streamed, of each graph.
    """

    loss: float
    loss_streamed: float
    loss_fp64: float
    loss_fp64_streamed: float
    rows: tuple[Row, ...]
    fp64_tolerance: float
    narrowest: str
    reports: tuple[Report, ...] = field(repr=False)

    @property
    def right(self) -> bool:
        """Whether losses and gradients are right."""
        return self.loss_right and all(row.right for row in self.rows)

    @property
    def loss_right(self) -> bool:
        """Whether the float64 losses agree."""
        difference = abs(self.loss_fp64_streamed - self.loss_fp64)
        return difference <= self.fp64_tolerance * max(abs(self.loss_fp64), 1e-300)

    @property
    def chunks(self) -> int:
        """The most chunks that a loop went through; 1 or 0 say that chunking was not tried."""
        counts = [
            chunk_count(report.tokens, loop.chunk_size)
            for report in self.reports
            for loop in report.loops
        ]
        return max(counts, default=0)

    @property
    def problems(self) -> tuple[str, ...]:
        """What was left unstreamed, in words."""
        return tuple(problem for report in self.reports for problem in report.problems())

    def to_dict(self) -> dict[str, Any]:
        """All of it, of values that JSON has."""
        data = asdict(self) | {"right": self.right, "chunks": self.chunks}
        del data["reports"]
        return data | {"unstreamed": list(self.problems)}

    def __str__(self) -> str:
        from .checking_text import to_text

        return to_text(self)


def check(
    program: Callable[..., Any],
    *args: Any,
    options: Mapping[str, Any] | None = None,
    on_progress: Callable[[str], object] = lambda text: None,
    **kwargs: Any,
) -> Check:
    """Run one step streamed and unstreamed, and compare losses and parameters' gradients.

    Works on copies: the program keeps its weights, gradients and dtypes. It takes the memory of an
    eager step in float64, so that a short sequence is the thing to give; with a ``chunk_size`` that
    is shorter still, several chunks are tried.

    Args:
        program: a model that returns a loss, or a function that computes one from models.
        args, kwargs: what it is called with.
        options: as given to ``torch.compile(..., backend="streambp", options=...)``.
        on_progress: called with a line of text as things get done.

    Raises:
        RandomnessError: the program draws random numbers; ``model.eval()`` switches dropout off.
        NoLossError: the program returns no scalar loss.
        NoGradientError: there is no gradient to compare.
        OptionError: an unknown option or a bad value.
    """
    parsed = parse_options({"on_barrier": "ignore", **(options or {})})
    tree = (program, args, kwargs)
    reports: list[Report] = []
    on_progress("eager, in float64")
    in_fp64 = _copied(tree, torch.float64)
    with _Watch() as watch:
        exact_loss, exact = _step(in_fp64)
    del in_fp64
    if watch.random is not None:
        raise RandomnessError(
            f"the program draws random numbers ({watch.random}), which streaming draws otherwise "
            "than eager does; switch them off, as model.eval() does for dropout"
        )
    if all(gradient is None for gradient in exact.values()):
        raise NoGradientError("no parameter of the program has a gradient")
    on_progress("streamed, in float64")
    exact_streamed_loss, exact_streamed = _step(_copied(tree, torch.float64), parsed, reports)
    on_progress("eager, in its own dtypes")
    own_loss, own = _step(_copied(tree, None))
    on_progress("streamed, in its own dtypes")
    streamed_loss, streamed = _step(_copied(tree, None), parsed, [])
    tolerance = _tolerance(watch.narrowest)
    return Check(
        own_loss,
        streamed_loss,
        exact_loss,
        exact_streamed_loss,
        tuple(_rows(own, streamed, exact, exact_streamed, tolerance)),
        tolerance,
        str(watch.narrowest).removeprefix("torch."),
        tuple(reports),
    )


class _Watch(TorchDispatchMode):
    """Notes the first op that draws random numbers, and the narrowest dtype that is computed in."""

    def __init__(self) -> None:
        super().__init__()
        self.random: str | None = None
        self.narrowest = torch.float64

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        # Attention has the tag too, and draws nothing without dropout.
        seeded = self.random is None and torch.Tag.nondeterministic_seeded in func.tags
        before = _random_states() if seeded else []
        results = func(*args, **(kwargs or {}))
        if seeded and not all(map(torch.equal, before, _random_states())):
            self.random = str(func)
        for leaf in pytree.tree_leaves(results):
            if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dim() > 0:
                self.narrowest = max(self.narrowest, leaf.dtype, key=_eps)
        return results


def _random_states() -> list[Tensor]:
    """The states of the default generators."""
    return [torch.get_rng_state(), *torch.cuda.get_rng_state_all()]


def _eps(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps


def _tolerance(narrowest: torch.dtype) -> float:
    """How far float64 gradients may be apart in a program that computes in ``narrowest`` too."""
    return FP64_TOLERANCE if narrowest is torch.float64 else ROUNDINGS * _eps(narrowest)


def _copied(tree: Any, dtype: torch.dtype | None) -> Any:
    """``tree`` with copies of its modules and tensors, floating-point ones in ``dtype``."""
    memo: dict[int, Any] = {}

    def copied(leaf: Any) -> Any:
        if isinstance(leaf, nn.Module):
            module = copy.deepcopy(leaf, memo)
            return module if dtype is None else module.to(dtype)
        if not isinstance(leaf, Tensor):
            return leaf
        value = leaf.detach().clone()
        if dtype is not None and value.is_floating_point():
            value = value.to(dtype)
        return value.requires_grad_(leaf.requires_grad)

    return pytree.tree_map(copied, tree)


def _step(
    tree: Any, options: Options | None = None, reports: list[Report] | None = None
) -> tuple[float, Gradients]:
    """Loss and gradients of one step, streamed where ``options`` are given."""
    program, args, kwargs = tree
    call = program
    if options is not None and reports is not None:
        call = _streamed(program, options, reports)
    parameters = _parameters(tree)
    for parameter in parameters.values():
        parameter.grad = None
    loss = loss_of(call(*args, **kwargs))
    if loss is None:
        raise NoLossError("the program's loss depends on nothing that needs a gradient")
    loss.backward()
    return float(loss.detach()), {name: value.grad for name, value in parameters.items()}


def _streamed(
    program: Callable[..., Any], options: Options, reports: list[Report]
) -> Callable[..., Any]:
    def backend(graph_module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        compilation = Compilation(options)
        compiled = compilation.compile(graph_module, inputs)
        reports.append(Report.of(compilation.history, compilation.segments))
        return compiled

    compiled: Callable[..., Any] = torch.compile(
        with_own_cache(program), backend=backend, dynamic=False
    )
    return compiled


def _parameters(tree: Any) -> dict[str, nn.Parameter]:
    """The parameters of all modules, by names that say of which module where there are several."""
    modules = [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, nn.Module)]
    found: dict[str, nn.Parameter] = {}
    for index, module in enumerate(modules):
        prefix = f"{index}." if len(modules) > 1 else ""
        for name, parameter in module.named_parameters():
            found[prefix + name] = parameter
    return found


def _rows(
    own: Gradients,
    streamed: Gradients,
    exact: Gradients,
    exact_streamed: Gradients,
    tolerance: float,
) -> list[Row]:
    apart = gradient_errors(streamed, own)
    eager_errors = gradient_errors(own, exact)
    streamed_errors = gradient_errors(streamed, exact)
    fp64_apart = gradient_errors(exact_streamed, exact)
    norms = {name: float(g.norm()) for name, g in exact.items() if g is not None}
    together = sum(norm**2 for norm in norms.values()) ** 0.5
    rows = []
    for name, gradient in own.items():
        if gradient is None and all(grads[name] is None for grads in (streamed, exact_streamed)):
            continue
        shape, dtype = ((), None) if gradient is None else (gradient.shape, gradient.dtype)
        eps = _eps(dtype) if dtype is not None else 0.0
        # What is small beside the other gradients has their rounding in it, not its own alone.
        slack = 4 * eps * max(1.0, together / norms[name] if norms.get(name) else 1e6)
        allowed = WORSE_THAN_EAGER * eager_errors[name] + slack
        right = fp64_apart[name] <= tolerance and streamed_errors[name] <= allowed
        rows.append(
            Row(
                name,
                tuple(shape),
                str(dtype).removeprefix("torch."),
                apart[name],
                eager_errors[name],
                streamed_errors[name],
                fp64_apart[name],
                right,
            )
        )
    return rows
