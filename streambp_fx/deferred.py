"""Outputs that are computed when they are first used.

A model in training returns its logits beside its loss, and few callers look at them. A
`DeferredTensor` stands in the logits' place: it has their shape, dtype and device and holds what
they are computed *from* (the last hidden state and the head's weights), which is smaller by the
factor ``vocabulary / hidden size``. The first op that needs its elements computes them.

Glossary
--------
recipe
    How an output is computed, fixed when the graph was compiled: a small graph and its operands.
origin
    Where the elements live. Views of one tensor share an origin, as they would share a storage.
view
    An op that only changes how elements are indexed. A deferred tensor is an origin and a chain
    of views of it, applied once the origin has its elements.

Gradients do not flow through a deferred tensor. Where the original output had a gradient, so has
the deferred one, and its backward raises: a term that is silently missing from a sum of losses
would be a wrong gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ._torch import pytree

aten = torch.ops.aten

KEEP_OUTPUTS = 'options={"keep_outputs": True}'


class DeferredOutputError(RuntimeError):
    """A deferred output was asked for something that it can not give."""


@dataclass(frozen=True)
class Recipe:
    """How one output of a compiled graph is computed.

    name
        The output's name, for messages.
    graph
        Maps the operands to the output; ``None`` for an output that can not be computed again.
    rowwise
        The graph's first operand has the output's shape up to its last dim, and each of the
        output's rows (all dims but the last) depends on the same row of it alone. A slice of the
        output can then be computed from the same slice of the operand.
    """

    name: str
    graph: torch.fx.GraphModule | None
    rowwise: bool = False


@dataclass(frozen=True)
class _View:
    """One op of a chain of views: ``op(tensor, *args, **kwargs)``."""

    op: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def __call__(self, tensor: Tensor) -> Tensor:
        result: Tensor = self.op(tensor, *self.args, **self.kwargs)
        return result

    def takes_rows(self, ndim: int) -> bool:
        """Whether it selects rows of a tensor with ``ndim`` dims and leaves the last dim whole."""
        if self.op not in (aten.slice.Tensor, aten.select.int):
            return False
        dim = self.args[0] if self.args else self.kwargs.get("dim", 0)
        return bool(dim % ndim != ndim - 1)


def _apply(views: Sequence[_View], tensor: Tensor) -> Tensor:
    for view in views:
        tensor = view(tensor)
    return tensor


def _version(tensor: Tensor) -> int | None:
    """Its count of in-place changes; inference tensors have none."""
    return None if tensor.is_inference() else tensor._version


class _Origin:
    """The elements of a deferred tensor and of all views of it."""

    def __init__(self) -> None:
        self._elements: Tensor | None = None
        self.writes = 0  # in-place changes since the elements were computed

    @property
    def computed(self) -> bool:
        return self._elements is not None

    def elements(self) -> Tensor:
        """All elements, computed at the first call."""
        if self._elements is None:
            self._elements = self._compute()
            self._release()
        return self._elements

    def rows(self, views: Sequence[_View]) -> Tensor | None:
        """The elements seen through ``views`` without computing the others, where that is known
        to be possible."""
        raise NotImplementedError

    def _compute(self) -> Tensor:
        raise NotImplementedError

    def _release(self) -> None:
        raise NotImplementedError


class _Replay(_Origin):
    """Elements that a recipe computes from the operands of one call."""

    def __init__(self, recipe: Recipe, operands: Sequence[Any], device_type: str) -> None:
        super().__init__()
        self._recipe = recipe
        self._operands = tuple(operands)
        self._states = [
            (_version(operand), operand.data_ptr()) if isinstance(operand, Tensor) else None
            for operand in operands
        ]
        # The graph was traced under the autocast state of its call, which guards check.
        self._autocast = (
            device_type,
            torch.get_autocast_dtype(device_type),
            torch.is_autocast_enabled(device_type),
        )

    def rows(self, views: Sequence[_View]) -> Tensor | None:
        if not self._recipe.rowwise or not views:
            return None
        ndim = self._operands[0].ndim
        for view in views:
            if not view.takes_rows(ndim):
                return None
            ndim -= view.op is aten.select.int
        self._check()
        return self._run(_apply(views, self._operands[0]), *self._operands[1:])

    def _compute(self) -> Tensor:
        self._check()
        return self._run(*self._operands)

    def _release(self) -> None:
        self._operands = ()
        self._states = []

    def _run(self, *operands: Any) -> Tensor:
        if self._recipe.graph is None:
            raise RuntimeError(f"the recipe of {self._recipe.name!r} has no graph to run")
        device_type, dtype, enabled = self._autocast
        with torch.no_grad(), torch.autocast(device_type, dtype=dtype, enabled=enabled):
            result: Tensor = self._recipe.graph(*operands)
        return result

    def _check(self) -> None:
        name = self._recipe.name
        if self._recipe.graph is None:
            raise DeferredOutputError(
                f"the output {name!r} was left out of the compiled step: keeping it would hold a "
                "tensor of the whole sequence that the loss does not need. Compile with "
                f"{KEEP_OUTPUTS} to get it at its full memory cost, or ask the model not to "
                "return it (use_cache=False for past_key_values, output_hidden_states=False for "
                "hidden_states)."
            )
        for operand, state in zip(self._operands, self._states, strict=True):
            if state is not None and state != (_version(operand), operand.data_ptr()):
                raise DeferredOutputError(
                    f"the output {name!r} is computed when it is first used, and a tensor it is "
                    f"computed from (shape {tuple(operand.shape)}) has changed since: most often "
                    "the weights, in optimizer.step(). Use the output before that (for example "
                    f"clone it to another device, or reduce it), or compile with {KEEP_OUTPUTS}."
                )


class _Copy(_Origin):
    """Elements that are a copy (another dtype or memory format) of a deferred tensor's."""

    def __init__(self, source: DeferredTensor, copy: _View) -> None:
        super().__init__()
        self._source: DeferredTensor | None = source
        self._copy = copy
        self._writes = source._origin.writes

    def rows(self, views: Sequence[_View]) -> Tensor | None:
        source = self._unchanged_source()
        part = source._origin.rows((*source._views, *views))
        # A slice's memory format is not the whole's, so only the dtype is converted.
        return None if part is None else part.to(source_dtype(self._copy, part.dtype))

    def _compute(self) -> Tensor:
        return self._copy(self._unchanged_source()._materialize())

    def _release(self) -> None:
        self._source = None

    def _unchanged_source(self) -> DeferredTensor:
        if self._source is None:
            raise RuntimeError("a computed copy has no source")
        if self._source._origin.writes != self._writes:
            raise DeferredOutputError(
                "a copy of a deferred output is computed when it is first used, and the output "
                "was changed in place since: use the copy before the change, or compile with "
                f"{KEEP_OUTPUTS}."
            )
        return self._source


def source_dtype(copy: _View, default: torch.dtype) -> torch.dtype:
    """The dtype of a copy made by ``copy`` from a tensor of dtype ``default``."""
    dtype: torch.dtype | None = copy.kwargs.get("dtype")
    return default if dtype is None else dtype


_VIEWS = frozenset(
    {
        aten.view.default,
        aten._unsafe_view.default,
        aten.slice.Tensor,
        aten.select.int,
        aten.unsqueeze.default,
        aten.squeeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.transpose.int,
        aten.t.default,
        aten.permute.default,
        aten.expand.default,
        aten.alias.default,
        aten.detach.default,
    }
)

_COPIES = frozenset({aten._to_copy.default, aten.clone.default})


class DeferredTensor(torch.Tensor):
    """A tensor whose elements are computed when an op first needs them.

    Views, copies to another dtype and ``detach`` stay deferred; everything else computes the
    elements and goes on with plain tensors.

    Raises (from whatever first needs the elements):
        DeferredOutputError: the output can not be computed, or what it is computed from was
            changed in place since the call that returned it.
    """

    _origin: _Origin
    _views: tuple[_View, ...]
    _layout: Tensor
    _part: Tensor | None

    # Everything that reaches an op is handled by __torch_dispatch__, below autograd.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls, origin: _Origin, views: tuple[_View, ...], layout: Tensor, device: torch.device
    ) -> DeferredTensor:
        """``layout`` is a meta tensor with the shape, strides and dtype."""
        self: DeferredTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            layout.shape,
            strides=layout.stride(),
            storage_offset=layout.storage_offset(),
            dtype=layout.dtype,
            device=device,
        )
        self._origin = origin
        self._views = views
        self._layout = layout
        self._part = None
        return self

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        source = args[0] if args else None
        if isinstance(source, DeferredTensor):
            step = _View(func, args[1:], kwargs)
            if func in _VIEWS:
                return source._viewed(step)
            if func in _COPIES and kwargs.get("device") in (None, source.device):
                return source._copied(step)
        written = _written(func, args, kwargs)
        if written and torch.Tag.inplace_view in func.tags:
            raise DeferredOutputError(
                f"{func} changes the shape of a deferred output in place: use the op that returns "
                "a new tensor."
            )
        wrappers: dict[int, DeferredTensor] = {}

        def unwrap(value: Any) -> Any:
            if not isinstance(value, DeferredTensor):
                return value
            is_written = any(value is other for other in written)
            plain = value._shared() if is_written else value._materialize()
            if is_written:
                wrappers[id(plain)] = value
            return plain

        plain_args, plain_kwargs = pytree.tree_map(unwrap, (args, dict(kwargs)))
        result = func(*plain_args, **plain_kwargs)
        for wrapper in written:
            wrapper._origin.writes += 1
        return pytree.tree_map(lambda value: wrappers.get(id(value), value), result)

    def _viewed(self, view: _View) -> DeferredTensor:
        if view.op is aten.detach.default or view.op is aten.alias.default:
            return DeferredTensor(self._origin, self._views, self._layout, self.device)
        return DeferredTensor(self._origin, (*self._views, view), view(self._layout), self.device)

    def _copied(self, copy: _View) -> DeferredTensor:
        on_meta = {
            name: value
            for name, value in copy.kwargs.items()
            if name not in ("device", "pin_memory", "non_blocking")
        }
        layout = copy.op(self._layout, *copy.args, **on_meta)
        return DeferredTensor(_Copy(self, copy), (), layout, self.device)

    def _shared(self) -> Tensor:
        """The elements as a view of the origin's, so that writes are seen by other views."""
        self._part = None
        return _apply(self._views, self._origin.elements())

    def _materialize(self) -> Tensor:
        """The elements as a plain tensor without gradient, computed at the first call."""
        if self._origin.computed:
            return self._shared()
        if self._part is None:
            self._part = self._origin.rows(self._views)
        return self._shared() if self._part is None else self._part

    def _plain(self) -> Tensor:
        """A plain leaf tensor with this one's elements and ``requires_grad``."""
        return self._materialize().detach().requires_grad_(self.requires_grad)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        if self._origin.computed:
            return repr(self._materialize())
        gradient = ", requires_grad=True" if self.requires_grad else ""
        return (
            f"DeferredTensor(deferred, shape={tuple(self.shape)}, dtype={self.dtype}, "
            f"device={str(self.device)!r}{gradient})"
        )

    # What follows reads memory without going through an op.

    def numpy(self, *, force: bool = False) -> Any:
        return self._plain().numpy(force=force)

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return self._plain().__array__(*args, **kwargs)

    def tolist(self) -> Any:
        return self._materialize().tolist()

    def data_ptr(self) -> int:
        return self._materialize().data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self._materialize().untyped_storage()

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self._plain().__dlpack__(**kwargs)

    def __dlpack_device__(self) -> Any:
        return self._materialize().__dlpack_device__()

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """A plain tensor: a copy is independent of the step that it came from."""
        copy = self._materialize().clone().requires_grad_(self.requires_grad)
        memo[id(self)] = copy
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickled as a plain tensor."""
        return self._plain().__reduce_ex__(protocol)


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[DeferredTensor]:
    """The deferred tensors that ``func`` changes in place."""
    if not func._schema.is_mutable:
        return []
    written = []
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        given = args[index] if index < len(args) else kwargs.get(argument.name)
        written += [t for t in pytree.tree_leaves(given) if isinstance(t, DeferredTensor)]
    return written


class _RefuseGradient(torch.autograd.Function):
    """Gives a deferred tensor a ``grad_fn`` whose backward raises."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, name: str, build: Callable[[], DeferredTensor]
    ) -> DeferredTensor:
        ctx.name = name
        return build()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise DeferredOutputError(
            f"a gradient reached the output {ctx.name!r}, which is computed when it is used and "
            f"does not carry gradients. Compile with {KEEP_OUTPUTS} to train through it, or call "
            ".detach() on it where it should not contribute to the gradient."
        )


def deferred_tensor(
    recipe: Recipe,
    operands: Sequence[Any],
    *,
    size: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    requires_grad: bool,
) -> DeferredTensor:
    """A stand-in for the output that ``recipe`` computes from ``operands``.

    ``operands`` (tensors and ints) are kept alive until the output was computed, and are compared
    with their state at this call before that.
    """
    layout = torch.empty_strided(tuple(size), tuple(stride), dtype=dtype, device="meta")
    origin = _Replay(recipe, operands, device.type)

    def build() -> DeferredTensor:
        return DeferredTensor(origin, (), layout, device)

    if not requires_grad:
        return build()
    with torch.enable_grad():
        anchor = torch.empty(0, requires_grad=True)
        result: DeferredTensor = _RefuseGradient.apply(anchor, recipe.name, build)
    return result
