"""The ``torch.compile`` backend.

Dynamo graph   `passes.captured.rewrite_captured`
AOTAutograd    traces the joint graph, whose partitioner is `passes.pipeline.stream`
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
    aot_autograd,
    changed_inductor_settings,
    changed_inputs,
    copied_graph,
    default_partition,
    disable_current_modes,
    donate_nothing,
    ignore_messages_told_once,
)
from .options import Options, parse_options
from .passes.captured import Untouched, rewrite_captured
from .passes.decompositions import decompositions
from .passes.inputs import InputRole
from .passes.lower import lower
from .passes.partition import split
from .passes.pipeline import History, Settings, stream
from .passes.rewrite import Rewritten
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
        self.roles: list[InputRole] = []
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
            )
        )
        if deferral is None:
            untouched.restore()
        self.roles = _input_roles(graph_module, example_inputs)
        compiler = aot_autograd(
            fw_compiler=self._run_graph,
            bw_compiler=self._run_graph,
            inference_compiler=self._inference,
            partition_fn=self._partition,
            decompositions=decompositions(),
        )
        compiled: Callable[..., Any] = compiler(graph_module, list(example_inputs))
        if deferral is None or not deferral.deferred:
            return compiled
        return lambda *args: deferral.rebuild(compiled(*args), args)

    def _attempt(self, passes: Callable[[], T]) -> T | None:
        """What ``passes`` return; ``None``, with the reason in the history, where one fails."""
        try:
            return passes()
        except Exception as error:  # whatever it is, the graph can run unstreamed
            log.debug("a pass failed", exc_info=True)
            self.history.refuse(error)
            if self.options.on_barrier == "error":
                self._report(error)
        return None

    def _settings(self) -> Settings:
        options = self.options
        return Settings(
            options.chunk_size,
            options.head_chunk_size,
            options.accumulation_dtype,
            self.for_accelerator,
        )

    def _partition(
        self, joint: GraphModule, joint_inputs: Any, *, num_fwd_outputs: int, **kwargs: Any
    ) -> tuple[GraphModule, GraphModule]:
        changed = changed_inputs(joint)

        def passes() -> tuple[GraphModule, GraphModule] | None:
            rewritten = self._stream(joint, num_fwd_outputs)
            return None if rewritten is None else split(rewritten, num_fwd_outputs, changed)

        halves = self._attempt(passes)
        self._report()
        if halves is None:
            halves = default_partition(
                joint, joint_inputs, num_fwd_outputs=num_fwd_outputs, **kwargs
            )
        self.history.graphs.update(forward=halves[0], backward=halves[1])
        self._tell()
        return halves

    def _inference(self, graph_module: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        count = len(graph_module.graph.output_node().args[0])  # type: ignore[arg-type]
        rewritten = self._attempt(lambda: self._stream(graph_module, count))
        self._report()
        target = graph_module if rewritten is None else rewritten.graph_module
        self.history.graphs["forward"] = target
        self._tell()
        return self._run_graph(target, inputs)

    def _stream(self, traced: GraphModule, num_fwd_outputs: int) -> Rewritten | None:
        """The traced graph with loops; ``None``, with the reason in the history, without any."""
        if self.history.unstreamed is not None:  # a pass on the captured graph failed
            return None
        copy = GraphModule(traced, copied_graph(traced.graph))
        return stream(copy, num_fwd_outputs, self.roles, self._settings(), self.history)

    def _run_graph(self, graph_module: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        donate_nothing()
        return lower(graph_module, self.options.compile_bodies, self.inductor)

    def _report(self, cause: Exception | None = None) -> None:
        report = Report.of(self.history)
        record(report)
        if self.options.on_barrier == "ignore" or not report.problems():
            return
        message = "not all of the graph is streamed:\n  " + "\n  ".join(report.problems())
        if self.options.on_barrier == "error":
            raise BarrierError(message) from cause
        warnings.warn(message, BarrierWarning, stacklevel=2)

    def _predicted_peak(self) -> str:
        # Not at the top: training without a log needs none of it.
        from .explaining.body_memory import eager_workspace
        from .explaining.step_memory import predict
        from .explaining.units import bytes_text

        try:
            with disable_current_modes():
                peak = predict(self.history, eager_workspace).peak.nbytes
        except Exception:  # a line of a log is no reason to end a step
            log.debug("the peak could not be predicted", exc_info=True)
            return "no peak predicted"
        bodies = " if bodies ran op by op" if self.options.compile_bodies else ""
        return f"predicted peak {bytes_text(peak)}{bodies}"

    def _tell(self) -> None:
        """Log one line at INFO, and the rest at DEBUG."""
        if not log.isEnabledFor(logging.INFO):
            return
        report = Report.of(self.history)
        log.info("%s; %s", report.summary(), self._predicted_peak())
        for detail in report.details():
            log.debug("%s", detail)


def _input_roles(graph_module: GraphModule, example_inputs: Sequence[Any]) -> list[InputRole]:
    """For each input, whether it is a parameter, a module's buffer, or data."""
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    roles = []
    for node, value in zip(placeholders, example_inputs, strict=True):
        if isinstance(value, torch.nn.Parameter):
            roles.append(InputRole.PARAMETER)
        elif "_dynamo_static_input_type" in node.meta.get("tensor_dict", {}):
            roles.append(InputRole.BUFFER)
        else:
            roles.append(InputRole.DATA)
    return roles
