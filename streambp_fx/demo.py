"""One small model, trained a step in four ways: memory, time and gradient error side by side.

The step is the one that a training loop runs, ``model(input_ids=ids, labels=ids).loss.backward()``
on a Hugging Face model with random weights. Every way is held against the same two runs:
gradients against eager in fp64, time against gradient checkpointing, in pairs.
"""

from __future__ import annotations

import copy
import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from .explaining.peers import switch_on_checkpointing
from .measure import (
    Quartiles,
    gradient_error,
    memory_use,
    paired_ratio,
    paired_times,
    step_time,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Gradients = dict[str, torch.Tensor | None]

GRADIENT_TOLERANCE = 1e-4
"""Worst relative gradient error that fp32 rounding explains; what is over it is a fault."""

VARIANTS = {
    "eager": "eager",
    "gc": "gradient checkpointing",
    "compile": "torch.compile",
    "streambp": 'backend="streambp"',
}
"""The ways to run a step, and what a reader calls them."""


@dataclass(frozen=True)
class DemoConfig:
    """The model and the sequence that the demo runs.

    ``width`` is a multiple of 64, the size of a head; each two query heads share one key head.
    """

    tokens: int = 2048
    layers: int = 4
    width: int = 256
    vocabulary: int = 8192
    rounds: int = 5

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.width % 128:
            raise ValueError(f"width must be a multiple of 128, got {self.width}")


@dataclass(frozen=True)
class Row:
    """What was measured of one variant, or why it could not be.

    ``peak`` is in bytes above the step's start with gradients allocated; ``time_ratio`` is to
    gradient checkpointing (below 1 is faster); ``first_call`` is in seconds and holds compiling;
    ``gradient_error`` is the worst parameter's, relative, against fp64 eager.
    """

    variant: str
    peak: int | None = None
    time_ratio: Quartiles | None = None
    first_call: float | None = None
    gradient_error: float | None = None
    failure: str | None = None

    @property
    def right(self) -> bool:
        """Whether it ran and its gradient is as exact as fp32 allows."""
        return (
            self.failure is None
            and self.gradient_error is not None
            and self.gradient_error <= GRADIENT_TOLERANCE
        )


def build_model(
    *, layers: int, width: int, vocabulary: int, intermediate: int, heads: int
) -> PreTrainedModel:
    """A Qwen3 of ``heads`` query heads of ``width / heads``, two to a key head, and random weights.

    The head is not tied to the embedding. The same arguments give the same weights. Dropout is 0.
    """
    from transformers import AutoModelForCausalLM, Qwen3Config

    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=width // heads,
        max_position_embeddings=131072,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    model.train()
    return model


def prepare(model: PreTrainedModel, variant: str) -> Callable[..., Any]:
    """``model`` as ``variant`` calls it; for ``"gc"``, checkpointing is switched on in ``model``.

    Raises:
        ValueError: ``variant`` is not one of `VARIANTS`.
    """
    match variant:
        case "eager":
            return model
        case "gc":
            switch_on_checkpointing([model])
            return model
        case "compile":
            return torch.compile(model)
        case "streambp":
            return torch.compile(model, backend="streambp")
    raise ValueError(f"unknown variant {variant!r}; there are {', '.join(VARIANTS)}")


def allocate_gradients(model: torch.nn.Module) -> None:
    """Give each parameter a zero gradient, so that no step is charged for allocating them."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)


def training_step(
    model: torch.nn.Module, call: Callable[..., Any], ids: torch.Tensor
) -> Callable[[], None]:
    """A step on ``ids`` (int64, ``[batch, tokens]``); it clears earlier gradients."""

    def step() -> None:
        model.zero_grad(set_to_none=False)
        call(input_ids=ids, labels=ids).loss.backward()

    return step


def gradients_of(model: torch.nn.Module) -> Gradients:
    """A copy of each parameter's gradient, by name."""
    return {
        name: None if parameter.grad is None else parameter.grad.clone()
        for name, parameter in model.named_parameters()
    }


class Demo:
    """The demo's model and what each variant is held against.

    ``on_progress`` is told, in a few words, what is being done now.
    """

    def __init__(
        self, config: DemoConfig, on_progress: Callable[[str], object] = lambda text: None
    ) -> None:
        self._config = config
        self._on_progress = on_progress
        self._ids = torch.randint(
            0,
            config.vocabulary,
            (1, config.tokens),
            generator=torch.Generator().manual_seed(0),
        )
        self._model = build_model(
            layers=config.layers,
            width=config.width,
            vocabulary=config.vocabulary,
            intermediate=3 * config.width,
            heads=config.width // 64,
        )

    def rows(self) -> Iterator[Row]:
        """Measure each variant in turn; one that fails gives its reason, and the next goes on."""
        self._on_progress("reference: eager in fp64")
        reference = self._reference()
        for variant in VARIANTS:
            with _nothing_left_behind():
                try:
                    row = self._measure(variant, reference)
                except Exception as error:  # noqa: BLE001 - the row says what went wrong
                    row = Row(variant, failure=reason(error))
            yield row

    def _reference(self) -> Gradients:
        model = copy.deepcopy(self._model).double()
        allocate_gradients(model)
        training_step(model, model, self._ids)()
        return gradients_of(model)

    def _measure(self, variant: str, reference: Gradients) -> Row:
        name = VARIANTS[variant]
        model, step = self._prepared(variant)
        self._on_progress(f"{name}: first call")
        start = time.perf_counter()
        step()
        first_call = time.perf_counter() - start
        error = gradient_error(gradients_of(model), reference)

        self._on_progress(f"{name}: memory")
        peak = memory_use(step).peak

        self._on_progress(f"{name}: time")
        if variant == "gc":
            ratio = Quartiles.of([1.0])
        else:
            _, baseline = self._prepared("gc")
            step_time(baseline)
            times = paired_times({"gc": baseline, variant: step}, self._config.rounds)
            ratio = paired_ratio(times[variant], times["gc"])
        return Row(variant, peak, ratio, first_call, error)

    def _prepared(self, variant: str) -> tuple[torch.nn.Module, Callable[[], None]]:
        model = copy.deepcopy(self._model)
        allocate_gradients(model)
        return model, training_step(model, prepare(model, variant), self._ids)


@contextmanager
def _nothing_left_behind() -> Iterator[None]:
    """What one variant compiled or kept alive is gone before the next one starts."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()
    gc.collect()


def reason(error: BaseException) -> str:
    """The error's type and the first line of what it says."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
