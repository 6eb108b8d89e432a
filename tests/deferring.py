"""A backend that defers outputs and does nothing else, and models to try it on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from transformers import AutoModelForCausalLM, LlamaConfig

from streambp_fx._torch import aot_autograd, make_boxed_func
from streambp_fx.deferred import DeferredTensor
from streambp_fx.passes.defer_outputs import Deferral, defer_outputs

VOCABULARY = 97


class Backend:
    """Defers outputs and runs the rest of the graph as it is."""

    def __init__(self, *, keep_outputs: bool = False) -> None:
        self.keep_outputs = keep_outputs
        self.deferrals: list[Deferral] = []
        self.again: Callable[[], Sequence[Any]]
        """Repeats the last call below Dynamo."""

    def __call__(self, gm: GraphModule, inputs: Any) -> Callable[..., Any]:
        def compiler(gm: GraphModule, example_inputs: Any) -> Any:
            return make_boxed_func(gm.forward)

        deferral = defer_outputs(gm, inputs, keep_outputs=self.keep_outputs)
        self.deferrals.append(deferral)
        inner = aot_autograd(fw_compiler=compiler, bw_compiler=compiler)(deferral.graph, inputs)

        def run(*args: Any) -> Sequence[Any]:
            self.again = lambda: deferral.rebuild(inner(*args), args)
            return self.again()

        return run


class Head(nn.Module):
    """A hidden layer, a head and a loss, with options for what is between them."""

    def __init__(
        self, vocabulary: int = VOCABULARY, finish: Callable[[Tensor], Tensor] | None = None
    ):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, 16)
        self.inner = nn.Linear(16, 16)
        self.head = nn.Linear(16, vocabulary, bias=False)
        self.finish = finish

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.head(self.inner(self.embed(ids)).tanh())
        if self.finish is not None:
            logits = self.finish(logits)
        return logits.float().logsumexp(-1).mean(), logits


def token_ids(batch: int = 2, length: int = 11) -> Tensor:
    return torch.randint(0, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(1))


def tiny_llama() -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").train()


def is_deferred(tensor: Tensor) -> bool:
    return isinstance(tensor, DeferredTensor) and "deferred" in repr(tensor)
