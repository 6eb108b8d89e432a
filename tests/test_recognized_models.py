"""Whose written-out attention is recognised: each layer's, with nothing left as it was.

A stricter proof must not lose a model in silence. Bloom, XLM, OpenAI's GPT, XGLM, CPM-Ant and
Gemma 2 (views, a fused mask or a softcap between the products) stream as products of tokens.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.attention_graphs import Captured
from tests.models import VOCAB, from_transformers, llama_settings

LAYERS = 2
_COMMON = {"vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_GPT = {**_COMMON, "n_embd": 32, "n_layer": LAYERS, "n_head": 4, "n_positions": 64}
_NO_DROPOUT = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
_OPT = {**_COMMON, "hidden_size": 32, "num_hidden_layers": LAYERS, "num_attention_heads": 4}

RECOGNIZED: dict[str, dict[str, Any]] = {
    "Llama": llama_settings(),
    "Qwen3": llama_settings(head_dim=8),
    "Mistral": llama_settings(sliding_window=8),
    "Gemma": llama_settings(head_dim=8),
    "Phi3": llama_settings(),
    "StableLm": llama_settings(),
    "GPTNeoX": {k: v for k, v in llama_settings().items() if k != "num_key_value_heads"},
    "OPT": {**_OPT, "ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0},
    "BioGpt": {**_OPT, "intermediate_size": 48, "hidden_dropout_prob": 0.0},
    "GPT2": {**_GPT, **_NO_DROPOUT},
    "GPTBigCode": {**_GPT, **_NO_DROPOUT},
    "GPTJ": {**_GPT, **_NO_DROPOUT, "rotary_dim": 4},
    "CodeGen": {**_GPT, **_NO_DROPOUT, "rotary_dim": 4},
    "CTRL": {**_GPT, "dff": 48, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
    "Mpt": {
        "vocab_size": VOCAB,
        "d_model": 32,
        "n_layers": LAYERS,
        "n_heads": 4,
        "max_seq_len": 64,
    },
}


@pytest.mark.parametrize("family", RECOGNIZED)
def test_written_out_attention_of_a_model_is_recognised(family: str) -> None:
    torch._dynamo.reset()
    model = from_transformers(family, RECOGNIZED[family], attention="eager")
    captured = Captured()
    ids = torch.randint(3, VOCAB, (2, 11))
    torch.compile(model, backend=captured)(input_ids=ids, labels=ids, use_cache=False)
    assert captured.refusals == []
    assert len(captured.attentions()) == LAYERS
