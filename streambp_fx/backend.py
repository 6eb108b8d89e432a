"""The ``torch.compile`` backend.

Dynamo graph   normalize_attention, defer_outputs, slice_early
AOTAutograd    traces the joint graph, whose partitioner is `passes.pipeline.stream`
run            loops with compiled bodies, glue op by op
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from . import ops as ops  # registers the ops that rewritten graphs call
from ._torch import (
    aot_autograd,
    changed_inductor_settings,
    changed_inputs,
    default_partition,
    disable_current_modes,
    donate_nothing,
)
from .options import Options, parse_options
from .passes.decompositions import decompositions
from .passes.defer_outputs import defer_outputs
from .passes.equal_shapes import equate_token_shapes
from .passes.fixed_floats import fix_floats
from .passes.inputs import InputRole
from .passes.kernel_choice import kernel_choices
from .passes.lower import lower
from .passes.normalize_attention import normalize_attention
from .passes.partition import split
from .passes.pipeline import History, Settings, stream
from .passes.slice_early import slice_early
from .report import Report, record

log = logging.getLogger("streambp_fx")


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
        self.history.keep("captured", graph_module)
        equate_token_shapes(graph_module)
        fix_floats(graph_module)
        self._normalize_attention(graph_module)
        self.history.keep("normalize_attention", graph_module)
        deferral = defer_outputs(
            graph_module, example_inputs, keep_outputs=self.options.keep_outputs
        )
        self.history.keep("defer_outputs", graph_module)
        slice_early(graph_module)
        self.history.keep("slice_early", graph_module)
        self.roles = _input_roles(graph_module, example_inputs)
        compiler = aot_autograd(
            fw_compiler=self._run_graph,
            bw_compiler=self._run_graph,
            inference_compiler=self._inference,
            partition_fn=self._partition,
            decompositions=decompositions(),
        )
        compiled: Callable[..., Any] = compiler(graph_module, list(example_inputs))
        if not deferral.deferred:
            return compiled
        return lambda *args: deferral.rebuild(compiled(*args), args)

    def _normalize_attention(self, graph_module: GraphModule) -> None:
        choices = kernel_choices(graph_module)
        for choice in choices:
            log.warning("%s", choice)
        refusals = [f"attention stays written out: {r}" for r in normalize_attention(graph_module)]
        self.history.notes += choices + refusals

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
        rewritten = stream(joint, num_fwd_outputs, self.roles, self._settings(), self.history)
        self._report()
        if rewritten is None:
            forward, backward = default_partition(
                joint, joint_inputs, num_fwd_outputs=num_fwd_outputs, **kwargs
            )
        else:
            forward, backward = split(rewritten, num_fwd_outputs, changed)
        self.history.graphs.update(forward=forward, backward=backward)
        self._tell()
        return forward, backward

    def _inference(self, graph_module: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        count = len(graph_module.graph.output_node().args[0])  # type: ignore[arg-type]
        rewritten = stream(graph_module, count, self.roles, self._settings(), self.history)
        self._report()
        target = graph_module if rewritten is None else rewritten.graph_module
        self.history.graphs["forward"] = target
        self._tell()
        return self._run_graph(target, inputs)

    def _run_graph(self, graph_module: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        donate_nothing()
        return lower(graph_module, self.options.compile_bodies, self.inductor)

    def _report(self) -> None:
        report = Report.of(self.history)
        record(report)
        if self.options.on_barrier == "ignore" or not report.problems():
            return
        message = "not all of the graph is streamed:\n  " + "\n  ".join(report.problems())
        if self.options.on_barrier == "error":
            raise BarrierError(message)
        warnings.warn(message, BarrierWarning, stacklevel=2)

    def _tell(self) -> None:
        """Log one line at INFO, and the rest at DEBUG."""
        if not log.isEnabledFor(logging.INFO):
            return
        # Not at the top: training without a log needs none of it.
        from .explaining.body_memory import eager_workspace
        from .explaining.step_memory import predict
        from .explaining.units import bytes_text

        report = Report.of(self.history)
        with disable_current_modes():
            peak = predict(self.history, eager_workspace).peak.nbytes
        bodies = " if bodies ran op by op" if self.options.compile_bodies else ""
        log.info("%s; predicted peak %s%s", report.summary(), bytes_text(peak), bodies)
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
