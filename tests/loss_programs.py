"""A grammar of what follows attention: hidden states, logits, labels and losses, written in place.

A `Program` is a list of statements, each a line of Python on the values of a `State`. Between a
model's layers it changes hidden states in place (``x.h += attn(x.h)``, ``x.h[mask] = y``); after
them it shifts, gathers, scales and fills logits and labels; and it returns logits or hidden states
beside its loss, some of which change after the loss was computed.

To run one again::

    from tests.loss_programs import Program, check
    check(Program(...))
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.attention_programs import NO_GRAD, statement
from tests.backend import streamed
from tests.oracle import Step, assert_same_step, rounding_of, torch_refuses

BATCH, HEADS, LENGTH, WIDTH, VOCAB = 2, 2, 11, 8, 17


@dataclass
class State:
    """The names that statements use.

    h: hidden states, ``[B, T, d]``. z: logits, ``[B, T, V]``, later rows of them. labels: int64,
    ``[B, T]``. weights: of tokens, ``[B, T]``. seen: boolean, ``[B, T]``. rows: ``[V]``, a buffer.
    """

    m: Model
    ids: Tensor
    h: Tensor
    labels: Tensor
    weights: Tensor
    seen: Tensor
    z: Tensor = field(init=False)
    loss: Tensor | float = 0.0
    beside: list[Tensor] = field(default_factory=list)


HIDDEN = [
    "x.h += x.m.attend(x.h * 1.0)",
    "x.h = x.h + x.m.attend(x.h)",
    "a = x.h; x.h = x.h + x.m.attend(x.h * 1.0); a.mul_(0.5)",
    "x.h += x.m.feed(x.h * 0.5)",
    "x.h.add_(x.m.feed(x.h * 0.5), alpha=0.5)",
    "x.h[:, 0] = 0",
    "x.h[:, 2:5] = x.h[:, 2:5] * 0.5",
    "x.h[x.seen] = 0.25",
    "x.h[~x.seen] *= 0.5",
    "x.h = x.h.clone(); x.h[x.seen] = x.m.table[x.ids[x.seen]]",
    "x.h.masked_fill_(x.seen[..., None], 0.5)",
    "x.h = torch.where(x.seen[..., None], x.h, x.m.table[x.ids])",
    "x.h[:, 1:] += x.h[:, :-1].clone()",
    "x.h = torch.cat([x.h[:, 1:], x.h[:, :1]], 1)",
    "x.h = torch.cat([x.h[:, :3] * 2, x.h[:, 3:]], 1)",
    "x.h = F.layer_norm(x.h, (16,)); x.h.mul_(x.m.scale)",
    "x.h.view(-1, 16)[3] = 1.0",
    "x.h = torch.as_strided(x.h.transpose(0, 1) * 2, (2, 11, 16), (176, 16, 1))",
    "torch.as_strided(x.h, (2, 4), (16, 1), 3).mul_(0.5)",
    "x.h.transpose(0, 1)[4].zero_()",
    "x.h[..., :4], x.h[..., 4:8] = x.h[..., 4:8].clone(), x.h[..., :4].clone()",
    "x.h.scatter_(1, torch.zeros(2, 1, 16, dtype=torch.int64), 0.5)",
    # The copy is needed: eager's result of an op that writes to what it reads is not defined.
    "x.h.index_add_(1, torch.tensor([1, 1, 3]), x.h[:, :3].detach().clone())",
    "a = x.h.detach(); a[:, 1] = 0.125",
    "x.h.data[:, 2] = 0.5",
    NO_GRAD + "x.h.mul_(0.9)",
    "x.beside.append(x.h)",
    "x.m.count.add_(1); x.h = x.h * x.m.count",
    "x.m.rows.mul_(0.5)",
    "F.relu(x.h, inplace=True)",
    "x.h = F.dropout(x.h, 0.0, True, True)",
]

LOGITS = [
    "x.z = x.m.head(x.h)",
    "x.z = F.linear(x.h, x.m.token.weight)",
    "x.z = (x.h * 1.0) @ x.m.head.weight.t() + x.m.rows",
    "x.z = torch.matmul(x.h, x.m.head.weight.t()) * 0.5",
    "x.z = x.m.head(x.h.flatten(0, 1)).view(2, -1, 17)",
    "x.z = x.m.head(x.h); x.h.zero_()",
    "x.z = x.m.head(x.h * 1.0); x.h.zero_()",
    NO_GRAD + "x.z = x.m.head(x.h)",
]

CHANGED = [
    *("x.z = x.z * 0.7", "x.z *= 0.7", "x.z.div_(1.5)", "x.z = x.z.float().double()"),
    *("x.z = x.z + x.m.rows", "x.z += x.m.rows", "x.z.add_(x.m.bias)", "x.z = x.z + x.m.bias"),
    "x.z = torch.tanh(x.z / 3) * 3",
    "x.z.tanh_()",
    "x.z[..., 0] = -5.0",
    "x.z[:, 0] = 0",
    "x.z[:, 3:5] = x.z[:, 3:5] * 0.5",
    "x.z[x.seen] = 0.25",
    "x.z.masked_fill_(x.seen[..., None], 0.5)",
    "x.z = x.z.masked_fill(torch.arange(17) == 3, -9.0)",
    "x.z.scatter_(-1, x.ids[..., None], -2.0)",
    "x.z.view(-1)[5:9] = 0.0",
    "x.z -= x.z.amax(-1, keepdim=True).detach()",
    "x.z = x.z - x.z.mean((0, 1), keepdim=True)",
    "x.beside.append(x.z)",
    "x.beside.append(x.z[:, -1])",
    "x.beside.append(x.z.detach().argmax(-1))",
    "x.m.rows.add_(0.5)",
    NO_GRAD + "x.z[:, 1] = 0.5",
    "x.z.data.mul_(0.5)",
    "x.loss = x.loss + x.z.logsumexp(-1).pow(2).mean() * 0.01",
]

LABELS = [
    "x.labels[x.seen] = -100",
    "x.labels[:, :3] = -100",
    "x.labels.masked_fill_(x.seen, -100)",
    "x.labels = x.labels.clone(); x.labels[:, 5] = 2",
    "x.labels = torch.where(x.seen, x.labels, -100)",
    "x.labels = F.pad(x.labels, (0, 1), value=-100)[:, 1:]",
    "x.labels = torch.roll(x.labels, -1, 1)",
    "x.weights[x.seen] = 0.25",
    "x.weights = x.weights / x.weights.sum(); x.weights[:, 0] = 0",
    "x.seen.logical_not_()",
    "x.seen[:, 2] = True",
]

SHIFTS = [
    "x.z, x.labels, x.weights = x.z[:, :-1], x.labels[:, 1:], x.weights[:, 1:]",
    "x.z, x.labels, x.weights = x.z[:, 2:-1], x.labels[:, 3:], x.weights[:, 3:]",
    "x.z, x.labels, x.weights = x.z[:, 3:], x.labels[:, 3:], x.weights[:, 3:]",
    "x.z, x.labels, x.weights = x.z[:, :-1].contiguous(), x.labels[:, 1:], x.weights[:, 1:]",
    "a = x.z[:, :-1]; a *= 0.5; x.z, x.labels, x.weights = a, x.labels[:, 1:], x.weights[:, 1:]",
    "a = x.z[:, :-1]; x.z[:, 1] = 0.5; x.z, x.labels, x.weights = a, x.labels[:, 1:], "
    "x.weights[:, 1:]",
    "x.labels = torch.cat([x.labels[:, 1:], torch.full_like(x.labels[:, :1], -100)], 1)",
]

ROWS = [
    "x.z[:, 1] = 0.0",
    "x.z *= 0.5",
    "x.labels[:, 1] = 3",
    "x.labels = x.labels.clamp(min=0)",
    "x.z[..., 1] = -3.0",
    "x.z = x.z.to(torch.float64)",
]

CLAMPED = "x.labels.clamp(min=0)"
LOSSES = [
    "x.loss = x.loss + F.cross_entropy(x.z.flatten(0, 1), x.labels.flatten())",
    "x.loss = x.loss + F.cross_entropy(x.z.transpose(1, 2), x.labels, reduction='sum') / 7",
    "x.loss = x.loss + F.cross_entropy(x.z.flatten(0, 1), x.labels.flatten(), label_smoothing=0.1)",
    "x.loss = x.loss + F.cross_entropy(x.z.flatten(0, 1), x.labels.flatten(), weight=x.m.rows)",
    "l = F.cross_entropy(x.z.flatten(0, 1), x.labels.flatten(), reduction='none')"
    "; x.loss = x.loss + (l * x.weights.flatten()).sum()",
    "l = F.cross_entropy(x.z.flatten(0, 1), x.labels.flatten(), reduction='none')"
    "; l[2:4] = 0; l.mul_(x.weights.flatten()); x.loss = x.loss + l.mean()",
    f"l = x.z.log_softmax(-1).gather(-1, {CLAMPED}[..., None])[..., 0]"
    "; x.loss = x.loss - (l * x.weights).sum()",
    f"l = torch.gather(x.z, 2, {CLAMPED}[..., None]).squeeze(-1) - x.z.logsumexp(-1)"
    "; l[x.labels < 0] = 0; x.loss = x.loss - l.sum() / 5",
    "l = x.z.log_softmax(-1); l[..., 0] = 0.0; x.loss = x.loss - l.mean()",
    f"l = -x.z.log_softmax(-1).gather(-1, {CLAMPED}[..., None])[..., 0]"
    "; l.masked_fill_(x.labels == -100, 0.0); x.loss = x.loss + torch.sigmoid(l.sum(-1)).sum()",
    "x.loss = x.loss + (x.z.softmax(-1) * x.z).sum() * 0.01",
    "x.loss = x.loss + x.z.pow(2).mean()",
]

AFTERWARDS = [
    *("x.z.zero_()", "x.h.zero_()", "x.labels.fill_(0)", "x.m.rows.zero_()", "x.z[:, 0] = 1.0"),
    *("x.loss = x.loss * 2", "x.loss *= 0.5", "x.beside.append(x.z)", "x.beside.append(x.h)"),
    NO_GRAD + "x.z.mul_(0.5)",
    "x.beside.append(x.z * 2)",
    "x.beside.append(x.h.detach())",
    "x.h[:, 1] = 0.0; x.beside.append(x.h)",
    "x.m.count.add_(1)",
]


@dataclass(frozen=True)
class Program:
    """Statements in order. ``chunk`` is in tokens, of the layers and of the head."""

    statements: tuple[str, ...]
    chunk: int = 4


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """Every `Program`; shrinks towards few statements."""

    def some(choices: list[str], most: int) -> list[str]:
        return draw(st.lists(st.sampled_from(choices), max_size=most))

    def one(choices: list[str]) -> list[str]:
        return [draw(st.sampled_from(choices))]

    lines = some(HIDDEN, 3) + some(LABELS, 1) + one(LOGITS) + some(CHANGED, 2) + some(LABELS, 1)
    lines += some(SHIFTS, 1) + some(ROWS, 1) + one(LOSSES) + some(AFTERWARDS, 2)
    if draw(st.integers(0, 5)) == 0:
        lines += one(LOSSES)
    return Program(tuple(lines), draw(st.sampled_from((4, 5, 8, 4, 5, 8, 4, 5, 8, 3))))


class Model(nn.Module):
    """``forward(ids, weights) -> (loss, *tensors beside it)``."""

    rows: Tensor
    count: Tensor

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.lines = [statement(line) for line in program.statements]
        size = HEADS * WIDTH
        self.token = nn.Embedding(VOCAB, size)
        self.qkv = nn.Linear(size, 3 * size)
        self.feed = nn.Linear(size, size)
        self.head = nn.Linear(size, VOCAB)
        self.table = nn.Parameter(torch.randn(VOCAB, size))
        self.scale = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.randn(VOCAB))
        self.register_buffer("rows", torch.rand(VOCAB) + 0.5)
        self.register_buffer("count", torch.ones((), dtype=torch.int64))

    def attend(self, h: Tensor) -> Tensor:
        heads = self.qkv(h).view(BATCH, LENGTH, 3, HEADS, WIDTH).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        return y.transpose(1, 2).reshape(h.shape)

    def forward(self, ids: Tensor, weights: Tensor) -> tuple[Tensor, ...]:
        h = self.token(ids)
        h = h + self.attend(h)
        x = State(self, ids, h, ids.clone(), weights, ids % 3 == 0)
        for line in self.lines:
            line(x)
        return (torch.as_tensor(x.loss), *x.beside)


def step(model: Model, function: Callable[..., tuple[Tensor, ...]]) -> tuple[Step, list[Tensor]]:
    """One training step through ``function``, and all else that it returns and changes."""
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCAB, (BATCH, LENGTH), generator=draw)
    weights = torch.rand(BATCH, LENGTH, generator=draw, dtype=torch.float64) + 0.1
    model.zero_grad(set_to_none=True)
    loss, *beside = function(ids, weights)
    values = [torch.as_tensor(value + 0).detach().clone() for value in beside]
    loss.backward()
    grads = {name: weight.grad for name, weight in model.named_parameters()}
    return Step(loss.detach(), grads), [*values, ids, weights, model.rows, model.count]


def check(program: Program) -> bool:
    """Fail unless a streamed step equals eager's to 1e-10, or to what rounding does to eager's.

    The bodies of programs in chunks of 3, a tenth, are lowered too: that takes longest here.
    False if torch refuses the program, or gets no number that could be compared.
    """
    torch.manual_seed(0)
    model = Model(program).double()
    other = copy.deepcopy(model)
    try:
        want, want_beside = step(model, model)
    except RuntimeError:
        return False
    if any(grad is not None and not grad.isfinite().all() for grad in want.grads.values()):
        return False
    sizes = {"chunk_size": program.chunk, "head_chunk_size": program.chunk}
    function = streamed(other, **sizes, on_barrier="ignore", lowered=program.chunk == 3)
    try:
        got, beside = step(other, function)
    except RuntimeError as error:
        if torch_refuses(error):
            return False
        raise
    assert_same_step(got, want, rounding_of(model, lambda moved: step(moved, moved)[0], want))
    for value, right in zip(beside, want_beside, strict=True):
        torch.testing.assert_close(value, right, rtol=1e-10, atol=1e-10)
    return True
