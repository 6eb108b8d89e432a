"""Programs that change values in place, round, index or fill: as eager computes them, or refused.

The named ones were once wrong, without a sign of it; the others are drawn from two grammars. A
failure prints a script that repeats it.
"""

from __future__ import annotations

import warnings
from types import ModuleType
from typing import Any

import pytest
from hypothesis import HealthCheck, given, note, reject, seed, settings

from tests import attention_programs, loss_programs
from tests.attention_programs import NO_GRAD, SDPA, Program, check

SHARDS = 4
EXAMPLES = 200
LONG_EXAMPLES = 10_000

SOFT = ("x.s = x.s.masked_fill(x.hidden, -math.inf)", "x.w = x.s.softmax(-1)", "x.y = x.w @ x.v")
GROUPED = (
    "x.k, x.v = [t[:, :2, None].expand(-1, -1, 2, -1, -1).reshape(t.shape) for t in (x.k, x.v)]"
)

# What is written in place after it was read, or between.
WRITTEN = {
    "bias zeroed after it was added": (
        "x.s = x.q @ x.k.mT / 3 + x.bias",
        "x.bias.zero_()",
        *SOFT[1:],
    ),
    "bias used again as scratch": (
        "x.s = x.q @ x.k.mT / 3 + x.bias",
        "a = x.bias; a.fill_(5.0); a[:, 0] = -5",
        *SOFT[1:],
        "x.beside = x.y",
        "x.bias.fill_(-0.2); x.s = (x.q + 1) @ x.k.mT + x.bias; x.bias.fill_(5.0)",
        *SOFT,
    ),
    "bias changed through a view": (
        "x.s = x.q @ x.k.mT + x.bias",
        "x.bias.t()[0].fill_(1.0)",
        *SOFT[1:],
    ),
    "bias changed through data": (
        "x.s = x.q @ x.k.mT + x.bias",
        "x.bias.data.mul_(0.5)",
        *SOFT[1:],
    ),
    "keys changed after the scores": (
        NO_GRAD + "x.s = x.q @ x.k.mT / 3; x.k.mul_(0.1); " + "; ".join(SOFT),
        "x.y = x.y + x.v",
    ),
    "queries changed after the scores": (
        NO_GRAD + "x.s = x.q @ x.k.mT; x.q[:, :, 2:] = 0.0; " + "; ".join(SOFT),
        "x.y = x.y + x.v",
    ),
    "repeated, then rotated in place": (
        GROUPED,
        "x.k[..., :2] = x.k[..., :2] * 0.6 - x.k[..., 2:] * 0.8",
        SDPA[0],
    ),
    "repeated, then one head scaled": (
        "x.k, x.v = [t[:, :2].repeat_interleave(2, 1) for t in (x.k, x.v)]",
        "x.k[:, 1] *= 0.5; x.v[:, 1] *= 0.5",
        SDPA[0],
    ),
    "source changed after it was repeated": (
        "a, b = x.k[:, :2], x.v[:, :2]; x.k, x.v = [t.repeat_interleave(2, 1) for t in (a, b)]"
        "; a.mul_(0.5); b += 1.0",
        SDPA[0],
    ),
    "scale added to": ("x.c.add_(1.0)", "x.s = x.q @ x.k.mT * x.c", *SOFT),
    "fill changed": (
        "x.c = torch.full((), MIN, dtype=torch.float64); x.c.mul_(1e-308)",
        "x.s = torch.where(x.hidden, x.c, x.q @ x.k.mT / 3)",
        *SOFT[1:],
    ),
    "bias detached after it was added": (
        "x.bias = x.learned * 2.0; x.s = x.q @ x.k.mT + x.bias",
        *SOFT[1:],
        "x.bias.detach_()",
    ),
    "output scaled": ("x.s = x.q @ x.k.mT", *SOFT[1:], "x.y.mul_(0.5)"),
    "scores written through a view": (
        "x.s = x.q @ x.k.mT",
        "x.s[..., 0] = -1.0",
        *SOFT,
    ),
}

# Casts between scores and output that change values, heads that are indexed, and numbers.
CHANGED = {
    "scores rounded to int": ("x.s = (x.q @ x.k.mT * 2).to(torch.int32).double()", *SOFT),
    "scores rounded to bool": ("x.s = (x.q @ x.k.mT > 0).bool().double()", *SOFT),
    "scores rounded to uint8": ("x.s = (x.q @ x.k.mT).abs().to(torch.uint8).double()", *SOFT),
    "scores rounded to bfloat16": ("x.s = (x.q @ x.k.mT).bfloat16().double()", *SOFT),
    "scores rounded to half": ("x.s = (x.q @ x.k.mT).half().double()", *SOFT),
    "scores rounded to fp8": ("x.s = (x.q @ x.k.mT).to(torch.float8_e4m3fn).double()", *SOFT),
    "weights rounded to bfloat16": (
        "x.s = x.q @ x.k.mT",
        *SOFT[:2],
        "x.w = x.w.bfloat16().double()",
        SOFT[2],
    ),
    "heads swapped, then repeated": (
        "x.k, x.v = [t[:, torch.tensor([1, 0])][:, :, None].expand(-1, -1, 2, -1, -1)"
        ".reshape(t.shape) for t in (x.k, x.v)]",
        SDPA[0],
    ),
    "heads swapped by the index that adds a dim": (
        "x.k, x.v = [t[:, :2][:, [1, 0], None].expand(-1, -1, 2, -1, -1).reshape(t.shape) "
        "for t in (x.k, x.v)]",
        SDPA[0],
    ),
    # Of scores of 1e9, as of -1e9 here, eager keeps 8 digits and so would both sides.
    "fill that scores reach": (
        "x.s = (x.q @ x.k.mT * 1e3).masked_fill(x.hidden, -1e3)",
        *SOFT[1:],
    ),
    "added fill that scores reach": (
        "x.s = x.q @ x.k.mT * 1e3 - torch.where(x.hidden, 1e3, 0.0)",
        *SOFT[1:],
    ),
    "mask that scores outweigh": (
        "x.q = x.q * 1e3",
        "x.y = F.scaled_dot_product_attention(x.q, x.k, x.v, attn_mask=x.hidden * x.c.mul(-3e3))",
    ),
    "filled, then scaled": (
        "x.s = (x.q @ x.k.mT).masked_fill(x.hidden, -1e4) * 1e-4",
        *SOFT[1:],
    ),
    "negative scale": (SDPA[2],),
    "scale of zero": (
        "x.y = F.scaled_dot_product_attention(x.q, x.k, x.v, attn_mask=~x.hidden, scale=0.0)",
    ),
    "boolean added to scores": ("x.s = x.q @ x.k.mT + x.hidden", *SOFT),
    "weights as the addend of a product": (
        "x.s = x.q @ x.k.mT",
        *SOFT[:2],
        "a = x.w.flatten(0, 1); x.y = torch.baddbmm(a, a, a)[..., :4].view(2, 4, 11, 4)",
    ),
    "addend of the product with the values": (
        "x.s = x.q @ x.k.mT",
        *SOFT[:2],
        "x.y = torch.baddbmm(x.q.flatten(0, 1), x.w.flatten(0, 1), x.v.flatten(0, 1))"
        ".view(2, 4, 11, 4)",
    ),
    "dropout that is switched off by its other name": (
        "x.s = x.q @ x.k.mT",
        *SOFT[:2],
        "x.w = torch.dropout(x.w, 0.4, train=False)",
        SOFT[2],
    ),
}


# What reads memory by its layout: the op's result has another than the product's.
LAYOUTS = {
    "viewed": (
        "x.s = x.q @ x.k.mT",
        "x.w = x.s.softmax(-1)",
        "x.y = (x.w @ x.v).view(8, 11, 4).view(2, 4, 11, 4)",
    ),
    "a copy that is written": (
        "x.s = x.q @ x.k.mT",
        "x.w = x.s.softmax(-1)",
        "x.y = x.w @ x.v; a = x.y.transpose(1, 2).contiguous(); a.mul_(2.0)"
        "; x.y = x.y + a.transpose(1, 2)",
    ),
    "output by strides": (
        SDPA[0],
        "x.y = torch.as_strided(x.y * 2, (2, 4, 11, 4), (176, 44, 4, 1))",
    ),
    "product by strides": (
        "x.s = x.q @ x.k.mT",
        "x.w = x.s.softmax(-1)",
        "x.y = x.w @ x.v; x.y = torch.as_strided(x.y * 2, (2, 4, 11, 4), (176, 44, 4, 1))",
    ),
    "product of one head by strides": (
        "x.k, x.v = [t[:, :1].repeat(1, 4, 1, 1) for t in (x.k, x.v)]",
        "x.s = x.q @ x.k.mT",
        "x.w = x.s.softmax(-1)",
        "x.y = torch.einsum('bhqk,bhkd->bhqd', x.w, x.v).transpose(1, 2).clone()",
        "x.y = torch.as_strided(x.y, (2, 4, 11, 4), (176, 44, 4, 1))",
    ),
    "product in another shape later": (
        "x.s = x.q @ x.k.mT",
        "x.w = x.s.softmax(-1)",
        "x.y = ((x.w @ x.v) * 2).view(8, 11, 4).view(2, 4, 11, 4)",
    ),
    "queries by strides": (
        "x.q = torch.as_strided(x.q.transpose(2, 3) * 2, (2, 4, 11, 4), (176, 44, 4, 1))",
        SDPA[0],
    ),
    "a part by strides": (
        "x.q = torch.as_strided(x.q[:, 1:], (2, 4, 11, 4), (176, 44, 4, 1), 0)",
        SDPA[0],
    ),
}


# What the op saves for its backward, made where autograd keeps no account.
INFERENCE = {
    "boolean mask": (
        "with torch.inference_mode(): x.hidden = ~x.hidden",
        "x.y = F.scaled_dot_product_attention(x.q, x.k, x.v, attn_mask=x.hidden)",
    ),
    "added mask": (
        "with torch.inference_mode(): x.bias = x.bias.clone()",
        "x.s = x.q @ x.k.mT + x.bias",
        *SOFT[1:],
    ),
}


@pytest.mark.parametrize("name", INFERENCE)
def test_a_mask_that_was_made_in_inference_mode_is_read_like_any_other(name: str) -> None:
    assert check(Program(INFERENCE[name]))


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_program_that_reads_memory_by_its_layout_is_right(name: str) -> None:
    assert check(Program(LAYOUTS[name]))


@pytest.mark.parametrize("name", WRITTEN)
def test_a_program_that_writes_in_place_is_right(name: str) -> None:
    assert check(Program(WRITTEN[name]))


@pytest.mark.parametrize("name", CHANGED)
def test_a_program_that_is_nearly_attention_is_right(name: str) -> None:
    assert check(Program(CHANGED[name]))


@pytest.mark.parametrize("shard", range(SHARDS))
@pytest.mark.parametrize("grammar", [attention_programs, loss_programs], ids=["attention", "loss"])
def test_random_program_matches_eager(
    grammar: ModuleType, shard: int, pytestconfig: pytest.Config
) -> None:
    long = pytestconfig.getoption("--long")

    @settings(
        max_examples=(LONG_EXAMPLES if long else EXAMPLES) // SHARDS,
        suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
    )
    @given(grammar.programs())
    def search(program: Any) -> None:
        note(f"from {grammar.__name__} import Program, check\n\ncheck({program!r})\n")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch, about gradients of views
            if not grammar.check(program):
                reject()  # torch refuses it: another one shall be tried

    # Shards of the default run differ from each other and stay the same from run to run.
    (search if long else seed(shard)(search))()
