"""What can not be streamed or makes no sense: a clear error, or eager's result and a reason."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.backend import BACKEND, last_report, needs_report, streamed
from tests.models import Batch, build, make_batch
from tests.oracle import assert_same_step, run
from tests.own_models import LogitsOnly

CHUNK = 8
LENGTH = 21


@needs_report
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chunk_sise": 8}, "chunk_sise"),
        ({"chunk_size": 0}, "chunk_size"),
        ({"chunk_size": -4}, "chunk_size"),
        ({"chunk_size": 2.5}, "chunk_size"),
        ({"chunk_size": "8"}, "chunk_size"),
        ({"chunk_size": True}, "chunk_size"),
        ({"head_chunk_size": 0}, "head_chunk_size"),
        ({"accumulation_dtype": torch.int32}, "accumulation_dtype"),
        ({"accumulation_dtype": "float32"}, "accumulation_dtype"),
        ({"on_barrier": "shout"}, "on_barrier"),
        ({"keep_outputs": "yes"}, "keep_outputs"),
        ({"compile_bodies": 1}, "compile_bodies"),
    ],
    ids=lambda value: next(iter(value.items())).__repr__() if isinstance(value, dict) else "",
)
def test_wrong_option_is_named(options: dict[str, Any], message: str) -> None:
    model, batch = build("nanogpt"), make_batch(1, LENGTH)
    torch._dynamo.reset()
    with pytest.raises(Exception, match=message) as caught:
        torch.compile(model, backend=BACKEND, options=options)(**batch)
    causes = [caught.value, caught.value.__cause__, getattr(caught.value, "inner_exception", None)]
    assert any(isinstance(cause, (TypeError, ValueError)) for cause in causes)


@needs_report
def test_wrong_option_name_suggests_the_right_one() -> None:
    torch._dynamo.reset()
    with pytest.raises(Exception, match="chunk_size"):
        torch.compile(build("nanogpt"), backend=BACKEND, options={"chunksize": 8})(
            **make_batch(1, LENGTH)
        )


def _outcome(step: Callable[[], Any]) -> str:
    """``"value"``, or the kind of error that ``step`` raises."""
    try:
        step()
    except (IndexError, RuntimeError, ValueError) as error:
        return type(error).__name__
    return "value"


@pytest.mark.parametrize("dynamic", [None, True])
def test_empty_sequence_ends_as_in_eager(dynamic: bool | None) -> None:
    model = LogitsOnly().double()
    ids = torch.zeros(2, 0, dtype=torch.int64)

    def step(function: Callable[..., Any]) -> None:
        function(ids).sum().backward()

    want = _outcome(lambda: step(model))
    assert _outcome(lambda: step(streamed(model, dynamic=dynamic, chunk_size=CHUNK))) == want


def test_one_token() -> None:
    class OneToken(LogitsOnly):
        def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]
            logits = super().forward(input_ids)
            return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    torch.manual_seed(0)
    model, batch = OneToken().double(), make_batch(3, 1)
    assert_same_step(run(model, batch, streamed(model, chunk_size=CHUNK)), run(model, batch))


@pytest.mark.parametrize("compile_bodies", [False, True])
@pytest.mark.parametrize("key", ["input_ids", "labels"])
def test_id_out_of_range_raises(key: str, compile_bodies: bool) -> None:
    model, batch = build("nanogpt"), make_batch(2, LENGTH)
    batch[key] = batch[key].clone()
    batch[key][1, 13] = 10_000
    with pytest.raises((IndexError, RuntimeError)):
        run(model, batch)
    with pytest.raises((IndexError, RuntimeError), match=r"range|bounds|out of"):
        run(model, batch, streamed(model, chunk_size=CHUNK, compile_bodies=compile_bodies))


@pytest.mark.parametrize("length", [513, 600])
def test_longer_than_the_position_table_raises(length: int) -> None:
    model, batch = build("nanogpt"), make_batch(1, length)
    with pytest.raises((IndexError, RuntimeError)):
        run(model, batch, streamed(model, chunk_size=64))


class Mixed(LogitsOnly):
    """A language model with ``mix`` applied to the residual stream between its two blocks."""

    def __init__(self, mix: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.mix = mix

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]
        x = self.token(input_ids) + self.position(torch.arange(input_ids.shape[1]))
        x = self.blocks[1](self.mix(self.blocks[0](x)))
        logits = self.head(self.norm(x))[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())


def _bidirectional(x: Tensor) -> Tensor:
    return x + F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None])[:, 0]


MIXES: dict[str, Callable[[Tensor], Tensor]] = {
    "bidirectional attention": _bidirectional,
    "cumsum": lambda x: x + torch.cumsum(x, dim=1) / 10,
    "flip": lambda x: x + x.flip(1),
    "mean over tokens": lambda x: x + x.mean(1, keepdim=True),
    "max over tokens": lambda x: x + x.amax(1, keepdim=True),
    "softmax over tokens": lambda x: x + torch.softmax(x, dim=1),
    "roll": lambda x: x + x.roll(1, dims=1),
    "sort": lambda x: x + x.sort(dim=1).values,
    "fourier": lambda x: x + torch.fft.fft(x, dim=1).real / 10,
    "batch statistics": lambda x: x + F.batch_norm(x.mT, None, None, training=True).mT,
    "last token": lambda x: x + x[:, -1:],
    "previous token": lambda x: x + F.pad(x, (0, 0, 1, -1)),
}


def _mixed(name: str) -> tuple[nn.Module, Batch]:
    torch.manual_seed(0)
    return Mixed(MIXES[name]).double(), make_batch(2, LENGTH)


@pytest.mark.parametrize("name", MIXES)
def test_what_mixes_tokens_is_never_wrong(name: str) -> None:
    model, batch = _mixed(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        got = run(model, batch, streamed(model, chunk_size=CHUNK))
    assert_same_step(got, run(model, batch))


@needs_report
@pytest.mark.parametrize(
    ("name", "op"),
    [
        ("cumsum", "cumsum"),
        ("flip", "flip"),
        ("softmax over tokens", "softmax|exp|amax|sum"),
        ("sort", "sort"),
        ("fourier", "fft"),
    ],
)
def test_what_mixes_tokens_is_reported(name: str, op: str) -> None:
    model, batch = _mixed(name)
    with pytest.warns(UserWarning, match=op):
        run(model, batch, streamed(model, chunk_size=CHUNK, on_barrier="warn"))
    barriers = last_report().barriers
    assert barriers
    for barrier in barriers:
        assert barrier.op and barrier.reason
    assert any("test_bad_input.py" in (barrier.source or "") for barrier in barriers), (
        "no barrier names the line of the user's model"
    )


@needs_report
def test_barrier_is_an_error_if_asked() -> None:
    model, batch = _mixed("cumsum")
    with pytest.raises(Exception, match="cumsum"):
        run(model, batch, streamed(model, chunk_size=CHUNK, on_barrier="error"))


@needs_report
def test_barrier_is_quiet_if_asked() -> None:
    model, batch = _mixed("cumsum")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        run(model, batch, streamed(model, chunk_size=CHUNK, on_barrier="ignore"))
    assert last_report().barriers


def test_custom_op_without_a_rule_is_never_wrong() -> None:
    @torch.library.custom_op("streambp_tests::center", mutates_args=())
    def center(x: Tensor) -> Tensor:
        return x - x.mean(1, keepdim=True)

    @center.register_fake
    def _(x: Tensor) -> Tensor:
        return torch.empty_like(x)

    center.register_autograd(lambda ctx, grad: grad - grad.mean(1, keepdim=True))
    torch.manual_seed(0)
    model, batch = Mixed(center).double(), make_batch(2, LENGTH)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        got = run(model, batch, streamed(model, chunk_size=CHUNK))
    assert_same_step(got, run(model, batch))


def test_model_without_a_sequence() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)).double()
    x = torch.randn(5, 8, dtype=torch.float64)

    def grads(function: Callable[..., Any]) -> tuple[Tensor, ...]:
        return torch.autograd.grad(function(x).sum(), list(model.parameters()))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        got = grads(streamed(model, chunk_size=2))
    torch.testing.assert_close(got, grads(model), rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("break_at", ["start", "middle"])
def test_graph_break_is_never_wrong(break_at: str) -> None:
    def broken(x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return x

    torch.manual_seed(0)
    model = Mixed(broken if break_at == "middle" else lambda x: x).double()
    batch = make_batch(2, LENGTH)

    def start(**kwargs: Any) -> Tensor:
        torch._dynamo.graph_break()
        return model(**kwargs)

    function = streamed(start if break_at == "start" else model, chunk_size=CHUNK)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        got = run(model, batch, function)
    assert_same_step(got, run(model, batch))
