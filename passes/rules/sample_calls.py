"""Real op calls to try the rules on: from PyTorch's OpInfo database, and hand-made ones.

A sample of the database is traced by AOTAutograd as it is under `torch.compile`, forward and
backward, once as it stands and once through Inductor's decompositions, and the calls of those
graphs are recorded with the values they have when the graphs run. So `prims` and backward ops are
reached, which have no entry in the database.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node

from streambp_fx._torch import (
    OpOverload,
    aot_function,
    make_boxed_func,
    pytree,
    select_decomp_table,
)

from .arguments import outputs_in, tensors_in
from .calls import constant_tensors
from .chunked import record_call
from .spec import Call

aten = torch.ops.aten
prims = torch.ops.prims
streambp = torch.ops.streambp

# What a sample may fail with while it is traced: a data-dependent size, a missing kernel, a
# subclass. The validator counts such samples and says so.
TRACE_ERRORS = (
    RuntimeError,
    TypeError,
    ValueError,
    AssertionError,
    NotImplementedError,
    AttributeError,
    KeyError,
    IndexError,
)


class _Recorder(Interpreter):
    """Runs a graph and hands every op call to ``record``."""

    def __init__(self, module: GraphModule, record: Callable[[Call], None]) -> None:
        super().__init__(module)
        self._record = record

    def run_node(self, n: Node) -> Any:
        if n.op != "call_function" or not isinstance(n.target, OpOverload):
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        result = n.target(*args, **kwargs)
        if not n.target._schema.is_mutable:
            tensors = tensors_in(args, kwargs)
            self._record(
                Call(
                    n.target, tuple(args), kwargs, tensors, outputs_in(result), constant_tensors(n)
                )
            )
        return result


def opinfo_calls(opinfo: Any, max_samples: int, on_failure: Callable[[str], None]) -> list[Call]:
    """The calls made by up to ``max_samples`` samples of one entry, forward and backward.

    ``on_failure`` is told why a sample could not be traced.
    """
    dtype = next(
        (
            dtype
            for dtype in (torch.float64, torch.float32, torch.int64, torch.bool)
            if dtype in opinfo.supported_dtypes("cpu")
        ),
        None,
    )
    if dtype is None:
        return []
    grad = dtype.is_floating_point and opinfo.supports_autograd
    calls: list[Call] = []
    for index, sample in enumerate(opinfo.sample_inputs("cpu", dtype, requires_grad=grad)):
        if index == max_samples:
            break
        for table in ({}, select_decomp_table()):
            try:
                _trace(opinfo.op, (sample.input, *sample.args), sample.kwargs, table, calls.append)
            except TRACE_ERRORS as error:
                on_failure(f"{opinfo.name}: {type(error).__name__}: {str(error)[:200]}")
    return calls


def _trace(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    decompositions: dict[Any, Any],
    record: Callable[[Call], None],
) -> None:
    """Record the calls of ``function(*args, **kwargs)`` and of its backward."""
    flat, tree = pytree.tree_flatten((args, kwargs))
    places = [index for index, leaf in enumerate(flat) if isinstance(leaf, torch.Tensor)]

    def on_tensors(*tensors: torch.Tensor) -> list[torch.Tensor]:
        leaves = list(flat)
        for index, tensor in zip(places, tensors, strict=True):
            leaves[index] = tensor
        args, kwargs = pytree.tree_unflatten(leaves, tree)
        result = function(*args, **kwargs)
        return [out for out in pytree.tree_leaves(result) if isinstance(out, torch.Tensor)]

    def compiler(gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        recorder = _Recorder(gm, record)
        return make_boxed_func(recorder.run)

    # A leaf of its own for each sample, so that an in-place op never meets a leaf.
    tensors = [flat[index].detach().clone() for index in places]
    for tensor, index in zip(tensors, places, strict=True):
        tensor.requires_grad_(flat[index].requires_grad)
    compiled = aot_function(
        on_tensors, fw_compiler=compiler, bw_compiler=compiler, decompositions=decompositions
    )
    outputs = [out for out in compiled(*tensors) if out.requires_grad]
    if outputs:
        leaves = [tensor for tensor in tensors if tensor.requires_grad]
        grads = [torch.rand_like(out) for out in outputs]
        torch.autograd.grad(outputs, leaves, grads, allow_unused=True)


def hand_made_calls() -> Iterator[Call]:
    """Calls that the database does not make: those of language models' graphs."""

    def r(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, dtype=torch.float64) + 0.1

    def ids(high: int, *shape: int) -> torch.Tensor:
        return torch.randint(high, shape)

    # merged batch and sequence dims, heads split and merged, and positions that a view mixes
    yield record_call(aten.view.default, r(2, 5, 6), [10, 6])
    yield record_call(aten.view.default, r(10, 6), [2, 5, 3, 2])
    yield record_call(aten.view.default, r(2, 5, 3, 2), [2, 5, -1])
    yield record_call(aten.view.default, r(4, 9), [6, 6])
    yield record_call(aten.view.default, r(3, 5, 2), [5, 6])
    yield record_call(aten.view.default, r(1, 5, 1, 4), [5, 4, 1])
    yield record_call(aten.reshape.default, r(2, 3, 4), [-1])
    yield record_call(aten._unsafe_view.default, r(6, 4), [2, 3, 4])
    yield record_call(aten.view.dtype, r(3, 4), torch.int64)
    yield record_call(aten.view.dtype, r(3, 4), torch.int32)
    yield record_call(aten.expand.default, r(2, 1, 4), [3, 2, 5, -1])
    yield record_call(aten.repeat.default, r(3, 4), [2, 1, 3])
    yield record_call(aten.repeat.default, r(3, 0), [2, 1, 3])
    # label shift
    yield record_call(aten.constant_pad_nd.default, ids(9, 2, 7), [0, 1], -100)
    yield record_call(aten.constant_pad_nd.default, r(2, 7, 3), [0, 0, 1, -1])
    yield record_call(aten.slice.Tensor, r(2, 8, 3), 1, 1, 9223372036854775807)
    yield record_call(aten.slice.Tensor, r(2, 8, 3), 1, -8, 8)
    yield record_call(aten.slice_scatter.default, r(2, 8, 3), r(2, 8, 3), 1, 0, 8)
    yield record_call(aten.slice_scatter.default, r(2, 8, 3), r(2, 3, 3), 1, 2, 5)
    yield record_call(aten.select_scatter.default, r(2, 8, 3), r(2, 3), 1, 4)
    # embeddings and cross entropy
    yield record_call(aten.embedding.default, r(7, 4), ids(7, 2, 5))
    yield record_call(aten.embedding_dense_backward.default, r(2, 5, 4), ids(7, 2, 5), 7, 3, False)
    yield record_call(aten.embedding_dense_backward.default, r(2, 5, 4), ids(7, 2, 5), 7, -1, True)
    yield record_call(aten.gather.default, r(6, 7), 1, ids(7, 6, 1))
    yield record_call(aten.scatter.value, r(6, 7), 1, ids(7, 6, 1), -1.0)
    for zero in ({}, {0: 0.0}):
        base = torch.zeros(7, 4, dtype=torch.float64) if zero else r(7, 4)
        places, mask = ids(7, 2, 5), ids(2, 2, 5, 1) > 0
        accumulate = aten._unsafe_masked_index_put_accumulate.default
        yield record_call(accumulate, base, mask, [places], r(2, 5, 4), constant=zero)
        for target in (aten.index_put.default, aten._unsafe_index_put.default):
            yield record_call(target, base, [places], r(2, 5, 4), True, constant=zero)
            yield record_call(target, base, [None, ids(4, 6)], r(7, 6), True, constant=zero)
            yield record_call(target, base, [places], r(4), True, constant=zero)
        yield record_call(
            aten.index_put.default, base, [torch.arange(5)], r(5, 4), False, constant=zero
        )
        yield record_call(aten.scatter_add.default, base, 0, ids(7, 5, 4), r(5, 4), constant=zero)
        yield record_call(
            aten.scatter_reduce.two, base, 0, ids(7, 5, 4), r(5, 4), "sum", constant=zero
        )
        yield record_call(aten.index_add.default, base, 0, ids(7, 5), r(5, 4), constant=zero)
        yield record_call(aten.addmm.default, base, r(7, 5), r(5, 4), constant=zero)
        yield record_call(
            aten.baddbmm.default, base.unsqueeze(0), r(2, 7, 5), r(2, 5, 4), constant=zero
        )
    yield record_call(aten._unsafe_masked_index.default, r(7, 4), mask, [places], 0.0)
    yield record_call(aten.index.Tensor, r(2, 7, 3, 4), [None, ids(7, 5, 1), ids(3, 6)])
    yield record_call(aten.index.Tensor, r(2, 7, 3, 4), [ids(2, 5), None, ids(3, 5)])
    # creation, casts and prims
    yield record_call(aten.full.default, [4, 5], 2.0)
    yield record_call(aten.empty.memory_format, [4, 5])
    yield record_call(aten.arange.start_step, 3, 20, 4)
    yield record_call(aten.arange.start, 3, 9)
    yield record_call(aten.new_zeros.default, r(2, 5, 3), [2, 5])
    yield record_call(aten.new_empty_strided.default, r(2, 5, 3), [2, 5, 3], [15, 1, 5])
    iota: dict[str, Any] = {
        "dtype": torch.int64,
        "device": torch.device("cpu"),
        "requires_grad": False,
    }
    yield record_call(prims.iota.default, 7, start=2, step=3, **iota)
    yield record_call(prims.convert_element_type.default, r(3, 4), torch.float32)
    yield record_call(prims.rev.default, r(3, 4, 5), [1])
    yield record_call(prims.fma.default, r(3, 4), r(4), r(3, 1))
    yield record_call(aten.view_as_real.default, torch.complex(r(3, 4), r(3, 4)))
    yield record_call(aten.view_as_complex.default, r(3, 4, 2))
    yield record_call(aten.polar.default, r(3, 4), r(3, 4))
    yield record_call(aten.topk.default, r(5, 6), 2)
    yield record_call(aten.sum.dim_IntList, r(2, 5, 6), [0, 1])
    yield record_call(aten.mean.dim, r(2, 5, 6), [-1], True)
    yield from _own_calls(r)


def _own_calls(r: Callable[..., torch.Tensor]) -> Iterator[Call]:
    """Calls of this project's ops: grouped heads, a bias, and random numbers by position."""
    query, key, value, bias = r(3, 4, 7, 8), r(3, 2, 7, 8), r(3, 2, 7, 6), r(1, 4, 7, 7)
    for mask in (None, bias):
        rest = (None, mask is None, 0.5, 0.0)
        call = record_call(streambp.attention.default, query, key, value, mask, *rest)
        yield call
        out, logsumexp = call.outputs
        saved = (query, key, value, mask, None, out, logsumexp, *rest[1:])
        yield record_call(streambp.attention_backward.default, r(3, 4, 7, 6), *saved)
    seed = torch.tensor(7)
    yield record_call(streambp.uniform.default, seed, [3, 5], [0, 2], torch.float64)
