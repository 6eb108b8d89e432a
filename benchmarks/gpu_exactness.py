"""Is it right on this device: attention chunk by chunk, and all gradients of a model.

Everything is held against the same program in fp64. The same program in the dtype that is tested
gives the yardstick, since its own rounding is what no way of computing can avoid.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from streambp_fx import last_report
from streambp_fx.demo import Gradients, allocate_gradients, gradients_of, training_step
from streambp_fx.measure import gradient_error

from .shapes import DTYPES, Shape, build, random_tokens
from .ways import Way

ROOM = 2.0
"""How many times the yardstick's error is still called right."""

LEAST_ERROR = {"fp32": 1e-5, "bf16": 1e-2}
"""An error under this is right even where the yardstick's happens to be smaller still."""

ATTENTION_KERNELS = ("flash", "fmha", "efficient", "attention")
"""Parts of the names that attention has in a profile."""

Operands = tuple[Tensor, Tensor, Tensor]
Results = tuple[Tensor, ...]
RESULTS = ("out", "grad_query", "grad_key", "grad_value")


def attention(case: dict[str, Any], device: str) -> dict[str, Any]:
    """Causal grouped-query attention by `streambp::attention_chunk`, last chunk first.

    ``case``: ``dtype``, ``tokens``, ``chunk``, ``heads``, ``key_heads``, ``head_size``, and
    ``padded``, whether the first tokens of a row are masked (then no flash kernel takes it).
    """
    dtype = DTYPES[case["dtype"]]
    operands, bias = _operands(case, dtype, device)
    grad_out = torch.randn(operands[0].shape, device=device, dtype=dtype)
    wide: Operands = tuple(operand.double() for operand in operands)  # type: ignore[assignment]
    exact = _whole(wide, bias, grad_out.double())
    own = _whole(operands, bias, grad_out)
    chunked: list[Results] = []
    ran = attention_kernels(
        lambda: chunked.append(_chunked(operands, bias, grad_out, case["chunk"])), device
    )
    rows = {
        name: _verdict(_distance(got, want), _distance(yardstick, want), case["dtype"])
        for name, got, yardstick, want in zip(RESULTS, chunked[0], own, exact, strict=True)
    }
    return {"right": all(row["right"] for row in rows.values()), "errors": rows, "kernels": ran}


def _operands(
    case: dict[str, Any], dtype: torch.dtype, device: str
) -> tuple[Operands, Tensor | None]:
    torch.manual_seed(0)
    rows, tokens, size = 2, case["tokens"], case["head_size"]

    def normal(heads: int) -> Tensor:
        return torch.randn(rows, tokens, heads, size, device=device, dtype=dtype).transpose(1, 2)

    bias = None
    if case["padded"]:
        # Each row keeps its own first token visible, so that every query has a key.
        first = torch.tensor([0, 1], device=device)[:, None] * (tokens // 3)
        positions = torch.arange(tokens, device=device)
        bias = ((positions >= first) | (positions == 0))[:, None, None, :]
    return (normal(case["heads"]), normal(case["key_heads"]), normal(case["key_heads"])), bias


def _whole(operands: Operands, bias: Tensor | None, grad_out: Tensor) -> Results:
    """PyTorch's own attention, and its gradients."""
    leaves = [operand.detach().requires_grad_() for operand in operands]
    mask = bias
    if mask is not None:
        tokens = mask.shape[-1]
        mask = mask & torch.ones(tokens, tokens, device=mask.device, dtype=torch.bool).tril()
    query, key, value = leaves
    out = F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, enable_gqa=True
    )
    return (out.detach(), *torch.autograd.grad(out, leaves, grad_out))


def _chunked(operands: Operands, bias: Tensor | None, grad_out: Tensor, size: int) -> Results:
    query, key, value = operands
    constants = (True, query.shape[-1] ** -0.5, 0.0)
    grad_key, grad_value = (
        torch.zeros(operand.shape, device=operand.device) for operand in (key, value)
    )
    outs, grad_queries = [], []
    for start in reversed(range(0, query.shape[2], size)):
        rows = slice(start, start + size)
        common = (query[:, :, rows], key, value, bias, None)
        out, logsumexp = torch.ops.streambp.attention_chunk(*common, start, *constants)
        grad_query = torch.ops.streambp.attention_chunk_backward(
            grad_out[:, :, rows], *common, out, logsumexp, grad_key, grad_value, start, *constants
        )
        outs.append(out)
        grad_queries.append(grad_query)
    return torch.cat(outs[::-1], 2), torch.cat(grad_queries[::-1], 2), grad_key, grad_value


def gradients(case: dict[str, Any], device: str) -> dict[str, Any]:
    """The gradients of all parameters of a model, of one step by ``case["way"]``.

    ``case``: ``way``, ``dtype``, ``rows``, ``tokens``, and ``shape``, the arguments of `Shape`.
    """
    shape = Shape(**case["shape"])
    model = build(shape, DTYPES[case["dtype"]], device)
    ids = random_tokens(shape, case["rows"], case["tokens"], device)
    wide = copy.deepcopy(model).double()
    exact_loss, exact = _one_step(wide, wide, ids)
    del wide
    own_loss, own = _one_step(model, model, ids)
    call = Way.parse(case["way"]).prepare(model)
    got: list[tuple[float, Gradients]] = []
    ran = attention_kernels(lambda: got.append(_one_step(model, call, ids)), device)
    loss, streamed = got[0]
    error, yardstick = gradient_error(streamed, exact), gradient_error(own, exact)
    report = last_report()
    return {
        **_verdict(error, yardstick, case["dtype"]),
        "loss": {"fp64": exact_loss, "eager": own_loss, "way": loss},
        "streamed": report and report.summary(),
        "problems": report and report.problems(),
        "kernels": ran,
    }


def _one_step(model: nn.Module, call: Callable[..., Any], ids: Tensor) -> tuple[float, Gradients]:
    allocate_gradients(model)
    losses: list[Tensor] = []

    def kept(**inputs: Tensor) -> Any:
        output = call(**inputs)
        losses.append(output.loss.detach())
        return output

    training_step(model, kept, ids)()
    return float(losses[0]), gradients_of(model)


def _verdict(error: float, yardstick: float, dtype: str) -> dict[str, Any]:
    right = error <= max(ROOM * yardstick, LEAST_ERROR[dtype])
    return {"right": right, "error": error, "eager_error": yardstick}


def _distance(got: Tensor, want: Tensor) -> float:
    """``|got - want| / |want|`` in Euclidean norm; a NaN stays one and is never right."""
    return float((got.double() - want).norm() / want.norm())


def attention_kernels(run: Callable[[], object], device: str) -> list[str]:
    """Call ``run`` and name the attention that ran: kernels on a GPU, ops on a CPU."""
    on_gpu = torch.device(device).type == "cuda"
    activities = [ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]
    with profile(activities=activities) as profiled:
        run()
        if on_gpu:
            torch.cuda.synchronize(device)
    names = {event.key for event in profiled.key_averages()}
    return sorted(name for name in names if any(part in name for part in ATTENTION_KERNELS))
