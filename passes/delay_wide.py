"""Put off wide values that no later layer needs, so that none is alive where the forward is cut.

A training step may run two models, one after the other: a student and its teacher, or a policy and
its reference. Where the logits of the first wait for those of the second, they would be alive at
every cut between the second one's layers, and be kept for all tokens.

Given:  h = layers(ids); logits = h @ W; h2 = layers2(ids); loss = f(logits, h2 @ W2)
Result: h = layers(ids); h2 = layers2(ids); logits = h @ W; loss = f(logits, h2 @ W2)

Between two attention calls, the nodes that no later attention call depends on may run where they
stand, or as late as just before their first reader. They are parted where the fewest bytes are
alive: what is before that place stays, what is after it is put off. Log-probabilities of a
reference, narrower than the hidden states they come from, stay.

The head of a model that is trained is put off even so. Its hidden states are kept for all tokens,
but it joins the last segment: the layer before it is like other layers, takes their chunk size, and
the head's backward may join its forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from itertools import pairwise

from torch.fx import Node

from .axes import Axes
from .dataflow import bytes_of, storage_of


def delay_wide_values(flow: Sequence[Node], axes: Axes, backward: AbstractSet[Node]) -> list[Node]:
    """The nodes of the forward in an order that is as right, and narrower between attention calls.

    Args:
        flow: the forward's nodes that depend on activations, in a topological order.
        axes: which of them are attention, or products of tokens with tokens.
        backward: the nodes that depend on a tangent.
    """
    attention = [position for position, node in enumerate(flow) if axes.attends(node)]
    feeds, members = _feeds_attention(flow, axes), set(flow)
    widest = max((bytes_of(node) for node in flow if node not in axes.columns), default=0)
    moved: set[Node] = set()
    for start, end in pairwise(attention):
        group = [node for node in flow[start + 1 : end] if node not in feeds]
        head = _start_of_trained_head(group, widest, backward)
        moved.update(group[_narrowest_prefix(group, head, members) :])
    if not moved:
        return list(flow)
    return _put_off(flow, moved)


def _feeds_attention(flow: Sequence[Node], axes: Axes) -> set[Node]:
    """The nodes that some attention call depends on."""
    found: set[Node] = set()
    for node in reversed(flow):
        if any(axes.attends(user) or user in found for user in node.users):
            found.add(node)
    return found


def _start_of_trained_head(group: list[Node], widest: int, backward: AbstractSet[Node]) -> int:
    """Where in ``group`` logits begin that a gradient reaches; its length if there are none.

    Values count as logits from half the bytes of the widest one, so that those of the shorter of
    two calls do.
    """
    for index, node in enumerate(group):
        if 2 * bytes_of(node) >= widest:
            after = (user for later in group[index:] for user in later.users)
            return index if any(user in backward for user in after) else len(group)
    return len(group)


def _narrowest_prefix(group: list[Node], most: int, flow: AbstractSet[Node]) -> int:
    """How many nodes of ``group``, at ``most``, to compute where they stand without a loss."""
    own = set(group)
    best, fewest = 0, None
    for count in range(most + 1):
        later = set(group[count:])
        alive = {
            storage_of(node)
            for node in group[:count]
            if any(user in later or user not in own for user in node.users)
        }
        alive |= {
            storage_of(arg)
            for node in later
            for arg in node.all_input_nodes
            if arg not in own and storage_of(arg) in flow
        }
        weight = sum(bytes_of(value) for value in alive)
        if fewest is None or weight <= fewest:
            best, fewest = count, weight
    return best


def _put_off(flow: Sequence[Node], moved: AbstractSet[Node]) -> list[Node]:
    """``flow`` with each node of ``moved`` just before the first reader that is not one of them."""
    result: list[Node] = []
    placed: set[Node] = set()

    def place(node: Node) -> None:
        stack = [node]
        while stack:
            current = stack[-1]
            waiting = [arg for arg in current.all_input_nodes if arg in moved and arg not in placed]
            if waiting:
                stack.extend(waiting)
                continue
            stack.pop()
            if current not in placed:
                placed.add(current)
                result.append(current)

    for node in flow:
        if node not in moved:
            place(node)
    for node in flow:
        place(node)
    return result
