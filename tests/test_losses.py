"""`streambp_fx.losses`: right by formulas written anew here, and streamed when compiled."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from streambp_fx.losses import dpo_loss, grpo_loss, sft_loss
from tests.backend import assert_streamed_whole, streamed
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

Metrics = dict[str, Tensor]
Formula = Callable[..., tuple[Tensor, Metrics]]


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


# The formulas, written with loops over rows and tokens that count, apart from the package's.


def _distributions(model: Any, batch: Batch, temperature: float = 1.0) -> Tensor:
    output = model(batch["input_ids"], attention_mask=batch["attention_mask"])
    logits = output if isinstance(output, Tensor) else output.logits
    return F.log_softmax(logits / temperature, -1)


def _mean(values: list[Tensor]) -> Tensor:
    return torch.stack(values).mean()


def _entropy(p: Tensor) -> Tensor:
    return -(p.exp() * p).sum()


def sft_formula(
    model: Any,
    batch: Batch,
    *,
    num_items_in_batch: Any = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    loss_type: str = "nll",
) -> tuple[Tensor, Metrics]:
    logits = model(batch["input_ids"], attention_mask=batch["attention_mask"])
    logits = logits if isinstance(logits, Tensor) else logits.logits
    each, hits, entropies = [], [], []
    for row in range(len(logits)):
        for place in range(LENGTH - 1):
            label = batch["labels"][row, place + 1]
            if label == -100:
                continue
            line = logits[row, place]
            nll = F.cross_entropy(line, label)
            smoothed = F.cross_entropy(line, label, label_smoothing=label_smoothing)
            if loss_type == "dft":
                nll_weight = torch.exp(-nll.detach())
                smoothed = smoothed + (1 - label_smoothing) * (nll_weight - 1) * nll
            each.append(smoothed + z_loss * torch.logsumexp(line, -1) ** 2)
            hits.append((line.argmax() == label).float())
            entropies.append(_entropy(F.log_softmax(line, -1)))
    count = len(each) if num_items_in_batch is None else num_items_in_batch
    metrics = {"mean_token_accuracy": _mean(hits), "entropy": _mean(entropies)}
    return torch.stack(each).sum() / count, metrics


def dpo_formula(
    model: Any,
    batch: Batch,
    *,
    ref_model: Any = None,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    loss_type: str = "sigmoid",
    reference_free: bool = False,
    average_log_prob: bool | None = None,
    simpo_gamma: float = 0.0,
) -> tuple[Tensor, Metrics]:
    average = average_log_prob or (average_log_prob is None and loss_type == "ipo")
    scores, hits, entropies = _sequence_scores(model, batch, average)
    pairs = len(scores) // 2
    reference = [torch.zeros(())] * (2 * pairs)
    if ref_model is not None:
        reference, _, _ = _sequence_scores(ref_model, batch, average)
    elif not reference_free:
        reference = [*batch["ref_chosen_logps"], *batch["ref_rejected_logps"]]
    each, chosen, rejected = [], [], []
    for pair in range(pairs):
        chosen.append(scores[pair] - reference[pair])
        rejected.append(scores[pair + pairs] - reference[pair + pairs])
        h = chosen[-1] - rejected[-1]
        p = torch.sigmoid(beta * h - simpo_gamma)
        each.append(
            {
                "sigmoid": -(1 - label_smoothing) * p.log() - label_smoothing * (1 - p).log(),
                "hinge": (1 - beta * h).clamp(min=0),
                "ipo": (h - 0.5 / beta) ** 2,
            }[loss_type]
        )
    margins = [c - r for c, r in zip(chosen, rejected, strict=True)]
    return _mean(each), {
        "rewards/chosen": beta * _mean(chosen),
        "rewards/rejected": beta * _mean(rejected),
        "rewards/margins": beta * _mean(margins),
        "rewards/accuracies": _mean([(margin > 0).float() for margin in margins]),
        "logps/chosen": _mean(scores[:pairs]),
        "logps/rejected": _mean(scores[pairs:]),
        "mean_token_accuracy": _mean([hit for row in hits[:pairs] for hit in row]),
        "entropy": _mean([h for row in entropies for h in row]),
    }


def _sequence_scores(model: Any, batch: Batch, average: bool) -> tuple[list[Any], ...]:
    scores, hits, entropies = [], [], []
    p, ids = _distributions(model, batch), batch["input_ids"]
    for row in range(len(ids)):
        places = [t for t in range(1, LENGTH) if batch["completion_mask"][row, t]]
        each = torch.stack([p[row, t - 1, ids[row, t]] for t in places])
        scores.append(each.mean() if average else each.sum())
        hits.append([(p[row, t - 1].argmax() == ids[row, t]).float() for t in places])
        entropies.append([_entropy(p[row, t - 1]) for t in places])
    return scores, hits, entropies


def grpo_formula(
    model: Any,
    batch: Batch,
    *,
    ref_model: Any = None,
    beta: float = 0.0,
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    delta: float | None = None,
    loss_type: str = "dapo",
    importance_sampling_level: str = "token",
    temperature: float = 1.0,
    entropy_coef: float = 0.0,
    num_items_in_batch: Any = None,
    max_completion_length: int | None = None,
) -> tuple[Tensor, Metrics]:
    high = epsilon if epsilon_high is None else epsilon_high
    p, ids = _distributions(model, batch, temperature), batch["input_ids"]
    reference = None if ref_model is None else _distributions(ref_model, batch, temperature)
    rows: list[list[Tensor]] = []
    seen: dict[str, list[Tensor]] = {}
    for row in range(len(ids)):
        places = [t for t in range(1, LENGTH) if batch["completion_mask"][row, t]]
        a = batch["advantages"][row]
        new = torch.stack([p[row, t - 1, ids[row, t]] for t in places])
        old = new.detach()
        if "old_per_token_logps" in batch:
            old = torch.stack([batch["old_per_token_logps"][row, t - 1] for t in places])
        mean = (new - old).mean()
        rows.append([])
        for index, t in enumerate(places):
            w = (mean if importance_sampling_level == "sequence" else new[index] - old[index]).exp()
            first = w * a if delta is None else w.clamp(max=delta) * a
            loss = -torch.minimum(first, w.clamp(1 - epsilon, 1 + high) * a)
            h = _entropy(p[row, t - 1])
            kl = torch.zeros(())
            if beta:
                before = batch["ref_per_token_logps"][row, t - 1]
                if reference is not None:
                    before = reference[row, t - 1, ids[row, t]]
                kl = torch.exp(before - new[index]) - (before - new[index]) - 1
            rows[-1].append(loss + beta * kl - entropy_coef * h)
            low_clip, high_clip = (w < 1 - epsilon) & (a < 0), (w > 1 + high) & (a > 0)
            for name, value in {
                "entropy": h,
                "mean_token_accuracy": p[row, t - 1].argmax() == ids[row, t],
                "clip_ratio/low_mean": low_clip,
                "clip_ratio/high_mean": high_clip,
                "clip_ratio/region_mean": low_clip | high_clip,
                **({"kl": kl} if beta else {}),
            }.items():
                seen.setdefault(name, []).append(value.double())
    every = torch.stack([value for row in rows for value in row])
    loss = {
        "grpo": _mean([torch.stack(row).mean() for row in rows]),
        "bnpo": every.mean(),
        "dapo": every.sum() / (num_items_in_batch or len(every)),
        "dr_grpo": every.sum() / (len(rows) * (max_completion_length or 1)),
    }[loss_type]
    return loss, {name: _mean(values) for name, values in seen.items()}


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


@pytest.mark.slow
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


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda m: sft_loss(m, _sft_batch(1), loss_type="nul"), "loss_type is one of"),
        (lambda m: dpo_loss(m, _dpo_batch(1), loss_type="dpo"), "loss_type is one of"),
        (lambda m: dpo_loss(m, _rows(2)), "needs ref_model"),
        (lambda m: grpo_loss(m, _grpo_batch(1), loss_type="ppo"), "loss_type is one of"),
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
