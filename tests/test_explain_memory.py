"""Predicted memory is what a step takes, and each term is what its name says.

No constant of the model was tuned on the sizes here. Predictions are made in a process that never
runs a model, measurements in another one.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from functools import cache
from typing import Any

import pytest
import torch

from streambp_fx.explaining.explanation import Explanation, explain
from streambp_fx.explaining.step_memory import Moment
from streambp_fx.explaining.terms import Term
from tests.memory_of import HEAD_DIM, _model, _options

TOLERANCE = 0.05
SLACK = 0.02
LENGTHS, WIDTHS, CHUNKS = (501, 1100, 2003), (128, 384), (150, 333)
COMMON = {"layers": 2, "vocabulary": 3001, "batch": 1, "compile_bodies": False}


def case(tokens: int, width: int, chunk: int, **changed: Any) -> dict[str, Any]:
    return {**COMMON, "tokens": tokens, "width": width, "chunk": chunk, **changed}


EVERY = [case(*sizes) for sizes in itertools.product(LENGTHS, WIDTHS, CHUNKS)]
# Measuring a case takes half a minute, most of it in the profiler that counts.
ONE = [case(501, 128, 200, layers=1)]
COMPILED = [case(1100, 128, 150, compile_bodies=True)]
OTHERS = [case(501, 128, 150, batch=3), case(1100, 128, 333, layers=5, vocabulary=257)]


@cache
def outcomes(way: str, cases: str) -> list[dict[str, Any]]:
    """What a fresh process says of the cases."""
    command = [sys.executable, "-m", "tests.memory_of", way, cases]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


def assert_predicted(cases: list[dict[str, Any]]) -> None:
    text = json.dumps(cases)
    predictions = outcomes("predict", text)
    faults = []
    for given, wanted, found in zip(cases, predictions, outcomes("measure", text), strict=True):
        ratio = wanted["bytes"] / found["bytes"]
        if abs(ratio - 1) > TOLERANCE:
            faults.append(f"{given}: predicted {wanted['bytes']}, measured {found['bytes']}")
        assert sum(wanted["terms"].values()) == wanted["bytes"]
    assert not faults, "\n".join(faults)


def test_a_measured_peak_is_as_predicted() -> None:
    assert_predicted(ONE)


@pytest.mark.slow
def test_measured_peaks_are_as_predicted_at_all_sizes() -> None:
    assert_predicted(EVERY)


@pytest.mark.slow
def test_measured_peaks_are_as_predicted_with_rows_and_layers() -> None:
    assert_predicted(OTHERS)


@pytest.mark.slow
def test_measured_peaks_are_as_predicted_for_compiled_bodies() -> None:
    assert_predicted(COMPILED)


# Each term against a formula of its own.

B, T, L, D, V, C = 2, 350, 3, 128, 1009, 100
KV = D // 2
FFN = 3 * D
FP32 = 4
SCALARS = 16
"""Bytes of the loss and the gradient that it starts with."""
LAYER_WEIGHTS = 2 * D * D + 2 * D * KV + 3 * D * FFN + 2 * D + 2 * HEAD_DIM


@pytest.fixture(scope="module")
def explained() -> Explanation:
    sizes = case(T, D, C, layers=L, vocabulary=V, batch=B)
    with torch.device("meta"):
        model, ids = _model(sizes), torch.zeros(B, T, dtype=torch.int64)
    return explain(model, input_ids=ids, labels=ids, options=_options(sizes), peers=())


def at(explained: Explanation, loop: str) -> Moment:
    """The moment at which a loop runs."""
    return next(m for m in explained.memory.moments if m.node == loop)


@pytest.mark.parametrize("layer", range(1, L + 1))
def test_layer_inputs_are_one_tensor_a_segment(explained: Explanation, layer: int) -> None:
    one = B * T * D * FP32
    # Forward has the inputs of this layer and of all before it, and what it puts together now.
    assert at(explained, f"segment{layer}").terms()[Term.LAYER_INPUTS] == (layer + 1) * one
    assert at(explained, f"stage{layer}_1").terms()[Term.LAYER_INPUTS] == layer * one


@pytest.mark.parametrize("layer", range(1, L + 1))
def test_a_stage_has_the_residual_gradient_that_enters_and_that_leaves(
    explained: Explanation, layer: int
) -> None:
    found = at(explained, f"stage{layer}_1").terms()[Term.RESIDUAL_GRADIENT]
    assert found - SCALARS <= 2 * B * T * D * FP32 <= found


@pytest.mark.parametrize("loop", [f"segment{n}" for n in range(1, L + 1)] + ["stage2_1"])
def test_keys_and_values_are_those_of_one_layer(explained: Explanation, loop: str) -> None:
    terms = at(explained, loop).terms()
    assert terms[Term.KEYS_VALUES] == 2 * B * T * KV * FP32
    in_backward = loop.startswith("stage")
    assert terms.get(Term.KEY_VALUE_GRADIENTS, 0) == in_backward * 2 * B * T * KV * FP32


@pytest.mark.parametrize("layer", range(1, L + 1))
def test_parameter_gradients_are_those_of_one_layer(explained: Explanation, layer: int) -> None:
    found = at(explained, f"stage{layer}_1").terms()[Term.PARAMETER_GRADIENTS]
    assert found - SCALARS <= LAYER_WEIGHTS * FP32 <= found


def test_the_heads_chunk_is_a_few_copies_of_its_logits(explained: Explanation) -> None:
    logits = B * -(-T // -(-T // C)) * V * FP32
    copies = at(explained, f"segment{L + 1}").terms()[Term.HEAD] / logits
    assert 2 <= copies <= 5


def test_a_layers_chunk_does_not_grow_with_the_sequence(explained: Explanation) -> None:
    sizes = case(2 * T, D, C, layers=L, vocabulary=V, batch=B)
    with torch.device("meta"):
        model, ids = _model(sizes), torch.zeros(B, 2 * T, dtype=torch.int64)
    longer = explain(model, input_ids=ids, labels=ids, options=_options(sizes), peers=())
    once, twice = (at(e, "stage2_1").terms()[Term.CHUNK] for e in (explained, longer))
    chunk = B * -(-T // -(-T // C)) * FP32
    # The chunk's MLP: gate, up and their product, and gradients of all three.
    assert once > 6 * chunk * FFN
    # What grows is the additive mask of a chunk over its prefix, and nothing else.
    assert twice - once <= 2 * (T * chunk)


def test_nothing_but_small_prologues_is_beside_the_named_terms(explained: Explanation) -> None:
    slack = {Term.PROLOGUE, Term.UNSTREAMED, Term.WEIGHTS}
    peak = explained.peak
    named = (buffer.name for buffer in peak.buffers if buffer.term in slack)
    rest = sum(size for term, size in peak.terms().items() if term in slack)
    positions = 2 * T * HEAD_DIM * FP32  # cosines and sines, or the angles of which they are
    tokens = 8 * B * T * 8  # labels, masks of labels, positions
    assert rest - positions - tokens <= SLACK * peak.nbytes, list(named)


def test_every_buffer_has_the_size_of_the_tensor_that_it_names(explained: Explanation) -> None:
    sizes: dict[str, set[int]] = {}
    for graph in explained.graphs:
        for name in ("forward", "backward"):
            for node in graph.graphs[name].graph.nodes:
                value = node.meta.get("val")
                if isinstance(value, torch.Tensor):
                    size = value.numel() * value.element_size()
                    sizes.setdefault(node.name, set()).add(size)
    checked = 0
    for moment in explained.memory.moments:
        for buffer in moment.buffers:
            if buffer.name in sizes and buffer.term not in (Term.PROLOGUE, Term.UNSTREAMED):
                assert buffer.nbytes in sizes[buffer.name], buffer
                checked += 1
    assert checked > 100
