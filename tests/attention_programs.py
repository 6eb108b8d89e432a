"""A grammar of attention as people write it: out of place and in place, in any order.

A `Program` is a list of statements, each a line of Python on the values of a `State`. It is drawn
phase by phase: queries, keys and values; repeats of heads; a product; scores; a softmax; weights;
a product with the values; and writes between any two of them. Most statements are harmless, many
programs are no softmax attention, and all that eager runs must be right.

To run one again::

    from tests.attention_programs import Program, check
    check(Program(...))
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.backend import streamed
from tests.oracle import Step, assert_same_step, rounding_of, torch_refuses

BATCH, HEADS, LENGTH, WIDTH, VOCAB = 2, 4, 11, 4, 13
MIN = torch.finfo(torch.float64).min


@dataclass
class State:
    """The names that statements use. ``hidden`` is True where a key is hidden from a query."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor
    hidden: Tensor
    c: Tensor
    learned: Tensor
    s: Tensor = field(init=False)  # scores
    w: Tensor = field(init=False)  # weights
    y: Tensor = field(init=False)  # output
    beside: Tensor | float = 0.0  # is added to the output


Statement = Callable[[State], None]


def statement(source: str) -> Statement:
    """``source``, in which ``x.q`` is the query and so on, as a function of a `State`."""
    names = {"torch": torch, "F": F, "math": math, "MIN": MIN, "no_grad": torch.no_grad}
    body = "\n    ".join(source.split("; "))
    exec(f"def run(x):\n    {body}", names)
    return names["run"]  # type: ignore[return-value]


NO_GRAD = "with no_grad(): "

OPERANDS = [
    *("x.q = x.q * 0.7", "x.q.mul_(0.7)", "x.q /= 1.3", "x.k = -x.k", "x.k.neg_()"),
    "x.q[..., :2] = x.q[..., :2] * 0.6 - x.q[..., 2:] * 0.8",
    "x.k[..., :2] = x.k[..., :2] * 0.6 - x.k[..., 2:] * 0.8",
    "x.k.transpose(2, 3)[:, :, 1] *= 0.5",
    "x.v[:, :, 0] = 0.0",
    "x.v += x.k",
    "x.q = F.normalize(x.q, dim=-1)",
    "x.k = x.k.contiguous()",
    "x.k = x.k.transpose(1, 2).contiguous().transpose(1, 2)",
    "x.c.add_(0.4)",
    "x.c = x.c.float()",
    "x.c = x.c * 0.5",
    "x.bias = x.bias.clone()",
    "x.bias[:, 0] = -0.5",
    "x.bias.mul_(0.5)",
    "x.hidden[:, 0] = False",
    "x.hidden = x.hidden.logical_not(); x.hidden = x.hidden.logical_not_()",
]

REPEATS = [
    "x.k, x.v = [t[:, :2, None].expand(-1, -1, 2, -1, -1).reshape(t.shape) for t in (x.k, x.v)]",
    "x.k, x.v = [t[:, :2].repeat_interleave(2, 1) for t in (x.k, x.v)]",
    "x.k, x.v = [t[:, :2].repeat(1, 2, 1, 1) for t in (x.k, x.v)]",
    "x.k, x.v = [t[:, :1].expand(-1, 4, -1, -1) for t in (x.k, x.v)]",
    "x.k, x.v = [t[:, :1].repeat(1, 4, 1, 1) for t in (x.k, x.v)]",
    "x.k, x.v = [t[:, [0, 0, 1, 1]] for t in (x.k, x.v)]",
    "x.k, x.v = [t[:, [1, 0], None].expand(-1, -1, 2, -1, -1).flatten(1, 2) for t in (x.k, x.v)]",
    "x.k, x.v = [t[:, :2].unsqueeze(2).repeat(1, 1, 2, 1, 1).flatten(1, 2) for t in (x.k, x.v)]",
    "x.k, x.v = [t[:, torch.tensor([1, 0])][:, :, None].expand(-1, -1, 2, -1, -1)"
    ".reshape(t.shape) for t in (x.k, x.v)]",
    "a, b = x.k[:, :2], x.v[:, :2]; x.k, x.v = a.repeat_interleave(2, 1), b.repeat_interleave(2, 1)"
    "; a.mul_(0.5); b += 1.0",
    "x.k = x.k[:, :2].repeat_interleave(2, 1)",
    "x.k, x.v = [t.transpose(1, 2)[:, :, :2, None].expand(-1, -1, -1, 2, -1)"
    ".reshape(2, 11, 4, 4).transpose(1, 2) for t in (x.k, x.v)]",
]

AFTER_REPEATS = [
    *("x.k[:, 1] *= 0.5", "x.v[:, 1:3] += 0.5", "x.k = x.k.contiguous(); x.k[:, 0] = 0.1"),
    "x.k.mul_(0.5)",
    "x.k[..., :2] = x.k[..., :2] * 0.6 - x.k[..., 2:] * 0.8",
]

PRODUCTS = [
    *("x.s = x.q @ x.k.mT", "x.s = torch.matmul(x.q, x.k.transpose(-2, -1)) / 2"),
    "x.s = torch.einsum('bhqd,bhkd->bhqk', x.q, x.k)",
    "x.s = (x.q * 0.5) @ x.k.permute(0, 1, 3, 2)",
    "x.s = torch.matmul(x.q, other=x.k.mT)",
    "x.s = x.k @ x.q.mT; x.s = x.s.mT",
    "x.s = torch.bmm(x.q.flatten(0, 1), x.k.flatten(0, 1).mT).view(2, 4, 11, 11)",
    "x.s = torch.zeros(2, 4, 11, 11, dtype=x.q.dtype); x.s += x.q @ x.k.mT",
    "x.s = (x.q @ x.k.mT).float().double()",
]

SCORES = [
    *("x.s = x.s * 0.3", "x.s *= 0.3", "x.s = x.s / 2", "x.s.div_(2)", "x.s = 0.5 * x.s"),
    *("x.s = x.s * x.c", "x.s *= x.c", "x.s = x.s / x.c", "x.s = -x.s", "x.s = x.s * -0.5"),
    *("x.s = x.s + x.bias", "x.s += x.bias", "x.s = x.bias + x.s", "x.s.add_(x.bias)"),
    "x.s = x.s.add(x.bias, alpha=2.0)",
    "x.s = x.s - x.bias.clamp(min=-1.0)",
    "x.s = x.s + x.hidden",
    "x.s = x.s + x.learned",
    "x.s = x.s + torch.where(x.hidden, -1e9, 0.0).double()",
    "x.s = x.s + torch.where(x.hidden, MIN, 0.0).double()",
    "x.s = x.s.masked_fill(x.hidden, -math.inf)",
    "x.s.masked_fill_(x.hidden, -math.inf)",
    "x.s = x.s.masked_fill(x.hidden, MIN)",
    "x.s = torch.where(x.hidden, MIN, x.s)",
    "x.s = torch.where(~x.hidden, x.s, -math.inf)",
    "x.s = x.s.where(~x.hidden, -math.inf)",
    "x.s = torch.where(x.hidden, x.c, x.s)",
    "x.s = x.s.masked_fill(x.hidden, -2.0)",
    "x.s = (x.s * 1e3).masked_fill(x.hidden, -1e3)",
    "x.s[..., 0] = -1.0",
    "x.s[:, :, 3:, 1] *= 2.0",
    "x.s = x.s.clone(); x.s.view(-1)[3:9] = 0.25",
    "x.s = x.s.bfloat16().double()",
    "x.s = x.s.float().to(torch.float64)",
    "x.s = x.s.to(torch.float64).contiguous()",
    "x.s = (x.s * 2).to(torch.int32).double() / 2",
    "x.s = torch.tanh(x.s / 3) * 3",
    "x.s = x.s.detach() + x.s * 0.5",
    "x.beside = x.s.mean() * 0.1",
    "x.s = x.s - x.s.amax(-1, keepdim=True).detach()",
]

SOFTMAXES = [
    *("x.w = x.s.softmax(-1)", "x.w = F.softmax(x.s, dim=-1)", "x.w = torch.softmax(x.s, 3)"),
    *("x.w = F.softmax(x.s, dim=-1, dtype=torch.float64)", "x.w = x.s.sigmoid()"),
    "x.w = F.softmax(x.s.double(), -1).type_as(x.q)",
    "x.w = x.s.softmax(-2)",
    "x.w = x.s.softmax(-1); x.w = x.w / x.w.sum(-1, keepdim=True)",
]

WEIGHTS = [
    *("x.w = F.dropout(x.w, 0.0)", "x.w = F.dropout(x.w, 0.4, False)", "x.w = x.w.contiguous()"),
    "x.w = torch.dropout(x.w, 0.4, train=False)",
    "F.dropout(x.w, 0.0, True, True)",
    "x.w = x.w.bfloat16().double()",
    "x.w = x.w.to(torch.float64)",
    "x.w *= 0.5",
    "x.w[..., 0] = 0.0",
    "x.w = x.w.masked_fill(x.hidden, 0.0)",
    "x.beside = x.w.mean() * 0.1",
    "x.w = x.w.clone()",
]

OUTPUTS = [
    *("x.y = x.w @ x.v", "x.y = torch.matmul(x.w, x.v)", "x.y = x.w.matmul(x.v)"),
    "x.y = torch.einsum('bhqk,bhkd->bhqd', x.w, x.v)",
    "x.y = torch.einsum('bhqk,bhkd->bqhd', x.w, x.v).transpose(1, 2)",
    "x.y = torch.bmm(x.w.flatten(0, 1), x.v.flatten(0, 1)).view(2, 4, 11, 4)",
    "x.y = torch.baddbmm(x.q.flatten(0, 1), x.w.flatten(0, 1), x.v.flatten(0, 1))"
    ".view(2, 4, 11, 4)",
    "x.y = (x.w @ x.v).reshape(8, 11, 4).view(2, 4, 11, 4)",
    "x.y = (x.w @ x.v).view(8, 11, 4).view(2, 4, 11, 4)",
    "x.y = torch.as_strided(x.w @ x.v, (2, 4, 11, 4), (176, 44, 4, 1)) * 1.0",
    "a = (x.w @ x.v).transpose(1, 2).contiguous(); x.y = a.transpose(1, 2); a.mul_(0.5)",
]

SDPA = [
    *("x.y = F.scaled_dot_product_attention(x.q, x.k, x.v, is_causal=True)",),
    "x.y = F.scaled_dot_product_attention(x.q, x.k, x.v, attn_mask=~x.hidden)",
    "x.y = F.scaled_dot_product_attention(x.q, x.k, x.v, attn_mask=~x.hidden, scale=-0.5)",
    "x.y = F.scaled_dot_product_attention(x.q, x.k, x.v, attn_mask=x.bias, scale=0.4)",
    "x.y = F.scaled_dot_product_attention(x.q, x.k, x.v, attn_mask=x.bias - 1e9 * x.hidden)",
    "x.y = F.scaled_dot_product_attention(x.q, x.k[:, :2], x.v[:, :2], is_causal=True, "
    "enable_gqa=True)",
    NO_GRAD + "x.y = F.scaled_dot_product_attention(x.q, x.k, x.v, is_causal=True)",
]

AFTERWARDS = [
    *("x.y.mul_(0.5)", "x.y[:, :, 0] = 0.0", "x.y = x.y + x.v", "x.y += x.v", "x.y = x.y * x.c"),
    "x.y.transpose(1, 2)[:, 2:4] *= 2.0",
    "x.y = torch.as_strided(x.y * 2, (2, 4, 11, 4), (176, 44, 4, 1))",
    "a = x.y.transpose(1, 2).contiguous(); a[:, 1] = 0.5; x.y = x.y + a.transpose(1, 2)",
]

# Eager refuses the gradient where it had saved what is written; those programs are left out.
WRITES = [
    *("x.bias.zero_()", "x.bias.add_(0.3)", "x.bias[:, 1] = 0.2", "x.bias.t()[0] = -0.3"),
    *("x.c.add_(1.0)", "x.c.fill_(0.1)", "x.hidden[2:, 1] = True", "x.hidden.fill_(False)"),
    *("x.hidden[:, 0] = False", "x.v *= 0.5", "x.k[:, :, 1] = 0.3", "x.bias.data.mul_(0.5)"),
    *(NO_GRAD + "x.k.mul_(0.5)", NO_GRAD + "x.q.add_(0.1)", NO_GRAD + "x.v.neg_()"),
    NO_GRAD + "x.k[:, :2].zero_()",
    "x.k = x.k.detach(); x.k.mul_(0.5)",
    "a = x.bias; x.bias = torch.zeros_like(a); a.fill_(3.0)",
    "x.bias = x.learned * 2.0",
    "x.bias.detach_()",
]


@dataclass(frozen=True)
class Program:
    """Statements in order; ``no_grad`` is around all of them. ``chunk`` is in tokens."""

    statements: tuple[str, ...]
    no_grad: bool = False
    chunk: int = 4


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """Every `Program`; shrinks towards few statements."""

    def some(choices: list[str], most: int) -> list[str]:
        return draw(st.lists(st.sampled_from(choices), max_size=most))

    def one(choices: list[str]) -> list[str]:
        return [draw(st.sampled_from(choices))]

    lines = some(OPERANDS, 2)
    if draw(st.integers(0, 3)) == 0:
        lines += one(REPEATS) + some(AFTER_REPEATS, 1)
    if draw(st.integers(0, 3)) == 0:
        lines += some(WRITES, 1) + one(SDPA)
    else:
        lines += one(PRODUCTS) + some(SCORES, 2) + some(WRITES, 1) + some(SCORES, 2)
        lines += some(WRITES, 1) + one(SOFTMAXES) + some(WEIGHTS, 1) + some(WRITES, 1)
        lines += one(OUTPUTS)
    lines += some(WRITES, 1) + some(AFTERWARDS, 1)
    if draw(st.integers(0, 4)) == 0:  # the scratch tensors are used again by a second attention
        lines += ["x.q = x.q + 0.1 * x.y", *some(WRITES, 1)]
        lines += one(PRODUCTS) + some(SCORES, 2) + one(SOFTMAXES) + ["x.y = x.y + x.w @ x.v"]
        lines += some(WRITES, 1)
    no_grad = draw(st.integers(0, 7)) == 0
    return Program(tuple(lines), no_grad, draw(st.sampled_from((4, 5, 8, 4, 5, 8, 4, 5, 8, 3))))


class Model(nn.Module):
    """One layer whose attention is a `Program`."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.lines = [statement(line) for line in program.statements]
        self.no_grad = program.no_grad
        size = HEADS * WIDTH
        self.token = nn.Embedding(VOCAB, size)
        self.qkv = nn.Linear(size, 3 * size)
        self.learned = nn.Parameter(torch.randn(LENGTH, LENGTH) / 4)
        self.out = nn.Linear(size, size)
        self.head = nn.Linear(size, VOCAB)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        future = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
        bias = torch.full((LENGTH, LENGTH), -math.inf, dtype=q.dtype).triu(1)
        c = torch.full((), 0.3, dtype=q.dtype)
        x = State(q, k, v, bias, future, c, self.learned)
        for line in self.lines:
            line(x)
        return x.y + x.beside

    def forward(self, ids: Tensor) -> Tensor:
        x = self.token(ids)
        heads = self.qkv(x).view(BATCH, LENGTH, 3, HEADS, WIDTH).permute(2, 0, 3, 1, 4)
        q, k, v = (heads[i].clone() for i in range(3))
        if self.no_grad:
            with torch.no_grad():
                y = self.attend(q, k, v)
            y = y + v
        else:
            y = self.attend(q, k, v)
        x = x + self.out(y.transpose(1, 2).reshape(BATCH, LENGTH, HEADS * WIDTH))
        return F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def step(model: nn.Module, function: Callable[[Tensor], Tensor], ids: Tensor) -> Step:
    """One training step through ``function``."""
    model.zero_grad(set_to_none=True)
    loss = function(ids)
    loss.backward()
    grads = {name: weight.grad for name, weight in model.named_parameters()}
    return Step(loss.detach(), grads)


def check(program: Program) -> bool:
    """Fail unless a streamed step equals eager's to 1e-10.

    Scores that are scaled by 1e3 two or three times make gradients that rounding alone moves by
    more than that, for which see `rounding_of`.

    The bodies of programs in chunks of 3, a tenth, are lowered too: that takes longest here.
    False if torch refuses the program, or gets no number that could be compared.
    """
    torch.manual_seed(0)
    model = Model(program).double()
    ids = torch.randint(0, VOCAB, (BATCH, LENGTH))
    other = copy.deepcopy(model)
    try:
        want = step(model, model, ids)
    except RuntimeError:
        return False
    if any(grad is not None and not grad.isfinite().all() for grad in want.grads.values()):
        return False
    lowered = program.chunk == 3
    function = streamed(other, chunk_size=program.chunk, on_barrier="ignore", lowered=lowered)
    try:
        got = step(other, function, ids)
    except RuntimeError as error:
        if torch_refuses(error):
            return False
        raise
    assert_same_step(got, want, rounding_of(model, lambda moved: step(moved, moved, ids), want))
    return True
