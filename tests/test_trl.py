"""TRL's own trainers with one more line: the same numbers in less memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from streambp_fx.integrations import trl as integration
from tests.marks import slow_but
from tests.test_trainers import make_trainer
from tests.trainers import (
    OPTIONS,
    Run,
    arguments,
    assert_less_memory,
    assert_nothing_compiled_late,
    assert_same_history,
    assert_same_weights,
    lengths,
    tiny_model,
    tokenizer,
    train,
    words,
)
from tests.watch import Compiles, count_compiles

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")


def _stream(trainer: Any) -> Any:
    torch._dynamo.reset()
    integration.stream(trainer, options=OPTIONS)
    return trainer


def _texts(count: int = 24) -> Any:
    return datasets.Dataset.from_list(
        [{"text": words(length, seed)} for seed, length in enumerate(lengths(count))]
    )


def _sft(folder: Path, peft_config: Any = None, **changes: Any) -> Any:
    return trl.SFTTrainer(
        tiny_model(),
        args=trl.SFTConfig(**arguments(folder, **changes)),
        peft_config=peft_config,
        train_dataset=_texts(),
        processing_class=tokenizer(),
    )


def _compare(make: Any, *names: str, tolerance: float = 1e-5) -> tuple[Run, Run]:
    want = train(make())
    got = train(_stream(make()))
    assert_same_history(got, want, *names, tolerance=tolerance)
    assert_same_weights(got.weights, want.weights, 1e-3)
    assert_nothing_compiled_late(got)
    return got, want


def test_sft(tmp_path: Path) -> None:
    got, want = _compare(lambda: _sft(tmp_path), "entropy", "mean_token_accuracy")
    assert_less_memory(got, want)


def _preferences(count: int = 24) -> Any:
    return datasets.Dataset.from_list(
        [
            {
                "prompt": words(4, seed),
                "chosen": " " + words(length, seed + 100),
                "rejected": " " + words(length // 2 + 2, seed + 200),
            }
            for seed, length in enumerate(lengths(count))
        ]
    )


def _dpo(folder: Path, peft_config: Any = None, **changes: Any) -> Any:
    return trl.DPOTrainer(
        tiny_model(),
        ref_model=None if peft_config else tiny_model(),
        args=trl.DPOConfig(**arguments(folder, **changes)),
        peft_config=peft_config,
        train_dataset=_preferences(),
        processing_class=tokenizer(),
    )


def test_dpo(tmp_path: Path) -> None:
    got, want = _compare(
        lambda: _dpo(tmp_path), "rewards/margins", "logps/chosen", "logits/chosen", tolerance=1e-4
    )
    assert_less_memory(got, want)


@pytest.mark.parametrize(
    "make", slow_but([_dpo], [_sft, _dpo]), ids=lambda make: make.__name__.strip("_")
)
def test_mixed_precision(tmp_path: Path, make: Any) -> None:
    """As TRL trains by default; a reference model's forward is wrapped before it is streamed."""
    want = train(make(tmp_path, bf16=True))
    got = train(_stream(make(tmp_path, bf16=True)))
    assert_same_history(got, want, tolerance=2e-2)
    assert_nothing_compiled_late(got)


def _prompts(count: int = 24) -> Any:
    return datasets.Dataset.from_list(
        [{"prompt": words(length, seed)} for seed, length in enumerate(lengths(count))]
    )


def _reward(completions: list[str], **_: Any) -> list[float]:
    """The share of even words."""
    return [
        sum(int(word[1:]) % 2 == 0 for word in text.split()) / max(len(text.split()), 1)
        for text in completions
    ]


def _grpo(folder: Path, peft_config: Any = None) -> Any:
    return trl.GRPOTrainer(
        tiny_model(),
        reward_funcs=_reward,
        args=trl.GRPOConfig(
            **arguments(folder, num_generations=2, max_completion_length=12, beta=0.0)
        ),
        peft_config=peft_config,
        train_dataset=_prompts(),
        processing_class=tokenizer(),
    )


def test_grpo(tmp_path: Path) -> None:
    got, want = _compare(lambda: _grpo(tmp_path), "reward", "entropy")
    assert_less_memory(got, want)


def _kernel_case(dtype: torch.dtype) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(23, 16, generator=draw, dtype=dtype)
    weight = torch.randn(41, 16, generator=draw, dtype=dtype)
    return {
        "hidden": hidden.requires_grad_(),
        "weight": weight.requires_grad_(),
        "bias": torch.randn(41, generator=draw, dtype=dtype).requires_grad_(),
        "targets": torch.randint(41, (23,), generator=draw),
    }


@pytest.mark.parametrize(
    ("temperature", "softcap", "scale"), [(1.0, None, 1.0), (0.7, None, 1.0), (1.3, 5.0, 0.5)]
)
def test_plain_formulas_are_those_of_the_kernel(
    temperature: float, softcap: float | None, scale: float
) -> None:
    from trl.kernels.chunked_logprob import OPTIONAL_OUTPUTS, ChunkedLogProbFunction

    results = []
    for function in (integration.PlainLogProbs, ChunkedLogProbFunction):
        case = _kernel_case(torch.float32)
        values = function.apply(*case.values(), temperature, 8, softcap, scale, OPTIONAL_OUTPUTS)
        log_probs, entropy, *others = values
        (2 * log_probs.sin().sum() + entropy.square().sum()).backward()
        grads = [value.grad for name, value in case.items() if name != "targets"]
        results.append([log_probs.detach(), entropy.detach(), *others, *grads])
    for got, want in zip(*results, strict=True):
        assert got.shape == want.shape and got.dtype == want.dtype and not got.requires_grad
        torch.testing.assert_close(got, want, rtol=1e-5, atol=2e-5)


def test_statistics_that_are_not_asked_for_are_not_computed() -> None:
    case = _kernel_case(torch.float32)
    values = integration.PlainLogProbs.apply(*case.values(), 1.0, 8, None, 1.0, ("log_probs",))
    assert values.log_probs.requires_grad
    assert values[1:] == (None, None, None, None)


def test_a_model_is_streamed_once(tmp_path: Path) -> None:
    trainer = _sft(tmp_path)
    integration.stream(trainer)
    with pytest.raises(integration.IntegrationError, match="Qwen3ForCausalLM"):
        integration.stream(trainer)


def test_a_trainer_without_a_fused_head_is_refused(tmp_path: Path) -> None:
    with pytest.raises(integration.IntegrationError, match="SFTTrainer"):
        integration.stream(make_trainer(tmp_path, tiny_model()))


def test_generation_and_saving_are_those_of_the_model(tmp_path: Path) -> None:
    plain, trainer = tiny_model(), _stream(_sft(tmp_path))
    prompt = torch.arange(3, 12)[None]
    sampling: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False}
    with count_compiles() as compiles:
        tokens = trainer.model.eval().generate(prompt, **sampling)
    assert torch.equal(tokens, plain.eval().generate(prompt, **sampling))
    assert compiles == Compiles(0, 0)

    trainer.save_model(str(tmp_path))
    load: Any = AutoModelForCausalLM.from_pretrained
    loaded, info = load(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"], info
    assert_same_weights(loaded.state_dict(), plain.state_dict(), 0)


@pytest.mark.slow
def test_evaluation(tmp_path: Path) -> None:
    results = []
    for trainer in (_sft(tmp_path), _stream(_sft(tmp_path))):
        trainer.args.prediction_loss_only = True
        results.append(trainer.evaluate(_texts(6)))
    want, got = results
    for name in ("eval_loss", "eval_entropy", "eval_mean_token_accuracy"):
        assert got[name] == pytest.approx(want[name], rel=1e-5), name


@pytest.mark.slow
@pytest.mark.parametrize("make", [_sft, _dpo, _grpo])
def test_adapters(tmp_path: Path, make: Any) -> None:
    """DPO's reference is the same model with its adapters off: a second compilation, no third."""
    peft = pytest.importorskip("peft")

    def trainer() -> Any:
        config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "up_proj"])
        return make(tmp_path, peft_config=config)

    _compare(trainer, tolerance=1e-4)
