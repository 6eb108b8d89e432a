"""The ``torch.compile`` backend.

Dynamo graph   `passes.captured.rewrite_captured`; `passes.segments` splits it
AOTAutograd    `joint` has it trace the joint graph, which `passes.pipeline.stream` rewrites
run            loops with compiled bodies, glue op by op

Passes work on copies, or on what can be brought back: where one fails, the graph runs unstreamed
as it was, and the report says why.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch.fx import GraphModule

from . import ops as ops  # registers the ops that rewritten graphs call
from ._torch import (
    changed_inductor_settings,
    disable_current_modes,
    donate_nothing,
    ignore_messages_told_once,
)
from .chain import compile_chain
from .joint import JointCompiler
from .options import Options, parse_options
from .passes.captured import Untouched, rewrite_captured
from .passes.lower import lower
from .passes.pipeline import History, Settings
from .passes.segments import Chain, split_segments
from .report import Report, record

log = logging.getLogger("streambp_fx")

T = TypeVar("T")

# torch imports this module when ``torch.compile`` is called, before anything is traced.
ignore_messages_told_once()


class BarrierError(RuntimeError):
    """A part of the graph could not be streamed, and ``on_barrier="error"``."""


class BarrierWarning(UserWarning):
    """A part of the graph could not be streamed and runs on whole tensors."""


def streambp(
    graph_module: GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Compile one Dynamo graph; what ``torch.compile(model, backend="streambp")`` calls.

    Args:
        graph_module: the graph that Dynamo captured.
        example_inputs: its inputs (fake or real tensors, and sizes).
        options: see `streambp_fx.options.Options`.
        mode: an Inductor mode for the loop bodies.

    Returns:
        A callable that takes the graph's inputs and returns its outputs.

    Raises:
        OptionError: an unknown option or a bad value.
        BarrierError: a part can not be streamed and ``on_barrier="error"``.
    """
    return Compilation(parse_options(options, mode)).compile(graph_module, example_inputs)


class Compilation:
    """The state of one backend call: options, what was found, and Inductor's settings.

    ``for_accelerator``: whether what is traced on the CPU shall run on an accelerator.
    """

    def __init__(self, options: Options, *, for_accelerator: bool = False) -> None:
        self.options = options
        self.for_accelerator = for_accelerator
        self.history = History()
        self.segments: list[History] = []
        self._cause: Exception | None = None
        # Inductor's settings live in context variables, and bodies compile later, some of them
        # in autograd's thread: what differs from the defaults here is set again there.
        self.inductor = {**changed_inductor_settings(), **options.inductor}

    def compile(
        self, graph_module: GraphModule, example_inputs: Sequence[Any]
    ) -> Callable[..., Any]:
        untouched = Untouched(graph_module)
        deferral = self._attempt(
            lambda: rewrite_captured(
                graph_module, example_inputs, self.history, keep_outputs=self.options.keep_outputs
            ),
            self.history,
        )
        if deferral is None:
            untouched.restore()
        compiled = None if deferral is None else self._split(graph_module, example_inputs)
        if compiled is None:
            compiled, history = self._compile_segment(graph_module, example_inputs)
            self.segments = [history]
        self._report()
        self._tell(compiled, example_inputs)
        if deferral is None or not deferral.deferred:
            return compiled
        return lambda *args: deferral.rebuild(compiled(*args), args)

    def _split(
        self, graph_module: GraphModule, example_inputs: Sequence[Any]
    ) -> Callable[..., Any] | None:
        """What runs a training step as segments; ``None`` of a graph that is not split."""
        tensors = [one for one in example_inputs if isinstance(one, torch.Tensor)]
        if not torch.is_grad_enabled() or not any(tensor.requires_grad for tensor in tensors):
            return None
        try:
            chain = split_segments(graph_module, self.history.notes)
            return None if chain is None else self._compile_chain(chain, example_inputs)
        except Exception as error:  # the graph, which is as it was, can be streamed as one
            log.debug("the graph could not be split", exc_info=True)
            self.history.notes.append(f"not split into segments: {type(error).__name__}: {error}")
        return None

    def _compile_chain(self, chain: Chain, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        def compile_segment(
            segment: GraphModule, inputs: Sequence[Any], number: int
        ) -> tuple[Callable[..., Any], History]:
            return self._compile_segment(segment, inputs, number, chain)

        self.history.keep("chain", chain.graph_module)
        self.segments = compile_chain(chain.graph_module, example_inputs, compile_segment)
        return chain.graph_module.forward

    def _compile_segment(
        self,
        segment: GraphModule,
        inputs: Sequence[Any],
        number: int = 0,
        chain: Chain | None = None,
    ) -> tuple[Callable[..., Any], History]:
        """What runs in place of a segment, or of a whole graph, and what was found in it."""
        history = History(keep_copies=self.history.keep_copies, unstreamed=self.history.unstreamed)
        history.keep("captured", segment)
        options = self.options
        settings = Settings(
            options.chunk_size,
            options.head_chunk_size,
            options.accumulation_dtype,
            self.for_accelerator,
            chain.widest if chain is not None else None,
            number,
            chain.attended if chain is not None else (),
        )
        compiler = JointCompiler(settings, history, self._attempt, self._run_graph)
        return compiler.compile(segment, inputs), history

    def _attempt(self, passes: Callable[[], T], history: History) -> T | None:
        """What ``passes`` return; ``None``, with the reason in the history, where one fails."""
        try:
            return passes()
        except Exception as error:  # whatever it is, the graph can run unstreamed
            log.debug("a pass failed", exc_info=True)
            history.refuse(error)
            self._cause = error
        return None

    def _run_graph(self, graph_module: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        donate_nothing()
        return lower(graph_module, self.options.compile_bodies, self.inductor)

    def _report(self) -> None:
        report = Report.of(self.history, self.segments)
        record(report)
        if self.options.on_barrier == "ignore" or not report.problems():
            return
        message = "not all of the graph is streamed:\n  " + "\n  ".join(report.problems())
        if self.options.on_barrier == "error":
            raise BarrierError(message) from self._cause
        warnings.warn(message, BarrierWarning, stacklevel=2)

    def _predicted_peak(self, compiled: Callable[..., Any], inputs: Sequence[Any]) -> str:
        # Not at the top: training without a log needs none of it.
        from .explaining.body_memory import eager_workspace
        from .explaining.trace import predict
        from .explaining.units import bytes_text

        try:
            with disable_current_modes():
                peak = predict(compiled, inputs, self.segments, eager_workspace).peak.nbytes
        except Exception:  # a line of a log is no reason to end a step
            log.debug("the peak could not be predicted", exc_info=True)
            return "no peak predicted"
        bodies = " if bodies ran op by op" if self.options.compile_bodies else ""
        return f"predicted peak {bytes_text(peak)}{bodies}"

    def _tell(self, compiled: Callable[..., Any], inputs: Sequence[Any]) -> None:
        """Log one line at INFO, and the rest at DEBUG."""
        if not log.isEnabledFor(logging.INFO):
            return
        report = Report.of(self.history, self.segments)
        log.info("%s; %s", report.summary(), self._predicted_peak(compiled, inputs))
        for detail in report.details():
            log.debug("%s", detail)
