"""The trainers of transformers and accelerate with one more line: the same numbers, less memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from streambp_fx.measure import peak_memory
from tests.trainers import (
    ACCUMULATION,
    OPTIONS,
    STEPS,
    WARM_UP,
    arguments,
    assert_less_memory,
    assert_nothing_compiled_late,
    assert_same_history,
    assert_same_weights,
    collate,
    tiny_model,
    token_rows,
    train,
)
from tests.watch import Compiles, count_compiles

pytest.importorskip("accelerate")


def compiled_in_place(model: Any = None, *, dynamic: bool | None = None, **changes: Any) -> Any:
    """A model after the one line."""
    torch._dynamo.reset()
    model = model or tiny_model()
    model.compile(backend="streambp", dynamic=dynamic, options={**OPTIONS, **changes})
    return model


def make_trainer(
    folder: Path, model: Any, *, compute_loss_func: Any = None, **changes: Any
) -> Trainer:
    return Trainer(
        model,
        args=TrainingArguments(**arguments(folder, **changes)),
        train_dataset=token_rows(),
        eval_dataset=token_rows(4),
        data_collator=collate,
        compute_loss_func=compute_loss_func,
    )


def test_trainer(tmp_path: Path) -> None:
    want = train(make_trainer(tmp_path, tiny_model()))
    got = train(make_trainer(tmp_path, compiled_in_place()))
    assert_same_history(got, want)
    assert_same_weights(got.weights, want.weights)
    assert_nothing_compiled_late(got)
    assert_less_memory(got, want)


def z_loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """Cross entropy and a penalty on the normaliser, from the model's logits."""
    logits, labels = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    entropy = F.cross_entropy(logits, labels, reduction="sum")
    return (entropy + 1e-3 * logits.logsumexp(-1).square().sum()) / num_items_in_batch


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes", [{"label_smoothing_factor": 0.1}, {"compute_loss_func": z_loss}]
)
def test_a_loss_of_the_trainers_own_is_compiled_with_the_model(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    want = train(make_trainer(tmp_path, tiny_model(), **changes))
    trainer = make_trainer(tmp_path, tiny_model(), **changes)
    torch._dynamo.reset()
    trainer.compute_loss = torch.compile(  # type: ignore[method-assign]
        trainer.compute_loss, backend="streambp", options=OPTIONS
    )
    got = train(trainer)
    assert_same_history(got, want)
    assert_nothing_compiled_late(got)
    assert_less_memory(got, want)


@pytest.mark.slow
def test_trainer_takes_a_compiled_module(tmp_path: Path) -> None:
    """Its signature names no columns, so that the trainer may not choose them."""
    changes = {"remove_unused_columns": False}
    want = train(make_trainer(tmp_path, tiny_model(), **changes))
    torch._dynamo.reset()
    module = torch.compile(tiny_model(), backend="streambp", options=OPTIONS)
    got = train(make_trainer(tmp_path, module, **changes))
    assert_same_history(got, want)
    assert_nothing_compiled_late(got)


def test_evaluation_and_generation_on_the_compiled_model(tmp_path: Path) -> None:
    """Decoding one token is no sequence, which the backend reports and runs as it is."""
    prompt = collate(token_rows(2))["input_ids"][:, :9]
    sampling: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False}

    def outcome(model: Any) -> tuple[float, Any, Tensor]:
        trainer = make_trainer(tmp_path, model, per_device_eval_batch_size=2)
        metrics = trainer.evaluate()
        trainer.args.prediction_loss_only = True
        assert trainer.evaluate()["eval_loss"] == metrics["eval_loss"]
        trainer.args.prediction_loss_only = False
        logits = trainer.predict(trainer.eval_dataset).predictions  # type: ignore[arg-type]
        model.eval()
        return metrics["eval_loss"], logits, model.generate(prompt, **sampling)

    want_loss, want_logits, want_tokens = outcome(tiny_model())
    loss, logits, tokens = outcome(compiled_in_place(on_barrier="ignore"))
    assert loss == pytest.approx(want_loss, rel=1e-6)
    assert logits.shape == want_logits.shape
    torch.testing.assert_close(
        torch.tensor(logits), torch.tensor(want_logits), rtol=1e-4, atol=1e-4
    )
    assert torch.equal(tokens, want_tokens)


def load_plain(folder: Path) -> Any:
    """The model that transformers loads from ``folder``, with every key known and none missing."""
    load: Any = AutoModelForCausalLM.from_pretrained
    loaded, info = load(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"], info
    return loaded


def test_saved_files_are_those_of_the_plain_model(tmp_path: Path) -> None:
    model = compiled_in_place()
    make_trainer(tmp_path, model).save_model(str(tmp_path))
    assert_same_weights(load_plain(tmp_path).state_dict(), model.state_dict(), 0)
    tiny_model().load_state_dict(model.state_dict(), strict=True)


@pytest.mark.slow
def test_a_resumed_run_ends_where_the_whole_one_ends(tmp_path: Path) -> None:
    saving = {"save_strategy": "steps", "save_steps": 3}
    whole = make_trainer(tmp_path, compiled_in_place(dynamic=True), **saving)
    whole.train()
    load_plain(tmp_path / "checkpoint-3")
    resumed = make_trainer(tmp_path, compiled_in_place(dynamic=True), **saving)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert_same_weights(
        dict(resumed.model.named_parameters()), dict(whole.model.named_parameters())
    )


def accelerate_loop(model: Any) -> tuple[list[float], Compiles, int]:
    """The losses of accelerate's own kind of loop, in bf16, what compiled late, a batch's peak."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(
        mixed_precision="bf16", cpu=True, gradient_accumulation_steps=ACCUMULATION
    )
    rows = token_rows(2 * STEPS * ACCUMULATION)
    data = torch.utils.data.DataLoader(rows, batch_size=2, collate_fn=collate)  # type: ignore[arg-type, var-annotated]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    losses: list[float] = []

    def step(batch: Any) -> None:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())

    batches = iter(data)
    for _ in range(WARM_UP):
        step(next(batches))
    with count_compiles() as late:
        for batch in batches:
            step(batch)
    peak = peak_memory(lambda: accelerator.backward(model(**batch).loss))
    AcceleratorState._reset_state(reset_partial_state=True)
    return losses, late, peak


def test_accelerate_in_bf16() -> None:
    want, _, whole = accelerate_loop(tiny_model())
    got, late, streamed = accelerate_loop(compiled_in_place(dynamic=True))
    assert len(want) == STEPS * ACCUMULATION
    assert got == pytest.approx(want, rel=2e-3)
    assert late == Compiles(0, 0)
    assert streamed < whole
