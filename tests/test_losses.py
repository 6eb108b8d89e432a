"""`streambp_fx.losses`: right by formulas written anew here, and streamed when compiled."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from streambp_fx.losses import dpo_loss, grpo_loss, sft_loss
from tests.backend import assert_streamed_whole, streamed
from tests.loss_formulas import Formula, Metrics, dpo_formula, grpo_formula, sft_formula
from tests.marks import slow_but
from tests.models import build, make_dtype_preserving
from tests.objectives import (
    CHUNK,
    LENGTH,
    VOCAB,
    Batch,
    Policy,
    check,
    completion_masks,
    noise,
    policy,
    run,
    token_ids,
)
from tests.oracle import assert_same_step


def _rows(rows: int) -> Batch:
    attention, completion = completion_masks(rows)
    ids = token_ids(rows)
    return {"input_ids": ids, "attention_mask": attention, "completion_mask": completion}


def _sft_batch(rows: int) -> Batch:
    batch = _rows(rows)
    batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    batch["labels"][:, 30:33] = -100
    return batch


def _dpo_batch(pairs: int) -> Batch:
    batch = _rows(2 * pairs)
    chosen, rejected = (-400 + noise(2 * pairs, scale=20)).chunk(2)
    return {**batch, "ref_chosen_logps": chosen, "ref_rejected_logps": rejected}


def _grpo_batch(rows: int) -> Batch:
    old = -7 + noise(rows, LENGTH - 1)
    return {
        **_rows(rows),
        "advantages": noise(rows, seed=4, scale=1.0),
        "old_per_token_logps": old,
        "ref_per_token_logps": old + noise(rows, LENGTH - 1, seed=3),
    }


def _assert_matches(
    function: Formula, formula: Formula, batch: Batch, models: tuple[nn.Module, ...], **options: Any
) -> None:
    """Fail unless the eager function computes what the formula says, gradients included."""
    got = run(lambda *m: function(m[0], batch, **_with_reference(m, options)), models, {})
    metrics: Metrics = {}

    def by_formula(*m: nn.Module) -> Tensor:
        loss, computed = formula(m[0], batch, **_with_reference(m, options))
        metrics.update(computed)
        return loss

    assert_same_step(got, run(by_formula, models, {}))
    assert got.metrics.keys() == metrics.keys()
    for name, value in got.metrics.items():
        want = metrics[name].detach()
        torch.testing.assert_close(value.double(), want.double(), rtol=1e-6, atol=1e-7)


def _with_reference(models: tuple[nn.Module, ...], options: Batch) -> Batch:
    return {**options, "ref_model": models[1]} if len(models) > 1 else options


def _check_streamed(
    function: Formula,
    models: tuple[nn.Module, ...],
    batch: Batch,
    rows: int,
    fused: bool | None = None,
    **options: Any,
) -> None:
    def objective(model: nn.Module, *reference: nn.Module, **data: Any) -> Any:
        return function(model, data, **_with_reference((model, *reference), options))

    check(objective, models, batch, logits_rows=rows, fused=fused)


SFT = [
    {},
    {"num_items_in_batch": torch.tensor(37)},
    {"label_smoothing": 0.1, "z_loss": 1e-2},
    {"loss_type": "dft"},
    {"loss_type": "dft", "label_smoothing": 0.2},
]
DPO = [
    {"label_smoothing": 0.1},
    {"loss_type": "hinge", "beta": 0.01},
    {"loss_type": "ipo"},
    {"reference_free": True, "average_log_prob": True, "beta": 2.0, "simpo_gamma": 0.5},
    {"loss_type": "ipo", "average_log_prob": False},
    {"reference": True},
]
GRPO = [
    {},
    {"loss_type": "grpo", "beta": 0.04, "epsilon_high": 0.28},
    {"loss_type": "dr_grpo", "max_completion_length": 64, "entropy_coef": 0.01, "temperature": 0.9},
    {"importance_sampling_level": "sequence", "loss_type": "grpo", "epsilon": 3e-2},
    {"loss_type": "bnpo", "beta": 0.1, "delta": 1.4},
    {"loss_type": "dapo", "num_items_in_batch": torch.tensor(123)},
    {"beta": 0.04, "reference": True},
    {"on policy": True},
]
FAMILIES: dict[str, tuple[Formula, Formula, Callable[[int], Batch], int, list[Any]]] = {
    "sft": (sft_loss, sft_formula, _sft_batch, 1, SFT),
    "dpo": (dpo_loss, dpo_formula, _dpo_batch, 2, DPO),
    "grpo": (grpo_loss, grpo_formula, _grpo_batch, 1, GRPO),
}
CASES = [(family, index) for family, entry in FAMILIES.items() for index in range(len(entry[4]))]


def _case(
    family: str, index: int, count: int
) -> tuple[tuple[nn.Module, ...], Batch, int, dict[str, Any]]:
    """Models, batch, rows and options of one case."""
    _, _, make, per, cases = FAMILIES[family]
    options = dict(cases[index])
    models: tuple[nn.Module, ...] = (policy(0),)
    if options.pop("reference", False):
        models = (*models, policy(1).requires_grad_(False))
    batch = make(count)
    if options.pop("on policy", False):
        del batch["old_per_token_logps"]
    return models, batch, per * count, options


@pytest.mark.parametrize("family, index", CASES)
def test_loss_and_metrics_are_those_of_the_formula(family: str, index: int) -> None:
    models, batch, _, options = _case(family, index, 2)
    function, formula = FAMILIES[family][:2]
    _assert_matches(function, formula, batch, models, **options)


STREAMED = [("sft", 0), ("sft", 2), ("dpo", 0), ("dpo", 2), ("dpo", 5)]
STREAMED += [("grpo", 1), ("grpo", 2), ("grpo", 3), ("grpo", 6)]


@pytest.mark.parametrize(
    "family, index, count",
    slow_but(
        [(*case, 4) for case in STREAMED], [(*case, count) for case in CASES for count in (1, 4)]
    ),
)
def test_loss_and_metrics_are_streamed(family: str, index: int, count: int) -> None:
    models, batch, rows, options = _case(family, index, count)
    _check_streamed(FAMILIES[family][0], models, batch, rows, **options)


def test_metrics_do_not_part_the_head_in_two_loops() -> None:
    _check_streamed(sft_loss, (policy(),), _sft_batch(1), 1, fused=True)


def _small(name: str, seed: int = 0) -> Any:
    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 2, "head_dim": 4}
    changes = {**sizes, "num_key_value_heads": 1, "vocab_size": VOCAB}
    return make_dtype_preserving(build(name, seed=seed, **changes))


@pytest.mark.parametrize(
    "family, name",
    slow_but(
        [("sft", "llama"), ("dpo", "qwen3")],
        [(family, name) for family in FAMILIES for name in ("llama", "qwen3", "mistral", "phi3")],
    ),
)
def test_transformers_model(family: str, name: str) -> None:
    function, formula, make, per, _ = FAMILIES[family]
    model, batch = _small(name), make(2)
    _assert_matches(function, formula, batch, (model,))
    _check_streamed(function, (model,), batch, 2 * per)


def test_function_itself_and_a_partial_of_it_are_compiled() -> None:
    model, batch = policy(), _dpo_batch(2)
    want = run(lambda m: dpo_loss(m, batch, beta=0.2, loss_type="ipo"), (model,), {})
    itself = streamed(dpo_loss, chunk_size=CHUNK)
    assert_same_step(run(lambda m: itself(m, batch, beta=0.2, loss_type="ipo"), (model,), {}), want)
    assert_streamed_whole()
    bound = streamed(partial(dpo_loss, beta=0.2, loss_type="ipo"), chunk_size=CHUNK)
    assert_same_step(run(lambda m: bound(m, batch), (model,), {}), want)
    assert_streamed_whole()


@pytest.mark.parametrize("family", FAMILIES)
def test_compiled_bodies(family: str) -> None:
    function, _, make, _, _ = FAMILIES[family]
    model, batch = policy(), make(2)
    want = run(lambda m: function(m, batch), (model,), {})
    compiled = streamed(function, chunk_size=CHUNK, compile_bodies=True)
    got = run(lambda m: compiled(m, batch), (model,), {})
    assert_same_step(got, want)
    torch.testing.assert_close(got.metrics, want.metrics)


def test_narrow_logits_are_cast_up() -> None:
    model: Policy = policy().bfloat16()
    batch = _sft_batch(2)
    loss, metrics = sft_loss(model, batch)
    assert loss.dtype == metrics["entropy"].dtype == torch.float32
    torch.testing.assert_close(loss, sft_loss(model.float(), batch)[0], rtol=2e-2, atol=0)


def test_batch_without_a_label_makes_nan_as_a_mean_of_nothing_does() -> None:
    batch = _sft_batch(1)
    batch["labels"].fill_(-100)
    loss, metrics = sft_loss(policy(), batch)
    assert loss.isnan() and metrics["entropy"] == 0
    assert sft_loss(policy(), batch, num_items_in_batch=5)[0] == 0


def _ids(rows: int) -> dict[str, Tensor]:
    return {"input_ids": _rows(rows)["input_ids"]}


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda m: sft_loss(m, _sft_batch(1), loss_type="nul"), "loss_type is one of"),
        (lambda m: dpo_loss(m, _dpo_batch(1), loss_type="dpo"), "loss_type is one of"),
        (lambda m: dpo_loss(m, _rows(2)), "needs ref_model"),
        (lambda m: grpo_loss(m, _grpo_batch(1), loss_type="ppo"), "loss_type is one of"),
        (lambda m: sft_loss(m, _rows(1)), "the batch lacks labels; it has input_ids"),
        (lambda m: dpo_loss(m, _ids(2)), "the batch lacks completion_mask; it has input_ids"),
        (lambda m: grpo_loss(m, _ids(2)), "lacks completion_mask, advantages; it has input_ids"),
        (lambda m: grpo_loss(m, _grpo_batch(1), importance_sampling_level="row"), "level is one"),
        (lambda m: grpo_loss(m, _grpo_batch(1), loss_type="dr_grpo"), "max_completion_length"),
        (
            lambda m: grpo_loss(m, {**_rows(1), "advantages": torch.ones(1)}, beta=0.1),
            "beta needs ref_model",
        ),
    ],
)
def test_bad_arguments_are_named(call: Callable[[nn.Module], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(policy())
