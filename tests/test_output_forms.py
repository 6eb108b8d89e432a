"""What a caller may ask a model to return beside the loss, and in which form."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.backend import assert_streamed_whole, streamed
from tests.models import build, make_batch, make_dtype_preserving

CHUNK, LENGTH = 8, 21


def _llama() -> nn.Module:
    return make_dtype_preserving(build("llama"))


def _gradients(model: nn.Module, loss: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(model.parameters())))


@pytest.mark.parametrize("keywords", [{}, {"return_dict": False}])
def test_hidden_states_of_every_layer(keywords: dict[str, Any]) -> None:
    model, data = _llama(), make_batch(2, LENGTH)
    keywords["output_hidden_states"] = True
    want = model(**data, **keywords)
    got = streamed(model, chunk_size=CHUNK)(**data, **keywords)
    assert_streamed_whole()
    (own, right) = (out[-1] if isinstance(out, tuple) else out.hidden_states for out in (got, want))
    assert len(own) == len(right) > 2
    for left, other in zip(own, right, strict=True):
        torch.testing.assert_close(left.detach() + 0, other.detach(), rtol=1e-10, atol=1e-12)
    losses = [out[0] if isinstance(out, tuple) else out.loss for out in (got, want)]
    left, other = (_gradients(model, loss) for loss in losses)
    torch.testing.assert_close(left, other, rtol=1e-9, atol=1e-13)


def test_tuple_of_outputs() -> None:
    model, data = _llama(), make_batch(2, LENGTH)
    want = model(**data, return_dict=False)
    got = streamed(model, chunk_size=CHUNK)(**data, return_dict=False)
    assert isinstance(got, tuple) and len(got) == len(want)
    torch.testing.assert_close(got[0], want[0], rtol=1e-12, atol=0)
    torch.testing.assert_close(got[1] + 0, want[1], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("in_place", [True, False])
def test_generation_on_a_compiled_model(in_place: bool) -> None:
    model = build("llama").eval()
    prompt = make_batch(1, LENGTH)["input_ids"][:, :5]
    settings = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    want = model.generate(prompt, **settings)  # type: ignore[operator]
    options = {"compile_bodies": False, "chunk_size": CHUNK}
    if in_place:
        model.compile(backend="streambp", options=options)
        function: Any = model
    else:
        function = torch.compile(model, backend="streambp", options=options)
    assert torch.equal(function.generate(prompt, **settings), want)


def test_training_goes_on_after_generation() -> None:
    model, data = build("llama"), make_batch(2, LENGTH)
    want = _gradients(model, model(**data).loss)
    model.compile(backend="streambp", options={"compile_bodies": False, "chunk_size": CHUNK})
    first = _gradients(model, model(**data).loss)
    model.generate(  # type: ignore[operator]
        data["input_ids"][:, :5], max_new_tokens=3, do_sample=False, pad_token_id=0
    )
    second = _gradients(model, model(**data).loss)
    for got in (first, second):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)
