"""The zoo: tiny random-weight causal language models by name, and batches for them.

Every model takes ``input_ids`` and ``labels`` by keyword, has `VOCAB` tokens, and is built in under
a second. `loss_of` gets the loss out of whatever a model returns.

Tolerance. Transformers' models upcast norms, rotary angles and the loss to float32, so that in
float64 two right programs differ by about 1e-7. `make_dtype_preserving` answers each request for
float32 with float64; with it every model of the zoo is compared to `EXACT` = 1e-10. It can not
reach into recomputation in eager backward (the mode is gone by then), so tests with activation
checkpointing compare to `UPCAST` = 1e-6, except for models that have no upcast (`OWN`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tests.own_models import LONGEST, VOCAB, NanoGPT, TrilGPT

EXACT = 1e-10
UPCAST = 1e-6
Batch = dict[str, Any]

_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": LONGEST,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_NO_GROUPS = {key: value for key, value in _COMMON.items() if key != "num_key_value_heads"}
_GPT2: dict[str, Any] = {
    "vocab_size": VOCAB,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": LONGEST,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GPT2_NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}

_CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", _COMMON),
    "qwen2": ("Qwen2", _COMMON),
    "qwen3": ("Qwen3", {**_COMMON, "head_dim": 8}),
    "mistral": ("Mistral", {**_COMMON, "sliding_window": None}),
    "phi3": ("Phi3", _COMMON),
    "olmo2": ("Olmo2", _COMMON),
    "gemma": ("Gemma", {**_COMMON, "head_dim": 8}),
    "cohere": ("Cohere", {**_COMMON, "logit_scale": 0.0625}),
    "granite": (
        "Granite",
        {
            **_COMMON,
            "logits_scaling": 4.0,
            "residual_multiplier": 0.5,
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.2,
        },
    ),
    "stablelm": ("StableLm", _COMMON),
    "gpt2": ("GPT2", {**_GPT2, **_GPT2_NO_DROPOUT}),
    "gpt2_dropout": ("GPT2", _GPT2),
    "gptneox": ("GPTNeoX", {**_NO_GROUPS, "use_parallel_residual": True}),
    "opt": (
        "OPT",
        {
            **{key: value for key, value in _NO_GROUPS.items() if key != "intermediate_size"},
            "ffn_dim": 48,
            "word_embed_proj_dim": 32,
            "dropout": 0.0,
        },
    ),
}

_OWN: dict[str, Callable[[], nn.Module]] = {"nanogpt": NanoGPT, "trilgpt": TrilGPT}

OWN = tuple(_OWN)
STOCHASTIC = ("gpt2_dropout",)
NAMES = OWN + tuple(name for name in _CONFIGS if name not in STOCHASTIC)


def build(name: str, *, seed: int = 0, **changes: Any) -> Any:
    """The model called ``name`` in training mode, float32, with weights drawn from ``seed``.

    ``changes`` go to the configuration of a transformers class. The type is open so that tests may
    name submodules.

    Raises:
        KeyError: there is no such model.
    """
    torch.manual_seed(seed)
    if name in _OWN:
        return _OWN[name](**changes).train()
    family, settings = _CONFIGS[name]
    return from_transformers(family, {**settings, **changes})


def from_transformers(family: str, settings: dict[str, Any], *, attention: str = "sdpa") -> Any:
    """The causal language model of ``family`` with random weights large enough to matter."""
    config = getattr(transformers, f"{family}Config")(**settings)
    config._attn_implementation = attention
    head = "LMHeadModel" if family in ("GPT2", "CTRL") else "ForCausalLM"
    model = getattr(transformers, f"{family}{head}")(config)
    with torch.no_grad():
        for weight in model.parameters():
            # The initial 0.02 makes attention uniform and the logits flat, which hides faults;
            # zero biases and unit norms hide them too.
            weight.add_(torch.randn_like(weight) * 0.1)
    return model.train()


def llama_settings(**changes: Any) -> dict[str, Any]:
    """The settings shared by the Llama-like members of the zoo, with ``changes``."""
    return {**_COMMON, **changes}


def loss_of(output: Any) -> Tensor:
    """The loss in a model's output: a tensor, or the ``loss`` of a transformers output."""
    return output if isinstance(output, Tensor) else output.loss


class _Float64ForFloat32(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.Tensor.float:
            return args[0].double()
        args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
        kwargs = {
            key: torch.float64 if value is torch.float32 else value
            for key, value in (kwargs or {}).items()
        }
        return func(*args, **kwargs)


class _DtypePreserving(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        # Entered inside forward, so that Dynamo traces it away: a backend never sees the mode.
        with _Float64ForFloat32():
            return self.model(*args, **kwargs)


def make_dtype_preserving(model: nn.Module) -> Any:
    """``model`` in float64, with each cast to float32 in its forward answered by one to float64."""
    return _DtypePreserving(model.double())


def make_batch(
    batch: int, length: int, *, kind: str = "plain", seed: int = 1, ignored: float = 0.1
) -> Batch:
    """Random ids and labels ``[batch, length]``, int64, a tenth of the labels ignored.

    ``kind`` is ``plain``; ``left_padded`` or ``right_padded`` (a 2-D mask; each row another
    length); ``packed`` (``position_ids`` that start anew twice); or ``mask_4d`` (an explicit
    additive causal mask that also hides one key from later rows).

    Raises:
        ValueError: no such kind.
    """
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCAB, (batch, length), generator=draw)
    labels = ids.clone()
    labels[torch.rand(batch, length, generator=draw) < ignored] = -100
    labels[:, -1] = ids[:, -1]  # at least one label is left even in the shortest batch
    result: Batch = {"input_ids": ids, "labels": labels}
    if kind == "plain":
        return result
    if kind in ("left_padded", "right_padded"):
        mask = torch.ones_like(ids)
        for row in range(batch):
            hidden = min(1 + 3 * row, length - 2)
            where = slice(0, hidden) if kind == "left_padded" else slice(length - hidden, length)
            mask[row, where] = 0
        ids[mask == 0] = 0
        labels[mask == 0] = -100
        return {**result, "attention_mask": mask}
    if kind == "packed":
        first, second = length // 3, length // 3 + 1  # the second document has one token
        positions = torch.cat(
            [torch.arange(first), torch.arange(second - first), torch.arange(length - second)]
        )
        positions = positions.expand(batch, length).contiguous()
        # With a cache transformers takes one document for granted and detects no packing.
        return {**result, "position_ids": positions, "use_cache": False}
    if kind == "mask_4d":
        allowed = torch.ones(length, length, dtype=torch.bool).tril()
        allowed[length // 2 :, length // 4] = False
        mask_4d = torch.zeros(batch, 1, length, length, dtype=torch.float64)
        return {**result, "attention_mask": mask_4d.masked_fill(~allowed, float("-inf"))}
    raise ValueError(f"no batch is called {kind!r}")
