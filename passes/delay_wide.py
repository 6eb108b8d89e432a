"""Put off wide values that no later layer needs, so that none crosses from a segment to the next.

A training step may run two models, one after the other: a student and its teacher, or a policy and
its reference. Where the logits of the first wait for those of the second, they would be alive at
every waist between the second one's layers, and be kept for all tokens.

Given:  h = layers(ids); logits = h @ W; h2 = layers2(ids); loss = f(logits, h2 @ W2)
Result: h = layers(ids); h2 = layers2(ids); logits = h @ W; loss = f(logits, h2 @ W2)

Between two attention calls, the nodes that no later attention call depends on may run where they
stand, or as late as just before their first reader. They are parted where the fewest bytes are
alive: what is before that place stays, what is after it is put off. Log-probabilities of a
reference, narrower than the hidden states they come from, stay.

The head of a model that is trained is put off even so. Its hidden states are kept for all tokens,
but it joins the last segment: the layer before it is like other layers, takes their chunk size, and
the head's backward may join its forward.

Calls whose place matters, such as those that write to memory or draw random numbers, stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from itertools import pairwise

from torch.fx import Node

from .flow import Flow
from .value_bytes import bytes_alive


def delay_wide_values(flow: Flow) -> list[Node]:
    """The calls of ``flow`` in a topological order in which no wide value waits for later layers.

    Args:
        flow: a step's calls in the program's order.
    """
    calls = flow.calls
    attention = [position for position, node in enumerate(calls) if flow.attends(node)]
    feeds, members = _feeds_attention(flow), set(calls)
    widest = max((bytes_alive([node]) for node in calls if not flow.is_square(node)), default=0)
    moved: set[Node] = set()
    for start, end in pairwise(attention):
        between = calls[start + 1 : end]
        group = [node for node in between if node not in feeds and node not in flow.placed]
        head = _start_of_trained_head(group, widest, flow)
        moved.update(group[_narrowest_prefix(group, head, members) :])
    return _put_off(calls, moved) if moved else list(calls)


def _feeds_attention(flow: Flow) -> set[Node]:
    """The nodes that some attention call depends on."""
    found: set[Node] = set()
    for node in reversed(flow.calls):
        if any(user in found or flow.attends(user) for user in node.users if user in flow.trained):
            found.add(node)
    return found


def _start_of_trained_head(group: list[Node], widest: int, flow: Flow) -> int:
    """Where in ``group`` logits begin that a gradient reaches; its length if there are none.

    Values count as logits from half the bytes of the widest one, so that those of the shorter of
    two calls do.
    """
    for index, node in enumerate(group):
        if 2 * bytes_alive([node]) >= widest:
            return index if flow.modes[node].gradients else len(group)
    return len(group)


def _narrowest_prefix(group: list[Node], most: int, flow: AbstractSet[Node]) -> int:
    """How many nodes of ``group``, at ``most``, to compute where they stand without a loss."""
    own = set(group)
    best, fewest = 0, None
    for count in range(most + 1):
        later = set(group[count:])
        alive = [
            node
            for node in group[:count]
            if any(user in later or user not in own for user in node.users)
        ]
        alive += [
            arg for node in later for arg in node.all_input_nodes if arg not in own and arg in flow
        ]
        weight = bytes_alive(alive)
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
