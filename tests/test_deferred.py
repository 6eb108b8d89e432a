"""What a deferred output does in a user's hands."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

from streambp_fx.deferred import DeferredTensor
from streambp_fx.deferred_values import DeferredOutputError
from tests.deferring import VOCABULARY, Backend, Head, is_deferred, tiny_llama, token_ids


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch.compiler.reset()


@pytest.fixture(scope="module")
def compiled_head() -> Backend:
    backend = Backend()
    torch.compile(Head(), backend=backend)(token_ids())
    return backend


@pytest.fixture
def logits(compiled_head: Backend) -> DeferredTensor:
    (result,) = [out for out in compiled_head.again() if isinstance(out, DeferredTensor)]
    return result


@pytest.fixture
def want() -> Tensor:
    result: Tensor = Head()(token_ids())[1]
    return result


STAY: dict[str, Callable[[Tensor], Tensor]] = {
    "detach": lambda x: x.detach(),
    "double": lambda x: x.double(),
    "bfloat16": lambda x: x.to(torch.bfloat16),
    "cpu": lambda x: x.cpu(),
    "last": lambda x: x[:, -1],
    "shifted": lambda x: x[:, :-1].contiguous(),
    "columns": lambda x: x[..., 3:7],
    "view": lambda x: x.view(-1, x.shape[-1]),
    "merged and cast": lambda x: x.double().reshape(-1, x.shape[-1])[3:9],
    "transposed": lambda x: x.transpose(0, 1).contiguous()[2],
    "unsqueeze": lambda x: x.unsqueeze(0).expand(3, -1, -1, -1),
    "cast of a row": lambda x: x[1].double()[-3:],
    "row of a cast": lambda x: x.double()[1, -3:],
}


@pytest.mark.parametrize("name", STAY)
def test_views_and_casts_stay_deferred(name: str, logits: DeferredTensor, want: Tensor) -> None:
    lazy, expected = STAY[name](logits), STAY[name](want)
    assert is_deferred(lazy) and is_deferred(logits)
    for attribute in ("shape", "dtype", "device", "requires_grad"):
        assert getattr(lazy, attribute) == getattr(expected, attribute)
    assert lazy.stride() == expected.stride()
    torch.testing.assert_close(lazy.detach() + 0, expected.detach())


USE: dict[str, Callable[[Tensor], Any]] = {
    "argmax": lambda x: x.argmax(-1),
    "item": lambda x: torch.tensor(x[0, 0, 0].item()),
    "tolist": lambda x: torch.tensor(x.tolist()),
    "numpy": lambda x: torch.from_numpy(x.detach().numpy()),
    "asarray": lambda x: torch.from_numpy(numpy.asarray(x.detach())),
    "stack": lambda x: torch.stack([x, x]),
    "cat": lambda x: torch.cat([x, torch.ones_like(x)]),
    "dlpack": lambda x: torch.from_dlpack(x.detach()),
    "deepcopy": lambda x: copy.deepcopy(x.detach()),
    "pickle": lambda x: pickle.loads(pickle.dumps(x.detach())),
    "clone": lambda x: x.clone() + 0,
    "softmax": lambda x: x.softmax(-1),
    "index": lambda x: x[x > 0],
    "out": lambda x: torch.empty_like(x).copy_(x),
    "format": lambda x: torch.tensor(float(f"{x[0, 0, 0]:.6f}")),
    "iterate": lambda x: list(x)[1] + 0,
}


@pytest.mark.parametrize("name", USE)
def test_use_computes(name: str, logits: DeferredTensor, want: Tensor) -> None:
    got = USE[name](logits)
    assert type(got) is Tensor
    torch.testing.assert_close(got.detach(), USE[name](want.detach()), rtol=1e-5, atol=1e-6)


def test_torch_save(logits: DeferredTensor, want: Tensor) -> None:
    buffer = io.BytesIO()
    torch.save({"logits": logits}, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer)["logits"]
    assert type(loaded) is Tensor and loaded.requires_grad
    torch.testing.assert_close(loaded.detach(), want.detach())


def test_rows_are_computed_without_the_rest(logits: DeferredTensor, want: Tensor) -> None:
    last = logits.double()[:, -1]
    torch.testing.assert_close(last.detach() + 0, want[:, -1].double().detach())
    assert is_deferred(logits)


def test_numpy_of_a_tensor_with_gradient_raises_as_elsewhere(logits: DeferredTensor) -> None:
    with pytest.raises(RuntimeError, match="requires grad"):
        logits.numpy()


def test_repr_does_not_compute_and_shows_numbers_afterwards(logits: DeferredTensor) -> None:
    assert "deferred" in repr(logits) and "deferred" in str(logits) and "deferred" in f"{logits}"
    logits.sum()
    assert "tensor([[[" in repr(logits)


@pytest.mark.parametrize("term", [lambda x: x.sum(), lambda x: x.double()[:, 1].pow(2).mean()])
def test_backward_through_it_raises(term: Callable[[Tensor], Tensor]) -> None:
    loss, logits = torch.compile(Head(), backend=Backend())(token_ids())
    with pytest.raises(DeferredOutputError, match="keep_outputs"):
        (loss + term(logits)).backward()


def test_loss_trains_beside_a_detached_use() -> None:
    model = Head()
    loss, logits = torch.compile(model, backend=Backend())(token_ids())
    (loss + logits.detach().mean()).backward()
    want = torch.autograd.grad(model(token_ids())[0], list(model.parameters()))
    torch.testing.assert_close([p.grad for p in model.parameters()], list(want))


@pytest.mark.parametrize("changed", ["head", "in place view"])
def test_change_of_what_it_is_computed_from_raises(changed: str) -> None:
    model = Head()
    loss, logits = torch.compile(model, backend=Backend())(token_ids())
    read_before = torch.compile(model, backend=Backend())(token_ids())[1]
    value = (read_before.detach() + 0).clone()
    loss.backward()
    if changed == "head":
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    else:
        with torch.no_grad():
            model.head.weight.view(-1)[:3].zero_()
    for use in (lambda x: x.sum(), lambda x: x[:, -1] + 0, lambda x: x.double() + 0):
        with pytest.raises(DeferredOutputError, match="has changed since"):
            use(logits)
    assert torch.equal(read_before.detach() + 0, value)


def test_replaced_data_raises() -> None:
    model = Head()
    _, logits = torch.compile(model, backend=Backend())(token_ids())
    model.head.weight.data = model.head.weight.data.clone()
    with pytest.raises(DeferredOutputError, match="has changed since"):
        logits.sum()


def test_writes_reach_the_views_of_it(logits: DeferredTensor, want: Tensor) -> None:
    plain = logits.detach()
    row, copied = plain[0], plain.double()
    assert row.sum().isfinite()  # a part is computed, then superseded
    plain[0, 2] = 5.0
    torch.testing.assert_close(row[2] + 0, torch.full_like(row[2], 5.0))
    row.mul_(2)
    torch.testing.assert_close((plain + 0)[0, 2], torch.full((VOCABULARY,), 10.0))
    torch.testing.assert_close((plain + 0)[1], want[1].detach())
    with pytest.raises(DeferredOutputError, match="changed in place"):
        copied.sum()


def test_change_of_shape_in_place_raises(logits: DeferredTensor) -> None:
    with pytest.raises(DeferredOutputError, match="in place"):
        logits.detach().unsqueeze_(0)


def test_memory_is_freed_with_the_output() -> None:
    model = Head()
    loss, logits = torch.compile(model, backend=Backend())(token_ids())
    hidden = weakref.ref(logits._origin._operands[0])
    gc.collect()
    gc.disable()
    try:
        loss.backward()
        assert hidden() is not None
        del logits
        assert hidden() is None
    finally:
        gc.enable()


def test_hidden_state_is_freed_once_computed() -> None:
    _, logits = torch.compile(Head(), backend=Backend())(token_ids())
    hidden = weakref.ref(logits._origin._operands[0])
    assert logits.detach().sum().isfinite()
    gc.collect()
    assert hidden() is None


def test_conversion_of_all_outputs_to_float32_keeps_it_deferred() -> None:
    """What accelerate does to the outputs of a model in mixed precision."""
    llama = tiny_llama().bfloat16()
    out = torch.compile(llama, backend=Backend())(input_ids=token_ids(), labels=token_ids())
    upcast = type(out)({k: v.float() for k, v in out.items() if isinstance(v, Tensor)})
    assert is_deferred(upcast.logits) and upcast.logits.dtype is torch.float32
    upcast.loss.backward()
    want = llama(input_ids=token_ids(), labels=token_ids()).logits
    torch.testing.assert_close(upcast.logits[:, -2:].detach() + 0, want[:, -2:].float().detach())


def test_copies_of_what_was_computed_need_no_operands() -> None:
    llama = tiny_llama().bfloat16()
    logits = torch.compile(llama, backend=Backend())(input_ids=token_ids()).logits
    upcast = logits.float()
    again = upcast.double()
    want = logits.detach() + 0
    torch.testing.assert_close(upcast[:, -1].detach() + 0, want[:, -1].float())
    torch.testing.assert_close(again[:, 1:].detach() + 0, want[:, 1:].double())


def test_a_compiled_caller_computes_it(logits: DeferredTensor, want: Tensor) -> None:
    compiled = torch.compile(lambda x: x.argmax(-1) + 1, backend="eager")
    assert torch.equal(compiled(logits.detach()), want.argmax(-1) + 1)
