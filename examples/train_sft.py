"""Fine-tune a Hugging Face causal model in your own loop; one line makes it streamed.

    python examples/train_sft.py --tokens 4096 --steps 20

A tiny model with random weights stands in for yours: replace `tiny_model` by
``AutoModelForCausalLM.from_pretrained(...)`` and `batches` by your own data.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Qwen3Config

VOCABULARY = 512


def tiny_model() -> nn.Module:
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        tie_word_embeddings=False,
    )
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").train()


def batches(tokens: int, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Prompts that count up from a random number; only the answer's half is trained on."""
    for _ in range(steps):
        start = torch.randint(0, VOCABULARY, (1, 1))
        ids = (start + torch.arange(tokens)) % VOCABULARY
        labels = ids.clone()
        labels[:, : tokens // 2] = -100
        yield ids, labels


def train(tokens: int, steps: int, backend: str = "streambp") -> list[float]:
    """The loss of each step."""
    torch.manual_seed(0)
    model = tiny_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    streamed = torch.compile(model, backend=backend)
    losses = []
    for ids, labels in batches(tokens, steps):
        loss = streamed(input_ids=ids, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--backend", default="streambp", help="eager, inductor or streambp")
    arguments = parser.parse_args()
    losses = train(arguments.tokens, arguments.steps, arguments.backend)
    print(f"loss {losses[0]:.4f} at the first step, {losses[-1]:.4f} at step {len(losses)}")


if __name__ == "__main__":
    main()
