"""Plans: what a few layers and lengths tell of the whole is what the whole is."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig, Qwen3Config

from streambp_fx.demo import allocate_gradients
from streambp_fx.explaining.body_memory import eager_workspace
from streambp_fx.explaining.peers import CHECKPOINTING, EAGER, switch_on_checkpointing
from streambp_fx.explaining.trace import Traced
from streambp_fx.measure import memory_use
from streambp_fx.options import Options
from streambp_fx.planning import BUNDLED, ConfigError, Plan, PlanningError, Setting, plan
from streambp_fx.planning.extrapolate import Curve, piecewise_linear, quadratic, to_layers
from streambp_fx.planning.lora import adapt
from streambp_fx.planning.models import build, layer_counts, load_config, period, with_layers
from streambp_fx.planning.objectives import PROGRAMS, batch_of
from streambp_fx.planning.plan import (
    KEPT_GRADIENTS,
    OPTIMIZER,
    REFERENCE,
    SHORTEST,
    STREAMED,
    WEIGHTS,
    lengths_of_a_row,
)
from streambp_fx.planning.setting import GIB
from streambp_fx.planning.timelines import (
    Instant,
    Timeline,
    plain_timeline,
    streamed_step,
    streamed_timeline,
)

planning = importlib.import_module("streambp_fx.planning.plan")

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 400,
}


def qwen(layers: int, **more: Any) -> Any:
    return Qwen3Config(num_hidden_layers=layers, **(SIZES | more))


def gemma(layers: int) -> Any:
    kinds = [("full" if i % 3 == 2 else "sliding") + "_attention" for i in range(layers)]
    return Gemma3TextConfig(
        num_hidden_layers=layers, layer_types=kinds, sliding_window=100, **SIZES
    )


def setting(**more: Any) -> Setting:
    return Setting(**({"memory_gib": 0.25, "reserve_gib": 0.0, "dtype": "fp32"} | more))


def quick_plan(config: Any, chosen: Setting, *ways: str) -> Plan:
    return plan(config, chosen, chunk_size=300, head_chunk_size=100, ways=ways or planning.WAYS)


def step_peak(config: Any, chosen: Setting, way: str, tokens: int) -> int:
    """The peak of a step of all layers of ``config``, traced at this very length."""
    model, batch = build(config, torch.float32), batch_of(chosen, tokens)
    if way == STREAMED:
        step = streamed_step(PROGRAMS["sft"], model, batch, keeps_gradients=chosen.keeps_gradients)
        timeline = streamed_timeline(step, 300, 100)
    else:
        timeline = plain_timeline(
            PROGRAMS["sft"],
            model,
            batch,
            checkpointing=way == CHECKPOINTING,
            keeps_gradients=chosen.keeps_gradients,
        )
    instants = (*timeline.forward, *timeline.backward)
    return max(sum(instant.terms.values()) for instant in instants)


WAYS = planning.WAYS
ATTENTION_BUFFERS = 2**16
"""A little more than what the CPU's attention kernel takes for itself, whatever the length."""


@pytest.mark.parametrize(
    ("config", "chosen", "ways"),
    [
        (qwen(6), setting(), (STREAMED,)),
        pytest.param(qwen(6), setting(), (EAGER, CHECKPOINTING), marks=pytest.mark.slow),
        pytest.param(
            qwen(6),
            setting(lora_rank=4, objective="dpo", dtype="bf16"),
            (CHECKPOINTING, STREAMED),
            marks=pytest.mark.slow,
        ),
        pytest.param(gemma(11), setting(), WAYS, marks=pytest.mark.slow),
        pytest.param(
            qwen(9, tie_word_embeddings=True),
            setting(dtype="bf16", keeps_gradients=True),
            WAYS,
            marks=pytest.mark.slow,
        ),
        pytest.param(qwen(9), setting(objective="grpo", group=3), WAYS, marks=pytest.mark.slow),
    ],
    ids=["full", "peers", "lora-dpo", "two-kinds-of-layers", "tied-kept-bf16", "grpo"],
)
def test_few_layers_tell_the_memory_of_all(
    config: Any, chosen: Setting, ways: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    carried = quick_plan(config, chosen, *ways)
    assert len(carried.traced) == 2 and carried.traced[1] < config.num_hidden_layers
    monkeypatch.setattr(planning, "layer_counts", lambda config: (config.num_hidden_layers,))
    whole = quick_plan(config, chosen, *ways)
    assert (carried.parameters, carried.trained) == (whole.parameters, whole.trained)
    for one, other in zip(carried.ways, whole.ways, strict=True):
        assert one.longest == other.longest > 256, one.way
        assert list(one.curve) == list(other.curve), one.way
        assert one.terms == other.terms, one.way


def test_the_longest_sequence_fits_and_one_more_token_does_not() -> None:
    """Between the traced lengths, memory is affine in the length but for a chunk's workspace."""
    config, chosen = qwen(3), setting()
    found = quick_plan(config, chosen)
    for way in found.ways:
        assert chosen.budget - 2**17 < way.peak <= chosen.budget, way.way
    longest = [found[way].longest for way in (EAGER, CHECKPOINTING, STREAMED)]
    assert longest == sorted(longest) and longest[0] * 2 < longest[2]
    for way in found.ways:
        resident = way.terms[WEIGHTS]
        whole = step_peak(config, chosen, way.way, way.longest)
        assert resident + whole == pytest.approx(way.peak, rel=0.01), way.way


def test_chunk_sizes_set_afterwards_are_those_of_a_trace_with_them() -> None:
    model, batch = build(qwen(3), torch.float32), batch_of(setting(), 1000)
    options = Options(chunk_size=170, head_chunk_size=70, on_barrier="ignore")
    traced = Traced(PROGRAMS["sft"], (model, batch), {}, options)
    expected = traced.memory(eager_workspace).peak.nbytes
    step = streamed_step(PROGRAMS["sft"], model, batch, keeps_gradients=True)
    peaks = []
    for sizes in ((170, 70), (340, 70), (170, 1000)):
        timeline = streamed_timeline(step, *sizes)
        instants = (*timeline.forward, *timeline.backward)
        peaks.append(max(sum(instant.terms.values()) for instant in instants))
    assert peaks[0] == expected
    assert peaks[0] < max(peaks[1:])


@pytest.mark.parametrize("way", planning.WAYS)
@pytest.mark.parametrize(
    "keeps", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["kept", "fresh"]
)
def test_a_planned_peak_is_the_measured_one(way: str, keeps: bool) -> None:
    """A real step, with all of its layers."""
    config, tokens = qwen(4, vocab_size=4000), 1500
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).train()
    ids = torch.randint(0, 4000, (1, tokens))
    call: Any = model
    if way == CHECKPOINTING:
        model.config.use_cache = False
        switch_on_checkpointing([model])
    if way == STREAMED:
        sizes = {"chunk_size": 300, "head_chunk_size": 100}
        call = torch.compile(model, backend="streambp", options={"compile_bodies": False, **sizes})
    if keeps:
        allocate_gradients(model)

    def step() -> None:
        model.zero_grad(set_to_none=not keeps)
        call(input_ids=ids, labels=ids).loss.backward()

    step()
    measured = memory_use(step).peak
    chosen = setting(keeps_gradients=keeps)
    assert step_peak(config, chosen, way, tokens) == pytest.approx(
        measured, rel=0.01, abs=ATTENTION_BUFFERS
    )


@pytest.mark.slow
def test_chosen_chunks_are_the_largest_that_cost_little() -> None:
    chosen = setting()
    found = plan(qwen(4), chosen, ways=(STREAMED,))[STREAMED]
    assert found.chunk_size is not None and found.head_chunk_size is not None
    smallest = plan(qwen(4), chosen, chunk_size=256, head_chunk_size=64, ways=(STREAMED,))
    assert found.longest >= 0.95 * smallest[STREAMED].longest
    twice = {"chunk_size": 2 * found.chunk_size, "head_chunk_size": found.head_chunk_size}
    if found.chunk_size < planning.CHUNK_SIZES[0]:
        larger = plan(qwen(4), chosen, ways=(STREAMED,), **twice)
        assert larger[STREAMED].longest < 0.98 * smallest[STREAMED].longest


def test_what_is_resident_is_what_the_setting_says() -> None:
    def terms(**more: Any) -> Any:
        found = quick_plan(qwen(4), setting(**more), EAGER)
        return found, found[EAGER].terms

    full, sft = terms()
    assert sft[WEIGHTS] == 4 * full.parameters and full.trained == full.parameters
    assert not {REFERENCE, OPTIMIZER, KEPT_GRADIENTS} & sft.keys()
    _, adamw = terms(optimizer="adamw", keeps_gradients=True)
    assert adamw[OPTIMIZER] == 8 * full.parameters
    assert adamw[KEPT_GRADIENTS] == 4 * full.parameters
    _, dpo = terms(objective="dpo")
    assert dpo[REFERENCE] == dpo[WEIGHTS]
    lora, adapted = terms(objective="dpo", lora_rank=4, optimizer="adamw")
    # Per layer, of rank 4: inputs and outputs of q and o (64, 64), k and v (64, 32), gate and up
    # (64, 160), down (160, 64).
    assert lora.trained == 4 * 4 * (2 * 128 + 2 * 96 + 3 * 224)
    assert lora.parameters == full.parameters + lora.trained
    assert REFERENCE not in adapted and adapted[OPTIMIZER] == 8 * lora.trained


def test_weights_that_do_not_fit_leave_no_length() -> None:
    found = quick_plan(qwen(3), setting(memory_gib=0.0005), EAGER)
    assert found[EAGER].longest == 0
    assert found[EAGER].peak > found.setting.budget


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("Gemma3-1B", 1.00),
        ("Llama-3.1-8B", 8.03),
        ("Qwen3-4B", 4.02),
        ("Qwen3-8B", 8.19),
        ("Qwen3-14B", 14.77),
        ("Qwen3-32B", 32.76),
    ],
)
def test_bundled_configurations_have_their_published_size(name: str, billions: float) -> None:
    assert name in BUNDLED
    model = build(load_config(name.lower()), torch.bfloat16)
    assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(billions, abs=0.006)


def test_a_config_file_and_its_folder_are_read(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "qwen3", "num_hidden_layers": 5, **SIZES}))
    for path in (file, tmp_path):
        config = load_config(str(path))
        assert (config.num_hidden_layers, config.hidden_size) == (5, 64)


@pytest.mark.parametrize(
    "text", ['{"model_type": "no such thing"}', "{}", "no json", '{"model_type": "vit"}']
)
def test_what_is_no_configuration_of_a_causal_model_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "config.json"
    file.write_text(text)
    with pytest.raises(ConfigError):
        load_config(str(file)) and build(load_config(str(file)), torch.float32)


def test_an_unknown_name_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(ConfigError, match=r"Gemma3-1B, Llama-3\.1-8B"):
        load_config("Qwen9-1B")


@pytest.mark.parametrize(
    "wrong",
    [
        {"dtype": "int8"},
        {"objective": "ppo"},
        {"optimizer": "lion"},
        {"batch": 0},
        {"group": 0},
        {"lora_rank": 0},
        {"reserve_gib": 80.0},
        {"memory_gib": float("inf")},
    ],
)
def test_impossible_settings_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Setting(**wrong)


@pytest.mark.parametrize("rows", [1, 64, 65, 128, 256, 5000])
def test_lengths_of_many_rows_differ(rows: int) -> None:
    for way in WAYS:
        lengths = lengths_of_a_row(way, rows)
        assert sorted(set(lengths)) == list(lengths) and lengths[0] >= SHORTEST


def test_an_unknown_way_is_refused() -> None:
    with pytest.raises(ValueError, match="offload"):
        plan(qwen(3), setting(), ways=("offload",))


def test_layers_are_counted_in_step_with_their_kinds() -> None:
    assert (period(qwen(7)), layer_counts(qwen(7))) == (1, (3, 4))
    assert (period(gemma(11)), layer_counts(gemma(11))) == (3, (5, 8))
    assert layer_counts(qwen(4)) == (4,)
    assert layer_counts(gemma(5)) == (5,)
    shorter = with_layers(gemma(11), 5)
    assert shorter.num_hidden_layers == 5
    assert shorter.layer_types == gemma(5).layer_types


def test_layers_that_are_not_alike_are_refused() -> None:
    few = Timeline([Instant("add", {"a": 1})], [])
    more = Timeline([Instant("mul", {"a": 2}), Instant("add", {"a": 2})], [])
    with pytest.raises(PlanningError, match="add runs with fewer layers, mul does with more"):
        to_layers({3: few, 4: more}, 9)


def test_terms_are_split_by_whether_they_grow_with_layers() -> None:
    few = Timeline([], [Instant("add", {"a": 50})])
    more = Timeline([], [Instant("add", {"a": 60})])
    assert to_layers({3: few, 4: more}, 10) == [{"a": 120}]
    split = to_layers({3: few, 4: more}, 10, frozenset({"a"}))
    assert split == [{"a of all layers": 100, "other a": 20}]


def test_interpolations_pass_through_what_is_known() -> None:
    points = (2, 4, 8)
    assert quadratic(points, [3 * x * x + x for x in points], 10) == pytest.approx(310)
    kinked = [2.0, 2.0, 10.0]
    assert [piecewise_linear(points, kinked, x) for x in (1, 3, 6, 9)] == [2, 2, 6, 12]


def test_the_peak_is_that_of_the_moment_that_is_highest_at_the_length() -> None:
    flat, steep = tuple({"a": 5.0} for _ in range(2)), ({"b": 1.0}, {"b": 2.0})
    curve = Curve((1, 2), (flat, steep), piecewise_linear)
    assert (curve.peak(3), curve.terms(3)) == (5, {"a": 5})
    assert (curve.peak(7), curve.terms(7)) == (7, {"b": 7})


def test_adapters_leave_the_head_alone_and_train_nothing_else() -> None:
    model = build(qwen(3), torch.bfloat16)
    adapt(model, 2)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert len(trained) == 3 * 7 * 2
    assert all(name.endswith((".down", ".up")) for name in trained)


@pytest.mark.slow
def test_few_layers_tell_the_memory_of_a_large_model(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = Setting()
    carried = quick_plan("Qwen3-4B", chosen, CHECKPOINTING, STREAMED)
    monkeypatch.setattr(planning, "layer_counts", lambda config: (config.num_hidden_layers,))
    whole = quick_plan("Qwen3-4B", chosen, CHECKPOINTING, STREAMED)
    for one, other in zip(carried.ways, whole.ways, strict=True):
        assert one.longest == pytest.approx(other.longest, rel=1e-3)
        assert other.peak / GIB == pytest.approx(79, abs=0.01)
