"""The passes, in order.

    replay_random_ops    random numbers become a function of a seed and the position
    normalize            aliases and repeats go
    pin_layouts          what reads memory by strides gets it as it was traced
    compare_one_hots     scatters of one value become comparisons
    normalize_kernels    attention kernels that calls hid become our op
    simplify_causal_masks  masks that are proven causal are never built
    stream_along_one_axis  loops, for each length of sequences that the graph has

The graphs are kept in `History`, with the seconds each pass took.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch.fx import GraphModule

from streambp_fx._torch import detect_fake_mode

from .axes import ANOTHER_LENGTH
from .barrier import Barrier
from .body_builder import RewriteError
from .causal_masks import simplify_causal_masks
from .history import History, Settings, timed
from .inputs import InputRole
from .normalize import normalize
from .normalize_kernels import normalize_kernels
from .one_axis import stream_along_one_axis
from .one_hot import compare_one_hots
from .pin_layouts import pin_layouts
from .random_ops import replay_random_ops
from .rewrite import Rewritten
from .rules.sizes import same_size
from .rules.spec import Size

__all__ = ["History", "Settings", "stream"]


def stream(
    graph_module: GraphModule,
    num_forward_outputs: int,
    input_roles: Sequence[InputRole],
    settings: Settings,
    history: History,
) -> Rewritten | None:
    """Rewrite a joint (or forward-only) graph; ``None``, with the reason, where nothing streams.

    The graph is changed on the way, also where a pass raises.

    Raises:
        RewriteError: the passes contradict each other.
    """
    left = timed(history, "replay_random_ops", lambda: replay_random_ops(graph_module))
    history.barriers += [
        Barrier.at(node, f"its random numbers can not be drawn again: {why}") for node, why in left
    ]
    history.keep("replay_random_ops", graph_module)
    guards = _guards(graph_module)
    normal = timed(history, "normalize", lambda: normalize(graph_module))
    history.graphs["normalized"] = normal
    history.keep("normalize", normal)
    timed(history, "pin_layouts", lambda: pin_layouts(normal))
    timed(history, "compare_one_hots", lambda: compare_one_hots(normal))
    timed(history, "normalize_kernels", lambda: normalize_kernels(normal))
    history.keep("normalize_kernels", normal)
    history.masks = timed(history, "simplify_causal_masks", lambda: simplify_causal_masks(normal))
    history.keep("simplify_causal_masks", normal)
    rewritten: Rewritten | None = None
    module, lengths = normal, list[Size]()
    while True:
        further = stream_along_one_axis(
            module, num_forward_outputs, input_roles, settings, history, lengths
        )
        if further is None:
            break
        rewritten, module = further, further.graph_module
        if not _has_another_length(history, settings, lengths):
            break
    _check_guards(normal, guards)
    if rewritten is not None:
        history.graphs["rewritten"] = rewritten.graph_module
    return rewritten


def _has_another_length(history: History, settings: Settings, lengths: Sequence[Size]) -> bool:
    """Whether the program has sequences of a length that was not streamed yet."""
    if any(barrier.reason == ANOTHER_LENGTH for barrier in history.barriers):
        return True
    return any(
        not any(same_size(attended, length) for length in lengths)
        for attended, _ in settings.attended
    )


def _guards(graph_module: GraphModule) -> int:
    """How many guards the shape environment of a traced graph has."""
    mode = detect_fake_mode([node.meta.get("val") for node in graph_module.graph.nodes])
    return 0 if mode is None or mode.shape_env is None else len(mode.shape_env.guards)


def _check_guards(graph_module: GraphModule, before: int) -> None:
    """Raise if the passes added a guard, which would make a new length recompile."""
    added = _guards(graph_module) - before
    if added:
        raise RewriteError(f"the passes added {added} guards on the sequence length")
