"""Pass: token inputs that are of one shape in the example are taken to be so always.

Given:  ``input_ids[s0, s1]``, ``labels[s2, s3]`` with ``s0 == s2`` and ``s1 == s3`` in the example
Result: ``input_ids[s0, s1]``, ``labels[s0, s1]``, and two guards

Dynamo gives sizes that become dynamic one after the other symbols of their own. Cross entropy then
only knows that ``s0 * s1 == s2 * s3``, and a row of the logits can not be told to belong to a row
of the labels. Guards are what torch's duck shaping does with sizes that are dynamic at once. They
are added here, before anything is traced; no later pass adds one.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch.fx import GraphModule

from .dynamo_calls import value_of
from .placement import hint_of
from .rules.sizes import same_size


def equate_token_shapes(graph_module: GraphModule) -> None:
    """Guard that integer inputs ``[batch, tokens]`` with equal sizes in the example have one shape.

    Sizes that are constants are left alone: a guard would make a symbol one too.
    """
    values = map(value_of, graph_module.graph.find_nodes(op="placeholder"))
    tokens = [
        value
        for value in values
        if value is not None and value.dim() == 2 and not value.is_floating_point()
    ]
    for first, other in pairwise(tokens):
        pairs = list(zip(first.shape, other.shape, strict=True))
        if all(hint_of(one) == hint_of(two) for one, two in pairs):
            for one, two in pairs:
                both_symbolic = isinstance(one, torch.SymInt) and isinstance(two, torch.SymInt)
                if both_symbolic and not same_size(one, two):
                    bool(one == two)
