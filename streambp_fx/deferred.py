"""The tensor that stands for an output which is computed when it is first used.

A model in training returns its logits beside its loss, and few callers look at them. A
`DeferredTensor` stands in the logits' place: it has their shape, dtype and device and holds what
they are computed *from* (the last hidden state and the head's weights), which is smaller by the
factor ``vocabulary / hidden size``. The first op that needs its elements computes them.

Gradients do not flow through a deferred tensor. Where the original output had a gradient, so has
the deferred one, and its backward raises: a term that is silently missing from a sum of losses
would be a wrong gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ._torch import disabled_torch_function, pytree
from .deferred_values import (
    KEEP_OUTPUTS,
    Copy,
    DeferredOutputError,
    Origin,
    Recipe,
    Replay,
    View,
    apply_views,
)

aten = torch.ops.aten

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

    _origin: Origin
    _views: tuple[View, ...]
    _layout: Tensor
    _part: Tensor | None

    # Everything that reaches an op is handled by __torch_dispatch__, below autograd.
    __torch_function__ = disabled_torch_function  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls, origin: Origin, views: tuple[View, ...], layout: Tensor, device: torch.device
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
            step = View(func, args[1:], kwargs)
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

    def _viewed(self, view: View) -> DeferredTensor:
        if view.op is aten.detach.default or view.op is aten.alias.default:
            return DeferredTensor(self._origin, self._views, self._layout, self.device)
        return DeferredTensor(self._origin, (*self._views, view), view(self._layout), self.device)

    def _copied(self, copy: View) -> DeferredTensor:
        on_meta = {
            name: value
            for name, value in copy.kwargs.items()
            if name not in ("device", "pin_memory", "non_blocking")
        }
        layout = copy.op(self._layout, *copy.args, **on_meta)
        return DeferredTensor(Copy(self, copy), (), layout, self.device)

    def _shared(self) -> Tensor:
        """The elements as a view of the origin's, so that writes are seen by other views."""
        self._part = None
        return apply_views(self._views, self._origin.elements())

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
        if self._origin.computed or self._part is not None:
            return repr(self._materialize())
        gradient = ", requires_grad=True" if self.requires_grad else ""
        return (
            f"DeferredTensor(deferred, shape={tuple(self.shape)}, dtype={self.dtype}, "
            f"device={str(self.device)!r}{gradient})"
        )

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if self.ndim == 0 else super().__format__(spec)

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
    origin = Replay(recipe, operands, device.type)

    def build() -> DeferredTensor:
        return DeferredTensor(origin, (), layout, device)

    if not requires_grad:
        return build()
    with torch.enable_grad():
        anchor = torch.empty(0, requires_grad=True)
        result: DeferredTensor = _RefuseGradient.apply(anchor, recipe.name, build)
    return result
