"""Pass: attention that is written out becomes ``streambp::attention``.

Given:  ``w = q @ k.transpose(-2, -1) * E**-0.5``
        ``w = w.masked_fill(mask, -inf)``
        ``w = dropout(softmax(w, dim=-1, dtype=torch.float32).to(q.dtype), 0.1, True)``
        ``o = w @ v``
Result: ``o = streambp.attention(q, k, v, ~mask, seed, False, E**-0.5, 0.1)[0]``

It is a proof over every node between the two products, in four parts:

1. Each is one of a closed list of calls (`attention_scores`, `_weights_after`) whose arguments are
   all understood, and nothing else reads it.
2. Casts keep every number: scores are at least as wide as the product of q and k, weights at least
   as wide as the product with v, which is no wider than the first.
3. Everything that the op will read has the value then that the program read (`Writes`): the op
   runs where the product with v did. What is written in place on the way is scores and weights
   alone, and gradients are not switched on or off on the way.
4. Numbers are ones under which it is softmax attention, as below.

Products are ``matmul``, ``@``, ``bmm``, ``baddbmm`` and ``einsum``; 3-D operands are one head each.

A fill of ``-inf`` becomes a boolean bias. A row without an allowed key is 0 in the op and nan in
the program, so that it is made nan. A fill with the lowest number of a dtype becomes an additive
bias, where such a row averages V. Through a fill no gradient reaches q and k, unlike through an
added bias: q is set to 0 in such rows, which makes their scores equal and their gradients 0. Any
other finite fill is a number that scores may reach.

Left to `token_products`, and noted: attention that fails a part of this proof, such as one whose
scores or weights are used elsewhere too, whose bias needs a gradient, or that is filled after a
bias of which nothing is known (`value_bounds`): filled keys keep weight where both are as low.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Set

import torch
from torch.fx import GraphModule, Node

from .attention_call import (
    AttentionCall,
    CannotNormalizeError,
    Refusal,
    check_bias,
    emit_attention,
    refusal_of,
    tensor_of,
)
from .attention_layout import taking_the_place_of
from .attention_products import query_and_key, value_operand
from .attention_scores import (
    CASTS,
    PRODUCTS,
    Add,
    Fill,
    Multiply,
    Scores,
    Step,
    check_fill,
    check_holds,
    scores_before,
    scores_of_products,
)
from .dynamo_calls import (
    argument_of,
    arguments_of,
    erase_unused,
    is_call,
    is_mode_switch,
    times_read,
    value_of,
)
from .dynamo_emit import Emitter
from .value_bounds import bounds_of
from .writes import Writes, share_memory

_MODERATE = 1e30
"""A bias below this is nothing beside the lowest number of float32, bfloat16 or float64."""


def recognize_attention(graph_module: GraphModule, writes: Writes) -> list[Refusal]:
    """Rewrite one graph in place, without its subgraphs; returns what is left as it was."""
    refusals: list[Refusal] = []
    graph = graph_module.graph
    products = scores_of_products(graph, writes)
    for node in list(graph.nodes):
        if is_call(node, "softmax") and _over_last_dim(node):
            try:
                _replace(node, products, writes)
            except CannotNormalizeError as error:
                refusals.append(refusal_of(node, str(error)))
    return refusals


def _over_last_dim(softmax: Node) -> bool:
    value = value_of(softmax)
    dim = argument_of(softmax, 1, "dim")
    return value is not None and dim in (-1, value.dim() - 1)


def _replace(softmax: Node, products: Set[Node], writes: Writes) -> None:
    weights, dropout_p = _weights_after(softmax)
    if weights is None:
        return
    scores = scores_before(argument_of(softmax, 0, "input"), products, writes)
    (output,) = weights[-1].users
    _check_in_between(scores, weights, output, writes)
    emit = Emitter(output)
    try:
        attention = _emit(emit, scores, weights, dropout_p, writes)
    except CannotNormalizeError:
        emit.undo()
        raise
    output.replace_all_uses_with(attention)
    erase_unused([output, *reversed(weights), *scores.chain])


def _weights_after(softmax: Node) -> tuple[list[Node] | None, float]:
    """The nodes from the softmax to the weights that a product takes, and their dropout.

    ``None`` if no product takes them: then it is a softmax and no attention.
    """
    chain, dropout_p = [softmax], 0.0
    while not any(is_call(user, *PRODUCTS) for user in chain[-1].users):
        following = [user for user in chain[-1].users if is_call(user, "dropout", *CASTS)]
        if not following:
            return None, 0.0
        node = following[0]
        if is_call(node, "dropout"):
            # Two masks, one after the other, keep what both keep.
            dropout_p = 1.0 - (1.0 - dropout_p) * (1.0 - _dropout_of(node))
        chain.append(node)
    _check_weights(chain)
    return chain, dropout_p


def _dropout_of(node: Node) -> float:
    """The probability with which a call of dropout drops an element."""
    switch = "train" if "train" in node.kwargs else "training"
    found = arguments_of(node, "input", "p", switch, "inplace")
    p, training = argument_of(node, 1, "p", 0.5), argument_of(node, 2, switch, True)
    if found is None or not isinstance(p, int | float) or not isinstance(training, bool):
        raise CannotNormalizeError("the probability of dropout is not a constant")
    return p if training else 0.0


def _check_weights(weights: list[Node]) -> None:
    """
    Raises:
        CannotNormalizeError: weights are used elsewhere, rounded, or not those of one softmax.
    """
    softmax = weights[0]
    if arguments_of(softmax, "input", "dim", "_stacklevel", "dtype") is None:
        raise CannotNormalizeError(f"{softmax} has arguments beside its input, dim and dtype")
    for node in weights:
        if times_read(node) != 1:
            raise CannotNormalizeError(f"the attention weights {node} are used elsewhere as well")
    (output,) = weights[-1].users
    for node in weights:
        check_holds(node, tensor_of(output).dtype)


def _check_in_between(scores: Scores, weights: list[Node], output: Node, writes: Writes) -> None:
    """
    Raises:
        CannotNormalizeError: a value is changed between where the program reads it and
            ``output``, where the op will, or gradients are switched on or off.
    """
    product = scores.product
    own = {*scores.chain, *weights}
    read = [(node, product) for node in product.all_input_nodes]
    read += [(step.bias, step.node) for step in scores.steps if isinstance(step, Add)]
    read += [(step.mask, step.node) for step in scores.steps if isinstance(step, Fill)]
    for node, reader in read:
        writer = writes.between(node, reader, output)
        if writer is not None and writer not in own:
            raise CannotNormalizeError(f"{writer} changes {node} in place after it was read")
        if any(share_memory(node, one) for one in own):
            raise CannotNormalizeError(f"scores or weights lie in the memory of {node}")
    for one in own:
        for writer in writes.writers(one):
            if writer not in own:
                raise CannotNormalizeError(f"{writer} changes {one} in place")
    node = product
    while node is not output:
        if is_mode_switch(node):
            raise CannotNormalizeError("gradients are switched on or off within it")
        node = node.next
    check_holds(product, tensor_of(output).dtype)


def _emit(
    emit: Emitter, scores: Scores, weights: list[Node], dropout_p: float, writes: Writes
) -> Node:
    output = emit.before
    query, key = query_and_key(emit, scores.product)
    value, order = value_operand(emit, output, weights[-1])
    check_holds(weights[0], tensor_of(scores.product).dtype)
    bias = _Bias(emit, writes, tensor_of(scores.product).dtype, tensor_of(weights[0]).dtype)
    for step in scores.steps:
        bias.apply(step)
    dtype = tensor_of(scores.product).dtype
    call = AttentionCall(
        query=bias.without_filled_rows(query),
        key=key,
        value=value,
        bias=bias.combined(),
        causal=False,
        scale=bias.scale,
        dropout_p=dropout_p,
        dtype=dtype,
        bias_dtype=None,
        out_dtype=tensor_of(output).dtype,
        grouped=False,
        blind_rows_are_nan=bias.may_leave_no_key,
    )
    attention = emit_attention(emit, call, writes)
    if order is not None:
        attention = emit.method("permute", attention, *order)
    return taking_the_place_of(emit, attention, output, writes)


class _Bias:
    """The steps applied so far: scores are ``scale * product + additive`` where ``allowed``.

    dtype: of the product. softmax_dtype: of the softmax, in which a fill may overflow to ``-inf``.
    """

    def __init__(
        self, emit: Emitter, writes: Writes, dtype: torch.dtype, softmax_dtype: torch.dtype
    ) -> None:
        self.scale = 1.0
        self._emit = emit
        self._writes = writes
        self._dtype = dtype
        self._softmax_dtype = softmax_dtype
        self._lowest = torch.finfo(softmax_dtype).min
        self._additive: Node | None = None
        self._allowed: Node | None = None
        self._unfilled: Node | None = None
        self._bounded = True  # what was added is no mask

    def apply(self, step: Step) -> None:
        """One more step.

        Raises:
            CannotNormalizeError: a bias needs a gradient, a fill is no mask, or the order of the
                steps makes something else of them than attention.
        """
        if isinstance(step, Multiply):
            self._multiply(step.factor)
        elif isinstance(step, Add):
            check_bias(step.bias, self._writes)
            if self._unfilled is not None:
                # Where both are about as low, filled keys keep weight, and take no gradient.
                raise CannotNormalizeError("a bias is added to scores that were filled")
            self._bounded &= self._is_far_from_fills(step)
            bias = step.bias
            if not tensor_of(bias).dtype.is_floating_point:  # to the op, a boolean one is a mask
                bias = self._emit.method("to", bias, self._dtype)
            self._add(self._times(bias, step.factor))
        else:
            self._fill(step)

    def _is_far_from_fills(self, step: Add) -> bool:
        """Whether a bias is proven to leave no score near the lowest number of the dtype."""
        bounds = bounds_of(step.bias, self._writes)
        return bounds is not None and max(map(abs, bounds)) * abs(step.factor) < _MODERATE

    def _multiply(self, factor: float) -> None:
        if factor == 0.0:
            raise CannotNormalizeError("the scores are multiplied by 0")
        if self._unfilled is not None:
            raise CannotNormalizeError("scores are multiplied after they were filled")
        if factor < 0.0 and (self._allowed is not None or self._additive is not None):
            raise CannotNormalizeError("masked scores are multiplied by a negative number")
        self.scale *= factor
        if self.scale == 0.0:
            raise CannotNormalizeError("the factors of the scores are 0 together")
        self._bounded &= self._additive is None or abs(factor) <= 1.0
        if self._additive is not None:
            self._additive = self._times(self._additive, factor)

    def _times(self, node: Node, factor: float) -> Node:
        return node if factor == 1.0 else self._emit.call(operator.mul, node, factor)

    def _add(self, bias: Node) -> None:
        if self._additive is not None:
            bias = self._emit.call(operator.add, self._additive, bias)
        self._additive = bias

    def _fill(self, step: Fill) -> None:
        with_nothing = check_fill(step)
        mask = step.mask
        if tensor_of(mask).dtype != torch.bool:
            mask = self._emit.method("to", mask, torch.bool)
        allowed = mask if step.keeps else self._emit.call(torch.logical_not, mask)
        if with_nothing or step.fill < self._lowest:
            self._allowed = self._and(self._allowed, allowed)
            return
        if not self._bounded:
            # A bias may be as low as the fill: then filled keys keep weight, and take no gradient.
            raise CannotNormalizeError("scores are filled after a mask was added to them")
        self._unfilled = self._and(self._unfilled, allowed)
        if self._allowed is not None:
            # A finite fill brings back keys that were at -inf.
            filled = self._emit.call(torch.logical_not, allowed)
            self._allowed = self._emit.call(operator.or_, self._allowed, filled)
        how = {"device": tensor_of(mask).device, "dtype": tensor_of(step.node).dtype}
        # Not a number: beside another one it would be fp32, which can not hold float64's lowest.
        fill = self._emit.call(torch.full, (), step.fill, **how)
        kept = self._additive
        if kept is None:
            kept = self._emit.call(torch.zeros, (), **how)
        self._additive = self._emit.call(torch.where, allowed, kept, fill)

    def _and(self, one: Node | None, other: Node) -> Node:
        return other if one is None else self._emit.call(operator.and_, one, other)

    def combined(self) -> Node | None:
        """The op's bias."""
        additive = self._additive
        if additive is None:
            return self._allowed
        if self._lowest > torch.finfo(tensor_of(additive).dtype).min:
            additive = self._emit.method("to", additive, self._softmax_dtype)
        if self._allowed is None:
            return additive
        return self._emit.call(torch.where, self._allowed, additive, -math.inf)

    @property
    def may_leave_no_key(self) -> bool:
        """Whether all keys of a row can be at ``-inf``."""
        return self._allowed is not None or self._additive is not None

    def without_filled_rows(self, query: Node) -> Node:
        """``query``, and 0 in rows whose scores are all filled."""
        if self._unfilled is None:
            return query
        free = self._unfilled if self._allowed is None else self._and(self._allowed, self._unfilled)
        some = self._emit.method("any", free, -1, True)
        value = tensor_of(query)
        zero = self._emit.call(torch.zeros, (), device=value.device, dtype=value.dtype)
        return self._emit.call(torch.where, some, query, zero)
