"""The one home of private torch APIs.

Everything that this project uses of torch and that torch does not document as public is imported
here, each with a line that says what for, and from here by the other modules. A release of torch
that moves or changes one of them then fails in this file and in its test, which checks every
name's existence and signature, and nowhere else.
"""

from __future__ import annotations

import copy
import logging
import math
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

# Runs composite ops on symbolic sizes, as Dynamo does.
from torch._dispatch.python import enable_python_dispatcher as enable_python_dispatcher

# Dynamo's settings, among them the calls that it leaves out.
from torch._dynamo import config as dynamo_config

# Turns a Dynamo graph into forward and backward graphs, with compilers and a partitioner of ours.
from torch._dynamo.backends.common import aot_autograd as aot_autograd

# What Inductor asks about a CUDA device, and its answers for compile workers.
from torch._dynamo.device_interface import CudaInterface as CudaInterface
from torch._dynamo.device_interface import (
    caching_worker_current_devices,
    caching_worker_device_properties,
)

# Names the origin of a body's own sizes.
from torch._dynamo.source import ConstantSource as ConstantSource

# Notes which symbolic floats are constants; AOTAutograd starts Dynamo anew for any other.
from torch._dynamo.symbolic_convert import TensorifyState

# The fake tensor that stands for an input while a graph is compiled, its symbolic sizes included.
from torch._dynamo.utils import to_fake_tensor as to_fake_tensor

# AOTAutograd's settings, among them when backward graphs are compiled.
from torch._functorch import config as functorch_config

# Marks the new value of an input that a traced program changes in place.
from torch._functorch._aot_autograd.descriptors import InputMutationAOTOutput

# Traces a function's forward and backward, as torch.compile does.
from torch._functorch.aot_autograd import aot_function as aot_function

# Marks a compiled function that takes its inputs as one list, which it may empty.
from torch._functorch.aot_autograd import make_boxed_func as make_boxed_func

# Merges common subexpressions of a joint graph.
from torch._functorch.compile_utils import fx_graph_cse as fx_graph_cse

# Cuts a joint graph into forward and backward by the values that are saved.
from torch._functorch.partitioners import _extract_fwd_bwd_modules

# The stock partitioner, for graphs that are not streamed.
from torch._functorch.partitioners import default_partition as default_partition

# Gives a compiled body the tracing context that Inductor reads its fake mode from.
from torch._guards import TracingContext as TracingContext

# The fake mode that is on.
from torch._guards import active_fake_mode as active_fake_mode

# Finds the fake tensor mode that a graph was traced with.
from torch._guards import detect_fake_mode as detect_fake_mode
from torch._guards import tracing as tracing

# Inductor's settings, which are per thread.
from torch._inductor import config as inductor_config

# Importing it fills torch.ops.prims: iota, convert_element_type, and Inductor's own fma.
from torch._inductor import inductor_prims as inductor_prims

# Holds the one chooser of kernels, which knows the GPU that it was made for.
from torch._inductor import select_algorithm as select_algorithm

# The first caches what system it runs on, its GPU included; the others compile and load source.
from torch._inductor.codecache import CacheBase
from torch._inductor.codecache import CppCodeCache as CppCodeCache
from torch._inductor.codecache import PyCodeCache as PyCodeCache

# Compiles one graph below Dynamo and AOTAutograd.
from torch._inductor.compile_fx import compile_fx_inner as compile_fx_inner

# The decompositions that Inductor's graphs have been through.
from torch._inductor.decomposition import select_decomp_table as select_decomp_table

# A graph on its way through Inductor: its buffers and the code around its kernels.
from torch._inductor.graph import GraphLowering as GraphLowering

# One of the results of an op that returns several.
from torch._inductor.ir import MultiOutput as MultiOutput

# Caches the properties of a GPU that kernels are written for.
from torch._inductor.runtime.hints import DeviceProperties

# Two more cached answers about the GPU.
from torch._inductor.utils import get_gpu_type, is_big_gpu

# Marks the operators that take subgraphs, which are not plain calls.
from torch._ops import HigherOrderOperator as HigherOrderOperator

# What an op overload is, to tell it from other callables.
from torch._ops import OpOverload as OpOverload

# Makes the first fake tensor on a GPU touch the GPU.
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import DataDependentOutputException

# The fake mode in which Dynamo recorded a node's example value.
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor

# Traces bodies with symbolic chunk sizes.
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode

# Which device an event of the profiler is of.
from torch.autograd import DeviceType
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.fx.experimental import _config as symbolic_config

# Traces a function into a graph of ops.
from torch.fx.experimental.proxy_tensor import make_fx as make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic as DimDynamic
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.fx.experimental.symbolic_shapes import ShapeEnv as ShapeEnv

# Tells values that are read from tensors, which no guard can fix.
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols as free_unbacked_symbols

# Compares sizes without adding a guard.
from torch.fx.experimental.symbolic_shapes import statically_known_true as statically_known_true
from torch.profiler import profile

# Walks arguments in nested containers, as the dispatcher's callers do.
from torch.utils import _pytree as pytree

# What torch knows of Triton and of the GPU it is for, cached.
from torch.utils import _triton as torch_triton

# The first sees each op that runs in a with-block; the second leaves the tracing modes that are
# active while AOTAutograd calls the partitioner.
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

# Evaluates a size expression on a body's own symbols.
from torch.utils._sympy.interp import sympy_interp as sympy_interp
from torch.utils._sympy.printers import PythonPrinter as PythonPrinter
from torch.utils._sympy.reference import PythonReferenceAnalysis

# Keeps something beside a tensor for as long as it lives; `weakref`'s would compare elements.
from torch.utils.weak import WeakTensorKeyDictionary as WeakTensorKeyDictionary

# Turns off ``__torch_function__`` for a tensor subclass, as torch's guide to extending it does.
disabled_torch_function = torch._C._disabled_torch_function_impl

DataDependentError = (DataDependentOutputException, GuardOnDataDependentSymNode)
"""Raised where fake tensors would have to know their values."""


class SizeAnalysis(PythonReferenceAnalysis):
    """What `sympy_interp` computes expressions of sizes with, on numbers and on symbolic ones.

    torch's own leaves the quotient of two sizes, and what is cut to an integer, to sympy.
    """

    @staticmethod
    def int_truediv(a: Any, b: Any) -> Any:
        """``a / b``, a float."""
        return a / b

    @staticmethod
    def trunc_to_int(x: Any, dtype: torch.dtype) -> Any:
        """``int(x)``."""
        return math.trunc(x)


def op_database() -> list[Any]:
    """PyTorch's OpInfo entries: sample inputs of each op.

    Imported when asked for: it takes seconds, and test dependencies of torch (``expecttest``).
    """
    from torch.testing._internal.common_methods_invocations import op_db

    return list(op_db)


def allocations(profiled: profile) -> Iterator[int]:
    """Bytes of each allocation (positive) and free (negative) on the CPU, in the order of time.

    The public ways to the same events add them up by op, which loses the order and with it the
    peak.

    Raises:
        RuntimeError: ``profiled`` has not run, or has not ended.
    """
    results = profiled.profiler.kineto_results if profiled.profiler else None
    if results is None:
        raise RuntimeError("a profiler has events only once its with-block has ended")
    events: list[Any] = results.events()  # torch's stub of the event lacks its memory fields
    memory = [event for event in events if event.name() == "[memory]"]
    for event in sorted(memory, key=lambda event: event.start_ns()):
        if event.device_type() == DeviceType.CPU:
            yield event.nbytes()


def storage_id(tensor: Tensor) -> int:
    """What two tensors have in common that share memory, fake ones too."""
    return int(tensor.untyped_storage()._cdata)


def backward_may_run_again() -> bool:
    """Whether the running backward keeps its graph (``retain_graph=True``); true outside of one."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def changed_inductor_settings() -> dict[str, Any]:
    """Inductor's settings that are not at their defaults in this thread."""
    config: Any = inductor_config  # a module whose class is one of torch's own
    settings: dict[str, Any] = config.get_config_copy()
    return {name: value for name, value in settings.items() if not config._is_default(name)}


def changed_inputs(joint: GraphModule) -> frozenset[str]:
    """The names of the inputs that a traced program changes in place, by AOTAutograd's notes."""
    notes = joint.graph.output_node().meta.get("desc") or ()
    changed = [note.mutated_input for note in notes if isinstance(note, InputMutationAOTOutput)]
    inputs = joint.graph.find_nodes(op="placeholder")
    return frozenset(str(node.target) for node in inputs if node.meta.get("desc") in changed)


def copied_graph(graph: Graph) -> Graph:
    """A copy of ``graph`` that AOTAutograd takes for the original.

    Dynamo notes at each input where the program has it from, in a place that copying leaves out.
    """
    copied = copy.deepcopy(graph)
    inputs = zip(
        graph.find_nodes(op="placeholder"), copied.find_nodes(op="placeholder"), strict=True
    )
    for before, after in inputs:
        if hasattr(before, "_dynamo_source"):
            after._dynamo_source = before._dynamo_source
    return copied


def feeds_another_part(graph_module: GraphModule) -> bool:
    """Whether ``graph_module``, which is being compiled, is a part whose outputs others read.

    Under DDP Dynamo splits its graph at the buckets of gradients and compiles part after part. The
    whole, which tells what an output is for, is known to the splitter's frame alone.
    """
    reason = getattr(graph_module, "compile_subgraph_reason", None)
    if reason is None or "DDPOptimizer" not in reason.reason:
        return False
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        splitter = frame.f_locals.get("self")
        if isinstance(splitter, Interpreter) and isinstance(splitter.module, GraphModule):
            whole = splitter.module
            for node in whole.graph.find_nodes(op="call_module"):
                if getattr(whole, str(node.target), None) is graph_module:
                    readers = {user for part in node.users for user in (part, *part.users)}
                    return any(user.op == "call_module" for user in readers)
        frame = frame.f_back
    return True  # not told, and others may


class _OrToldOnce(set[Any]):
    """A set of logging functions that also has each method of loggers that tells a message once.

    Libraries add such methods to `logging.Logger`, maybe later than this set is made.
    """

    def __contains__(self, function: object) -> bool:
        name = getattr(function, "__name__", "")
        told_once = name.endswith("_once") and vars(logging.Logger).get(name) is function
        return told_once or super().__contains__(function)


def ignore_messages_told_once() -> None:
    """Have Dynamo leave out calls of ``logger.warning_once`` and the like, in this process.

    A call would end the graph there, maybe between logits and loss, for a message that may be
    told once and is no part of the step. Of ``logger.warning`` and others the user decides.
    """
    # The older of two names of one setting.
    ignored = dynamo_config.ignore_logger_methods
    if not isinstance(ignored, _OrToldOnce):
        dynamo_config.ignore_logger_methods = _OrToldOnce(ignored)


def donate_nothing() -> None:
    """Leave what forward saves to backward as it is; to be called while AOTAutograd compiles.

    AOTAutograd has Inductor reuse such memory, and refuses ``retain_graph=True`` after a backward
    without it. A backward of loops reuses none unasked.
    """
    context = TracingContext.try_get()
    metadata = context.fw_metadata if context is not None else None
    if metadata is not None and metadata.bw_donated_idxs:
        metadata.bw_donated_idxs.clear()


def fixed_float(value: torch.SymFloat) -> float:
    """The example's value of a symbolic float, which a guard now says it has always."""
    # The symbol, which `expr` replaces by its value once it is known.
    TensorifyState.specialize(str(value.node._expr))
    return float(value)


def clear_gpu_caches() -> None:
    """Make torch ask again what GPU there is, and whether Triton works for it."""
    of_triton = [value for value in vars(torch_triton).values() if hasattr(value, "cache_clear")]
    of_inductor = [DeviceProperties.create, CacheBase.get_system, get_gpu_type, is_big_gpu]
    for cached in (*of_triton, *of_inductor):
        cached.cache_clear()


def without_algorithm_selector() -> AbstractContextManager[Any]:
    """Have Inductor make a new chooser of kernels inside a with-block, and drop it at its end."""
    return patch.object(select_algorithm, "_ALGORITHM_SELECTOR_CACHE", None)


def without_gpu_context() -> AbstractContextManager[Any]:
    """Make fake tensors on a GPU without touching a GPU inside a with-block."""
    return patch.object(fake_tensor, "init_gpu_context", lambda device: None)


def cuda_worker_caches() -> tuple[dict[str, Any], dict[str, Any]]:
    """Where Inductor keeps the properties and the number of the current GPU, by device type."""
    return caching_worker_device_properties, caching_worker_current_devices


def constant_source(name: str) -> ConstantSource:
    """The origin of a size that is not read from a user's input."""
    return ConstantSource(name)


def disable_current_modes() -> AbstractContextManager[Any]:
    """Leave every active tracing mode for the length of a with-block."""
    return _disable_current_modes()


def backed_size_oblivious() -> AbstractContextManager[Any]:
    """Trace sizes as if they could not be 0 or 1, without a guard that says so."""
    return symbolic_config.patch(backed_size_oblivious=True)  # type: ignore[attr-defined]


def extract_fwd_bwd_modules(
    joint: GraphModule, saved: list[Node], sizes: list[Node], num_forward_outputs: int
) -> tuple[GraphModule, GraphModule]:
    """Cut ``joint`` into a forward that returns ``saved`` and a backward that takes them."""
    return _extract_fwd_bwd_modules(joint, saved, sizes, num_fwd_outputs=num_forward_outputs)
