"""The pass that simplifies attention masks: what it rewrites, with the same results."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

import streambp_fx.ops.attention  # noqa: F401  (defines the ops)
from streambp_fx._torch import aot_autograd, make_boxed_func, select_decomp_table
from streambp_fx.passes.causal_masks import MaskReport, simplify_causal_masks

from .mask_programs import below, check_facts, positions, traced, window_of_three

ATTENTION = torch.ops.streambp.attention.default
ATTENTION_BACKWARD = torch.ops.streambp.attention_backward.default


def attention_graph(
    program: Callable[[Tensor], Tensor], causal: bool = False, keys: int | None = None
) -> GraphModule:
    """A graph with two attention calls that share a mask, and the backward of one."""

    def function(query: Tensor, key: Tensor) -> tuple[Tensor, ...]:
        mask = program(query[:, 0])
        out, lse = ATTENTION(query, key, key, mask, None, causal, 0.5, 0.0)
        again, _ = ATTENTION(out, key, key, mask, None, causal, 0.5, 0.0)
        grads = ATTENTION_BACKWARD(again, query, key, key, mask, None, out, lse, causal, 0.5, 0.0)
        return (again, *grads)

    length = 7
    query = torch.randn(2, 3, length, 4)
    return traced(function, query, torch.randn(2, 3, keys or length, 4), symbolic=False)


def attention_arguments(gm: GraphModule) -> list[tuple[Any, Any]]:
    """(bias, causal) of each call."""
    places = {ATTENTION: (3, 5), ATTENTION_BACKWARD: (4, 8)}
    return [
        (node.args[places[node.target][0]], node.args[places[node.target][1]])
        for node in gm.graph.nodes
        if node.target in places
    ]


def test_exactly_causal_masks_are_replaced_everywhere() -> None:
    gm = attention_graph(below)
    inputs = torch.randn(2, 3, 7, 4), torch.randn(2, 3, 7, 4)
    before = gm(*inputs)
    reports = simplify_causal_masks(gm)
    assert [report.change for report in reports] == ["replaced by causal"] * 3
    assert attention_arguments(gm) == [(None, True)] * 3
    assert not any(node.target is torch.ops.prims.iota.default for node in gm.graph.nodes)
    torch.testing.assert_close(gm(*inputs), before)


def test_implied_causal_keeps_the_mask_beside_causal() -> None:
    gm = attention_graph(window_of_three)
    inputs = torch.randn(2, 3, 7, 4), torch.randn(2, 3, 7, 4)
    before = gm(*inputs)
    reports = simplify_causal_masks(gm)
    assert [report.change for report in reports] == ["causal added"] * 3
    assert all(isinstance(bias, Node) and causal for bias, causal in attention_arguments(gm))
    torch.testing.assert_close(gm(*inputs), before)


def test_masks_that_do_nothing_are_removed() -> None:
    gm = attention_graph(lambda x: torch.ones(1, 7, dtype=torch.bool))
    assert [report.change for report in simplify_causal_masks(gm)] == ["removed"] * 3
    assert attention_arguments(gm) == [(None, False)] * 3


def test_masks_within_causal_are_removed_beside_causal() -> None:
    gm = attention_graph(lambda x: positions(x)[1] <= positions(x)[0] + 1, causal=True)
    assert [report.change for report in simplify_causal_masks(gm)] == ["removed"] * 3
    assert attention_arguments(gm) == [(None, True)] * 3


def test_unproven_masks_are_kept_and_reported() -> None:
    gm = attention_graph(lambda x: positions(x)[1] <= positions(x)[0] + 1)
    before = attention_arguments(gm)
    reports = simplify_causal_masks(gm)
    assert attention_arguments(gm) == before
    assert "kept" in str(reports[0]) and reports[0].mask in str(reports[0])


def test_rectangular_attention_is_not_made_causal() -> None:
    def program(x: Tensor) -> Tensor:
        return torch.arange(5) <= torch.arange(7)[:, None]

    gm = attention_graph(program, keys=5)
    assert [report.change for report in simplify_causal_masks(gm)] == ["kept"] * 3


# ------------------------------------------------------------------------- masks of real models

TINY = {
    "vocab_size": 97,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
}
BATCH, LENGTH = 3, 21
LEFT_PADDED = torch.ones(BATCH, LENGTH, dtype=torch.long)
LEFT_PADDED[0, :4] = 0
PACKED = torch.cat([torch.arange(9), torch.arange(12)]).expand(BATCH, LENGTH).contiguous()


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    return ATTENTION(query, key, value, attn_mask, None, is_causal, scale, dropout_p)[0]


def simplified(
    name: str, options: dict[str, Any], inputs: dict[str, Tensor], dynamic: bool
) -> list[MaskReport]:
    """The reports on the model's masks, each checked against the mask's numbers."""
    reports: list[MaskReport] = []

    def compile_forward(gm: GraphModule, _: Any) -> Callable[..., Any]:
        # The pass erases masks, so that their numbers come from a copy of the graph before it.
        whole = GraphModule(gm, copy.deepcopy(gm.graph))
        reports.extend(simplify_causal_masks(gm))

        def run(*arguments: Any) -> Any:
            values: dict[str, Any] = {}

            class Recorder(Interpreter):
                def run_node(self, n: Node) -> Any:
                    values[n.name] = super().run_node(n)
                    return values[n.name]

            expected = Recorder(whole).run(*arguments)
            for report in reports:
                check_facts(report.facts, values[report.mask], LENGTH)
            result = gm(*arguments)
            torch.testing.assert_close(result, expected)
            return result

        return make_boxed_func(run)

    def backend(gm: GraphModule, example_inputs: list[Any]) -> Any:
        for node in gm.graph.nodes:
            if node.target is F.scaled_dot_product_attention:
                node.target = _attention
        gm.recompile()
        compiler = aot_autograd(fw_compiler=compile_forward, decompositions=select_decomp_table())
        return compiler(gm, example_inputs)

    torch._dynamo.reset()
    torch.manual_seed(0)
    config = getattr(transformers, name)(**TINY, **options)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    with torch.no_grad():
        compiled = torch.compile(model, backend=backend, dynamic=dynamic or None)
        compiled(input_ids=torch.randint(5, 97, (BATCH, LENGTH)), use_cache=False, **inputs)
    return reports


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    ("name", "options", "inputs", "change", "window"),
    [
        ("Qwen3Config", {}, {}, "replaced by causal", None),
        ("Qwen3Config", {}, {"attention_mask": LEFT_PADDED}, "causal added", None),
        ("LlamaConfig", {}, {"position_ids": PACKED}, "causal added", None),
        ("MistralConfig", {"sliding_window": 8}, {}, "causal added", 8),
        ("Llama4TextConfig", {"attention_chunk_size": 8}, {}, "causal added", 8),
        (
            "LlamaConfig",
            {},
            {"attention_mask": torch.zeros(BATCH, 1, LENGTH, LENGTH)},
            "kept",
            None,
        ),
    ],
    ids=["causal", "padding", "documents", "window", "blocks", "data"],
)
def test_masks_of_models(
    name: str,
    options: dict[str, Any],
    inputs: dict[str, Tensor],
    change: str,
    window: int | None,
    dynamic: bool,
) -> None:
    reports = simplified(name, options, inputs, dynamic)
    assert [report.change for report in reports] == [change]
    assert reports[0].facts.window == window
