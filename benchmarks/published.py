"""The streambp package on PyPI (1.0), as one more way to run a step.

It is installed beside the other packages by ``benchmarks.peers``, since it needs an older
transformers. Its loss, and with it each gradient, is ``(T - 1) / T`` of the program's: it divides
the sum over the ``T - 1`` predicted tokens of a row by its ``T`` labels.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

REQUIREMENTS = (
    "streambp==1.0",
    "transformers==4.51.3",
    "accelerate>=1.6,<1.7",
    "datasets>=3.5,<4",
    "peft>=0.15,<0.16",
    "trl>=0.17,<0.18",
    "tokenizers>=0.21,<0.22",
    "huggingface_hub>=0.30,<1.0",
    "requests>=2.32",
    "urllib3>=2",
    "certifi",
    "charset-normalizer",
    "idna",
)
"""What is installed for it, without what these need in turn: torch must stay the one that all run.
The rest of their needs comes with the newer packages; these newer ones do not go with the older
transformers."""


def published_step(
    model: nn.Module, chunk_size: int = 500, head_chunk_size: int = 500
) -> Callable[..., Any]:
    """``model`` wrapped by the package; its layers are changed in place.

    Its forward runs the backward too. The loss that is returned here has a backward that does
    nothing, so that the step of a training script is the same for all.

    Raises:
        ImportError: the package is not installed.
    """
    wrapped = _stream_model().StreamModel(
        model,
        gradient_accumulation_steps=1,
        logits_chunk_size=head_chunk_size,
        checkpoint_chunk_size=chunk_size,
    )
    wrapped.gradient_checkpointing_enable()
    wrapped.train()

    def call(*, input_ids: Tensor, labels: Tensor) -> Any:
        # It needs the mask: without, a chunk's attention would be aligned to its first key.
        everywhere = torch.ones_like(input_ids)
        loss = wrapped(input_ids=input_ids, attention_mask=everywhere, labels=labels).loss
        return SimpleNamespace(loss=loss.detach().requires_grad_())

    return call


def _stream_model() -> ModuleType:
    """The package's module of that name, without the trainers that the package imports first."""
    package = importlib.util.find_spec("streambp")
    if package is None or not package.submodule_search_locations:
        raise ImportError(f"not installed: {REQUIREMENTS[0]}")
    path = Path(package.submodule_search_locations[0], "stream_model.py")
    spec = importlib.util.spec_from_file_location("streambp_stream_model", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"can not be loaded: {path}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
