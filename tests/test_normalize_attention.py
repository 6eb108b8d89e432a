"""Calls of SDPA become the attention op, whatever their form; what can not is reported."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .attention_graphs import ATTENTION, Captured, compare

sdpa = F.scaled_dot_product_attention
B, H, T, E = 2, 4, 7, 8


def normal(*shape: int, grad: bool = True, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    drawn = torch.randn(*shape, dtype=torch.float64, generator=generator).to(dtype)
    return drawn.requires_grad_(grad)


def qkv(heads: int = H, key_heads: int = H, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return [normal(B, h, T, E, dtype=dtype) for h in (heads, key_heads, key_heads)]


def boolean(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.rand(*shape, generator=generator) > 0.3


def normalised(captured: Captured, count: int = 1) -> None:
    assert captured.refusals == []
    assert len(captured.attentions()) == count
    assert captured.count("scaled_dot_product_attention") == 0


FORMS = {
    "plain": lambda q, k, v: sdpa(q, k, v),
    "causal": lambda q, k, v: sdpa(q, k, v, is_causal=True),
    "positional": lambda q, k, v: sdpa(q, k, v, None, 0.0, True),
    "keywords": lambda q, k, v: sdpa(query=q, key=k, value=v, attn_mask=None, scale=0.3),
    "other_value_size": lambda q, k, v: sdpa(q, k, v[..., :5]),
    "other_length": lambda q, k, v: sdpa(q[:, :, :3], k, v),
    "three_dims": lambda q, k, v: sdpa(q[:, 0], k[:, 0], v[:, 0], is_causal=True),
    "two_dims": lambda q, k, v: sdpa(q[0, 0], k[0, 0], v[0, 0]),
}


@pytest.mark.parametrize("form", FORMS)
def test_call_forms(form: str) -> None:
    normalised(compare(FORMS[form], *qkv()))


@pytest.mark.parametrize("form", FORMS)
def test_call_forms_of_symbolic_length(form: str) -> None:
    def program(x: Tensor) -> Tensor:
        return FORMS[form](*x.chunk(3, -1))

    normalised(compare(program, normal(B, H, T, 3 * E), dynamic=True))


@pytest.mark.parametrize("shape", [(T, T), (H, T, T), (B, 1, T, T), (B, 1, 1, T), (1, H, T, 1)])
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_masks(shape: tuple[int, ...], kind: str) -> None:
    mask = boolean(*shape) if kind == "bool" else normal(*shape, grad=False)
    normalised(compare(lambda q, k, v, mask: sdpa(q, k, v, attn_mask=mask), *qkv(), mask))


def test_mask_of_three_dim_operands() -> None:
    def program(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return sdpa(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), attn_mask=mask)

    normalised(compare(program, *qkv(), boolean(B * H, T, T)))


def test_seed_is_drawn_once_for_each_dropout() -> None:
    torch._dynamo.reset()
    captured = Captured()

    @torch.compile(backend=captured)
    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sdpa(q, k, v, dropout_p=0.5) + sdpa(q, k, v, dropout_p=0.25)

    q, k, _ = qkv()
    value = torch.ones(B, H, T, E, dtype=torch.float64)
    torch.manual_seed(3)
    one = program(q, k, value)
    other = program(q, k, value)
    torch.manual_seed(3)
    assert torch.equal(program(q, k, value), one)
    assert not torch.equal(other, one)
    assert captured.count("randint") == 2
    assert [node.args[-1] for node in captured.attentions()] == [0.5, 0.25]


def test_inductor_draws_the_seed() -> None:
    """The op with its seed compiles; each call has another mask."""
    torch._dynamo.reset()
    captured = Captured()

    def backend(graph_module, example_inputs):
        captured(graph_module, example_inputs)
        return torch._inductor.compile(graph_module, example_inputs)

    program = torch.compile(
        lambda q: sdpa(q, q, torch.ones_like(q), dropout_p=0.5), backend=backend
    )
    query = normal(B, H, T, E, grad=False)
    assert not torch.equal(program(query), program(query))
    assert len(captured.attentions()) == 1


class TestGroupedHeads:
    def test_enable_gqa(self) -> None:
        captured = compare(lambda q, k, v: sdpa(q, k, v, enable_gqa=True), *qkv(4, 2))
        normalised(captured)

    @pytest.mark.parametrize(
        "repeat",
        [
            lambda x: x[:, :, None].expand(B, 2, 2, T, E).reshape(B, 4, T, E),
            lambda x: x[:, :, None, :, :].expand(-1, -1, 2, -1, -1).flatten(1, 2),
            lambda x: x.unsqueeze(2).repeat(1, 1, 2, 1, 1).reshape(B, 4, T, E).contiguous(),
            lambda x: x.repeat_interleave(2, dim=1),
            lambda x: torch.repeat_interleave(x, repeats=2, dim=-3),
            lambda x: x.transpose(1, 2).repeat_interleave(2, dim=2).transpose(1, 2),
            lambda x: (
                x.transpose(1, 2)[:, :, :, None, :]
                .expand(B, T, 2, 2, E)
                .reshape(B, T, 4, E)
                .transpose(1, 2)
            ),
        ],
    )
    def test_repeats_are_dropped(self, repeat) -> None:
        captured = compare(lambda q, k, v: sdpa(q, repeat(k), repeat(v)), *qkv(4, 2))
        normalised(captured)
        key = captured.attentions()[0].args[1]
        assert key.meta["example_value"].shape == (B, 2, T, E)

    @pytest.mark.parametrize(
        "repeat", [lambda x: x.expand(-1, 4, -1, -1), lambda x: x.repeat(1, 4, 1, 1)]
    )
    def test_one_head(self, repeat) -> None:
        captured = compare(lambda q, k, v: sdpa(q, repeat(k), repeat(v)), *qkv(4, 1))
        normalised(captured)
        key = captured.attentions()[0].args[1]
        assert key.meta["example_value"].shape == (B, 1, T, E)

    @pytest.mark.parametrize(
        "repeat",
        [
            # Heads 0, 1, 0, 1: repeated as a whole.
            lambda x: x.repeat(1, 2, 1, 1),
            lambda x: x[:, None].expand(B, 2, 2, T, E).reshape(B, 4, T, E),
        ],
    )
    def test_other_repeats_stay(self, repeat) -> None:
        captured = compare(lambda q, k, v: sdpa(q, repeat(k), repeat(v)), *qkv(4, 2))
        normalised(captured)
        key = captured.attentions()[0].args[1]
        assert key.meta["example_value"].shape == (B, 4, T, E)

    def test_only_one_is_repeated(self) -> None:
        def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return sdpa(q, k.repeat_interleave(2, dim=1), v)

        normalised(compare(program, normal(B, 4, T, E), normal(B, 2, T, E), normal(B, 4, T, E)))


class TestAutocast:
    def test_region_in_the_program(self) -> None:
        def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                inside = sdpa(q, k, v, is_causal=True)
                with torch.autocast("cpu", enabled=False):
                    off = sdpa(q, k, v, is_causal=True)
            return inside + off + sdpa(q, k, v, is_causal=True)

        captured = compare(program, *qkv(dtype=torch.float32), atol=2e-2)
        normalised(captured, 3)
        dtypes = [node.args[0].meta["example_value"].dtype for node in captured.attentions()]
        assert dtypes == [torch.bfloat16, torch.float32, torch.float32]

    def test_around_the_program(self) -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            captured = compare(lambda q, k, v: sdpa(q, k, v), *qkv(dtype=torch.float32), atol=2e-2)
        normalised(captured)
        assert captured.attentions()[0].args[0].meta["example_value"].dtype == torch.bfloat16

    def test_mixed_operands(self) -> None:
        """Rotary embeddings make q and k float32 where v is bfloat16."""
        q, k, v = qkv(dtype=torch.float32)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            captured = compare(
                lambda q, k, v: sdpa(q, k, v), q, k, v.detach().bfloat16(), atol=2e-2
            )
        normalised(captured)

    def test_fill_is_cast_as_well(self) -> None:
        """finfo(float32).min is -inf in bfloat16: a row without a key is 0 and no average."""
        fill = torch.zeros(T, T).masked_fill(torch.ones(T, T).triu(0).bool(), torch.finfo().min)
        q, k, v = (x.detach() for x in qkv(dtype=torch.float32))

        def program(q: Tensor, k: Tensor, v: Tensor, fill: Tensor) -> Tensor:
            return sdpa(q, k, v, attn_mask=fill)

        with torch.autocast("cpu", dtype=torch.bfloat16):
            captured = compare(program, q, k, v, fill, atol=2e-2)
            normalised(captured)
            assert program(q, k, v, fill)[:, :, 0].abs().max() == 0


def test_checkpointed_layers() -> None:
    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return sdpa(q, k, v, is_causal=True) * 2.0

        return checkpoint(layer, q, k, v, use_reentrant=False) + sdpa(q, k, v)

    normalised(compare(program, *qkv()), 2)


class TestRefusals:
    def refused(self, captured: Captured, reason: str) -> None:
        assert captured.attentions() == []
        assert len(captured.refusals) == 1
        refusal = captured.refusals[0]
        assert reason in refusal.reason
        assert refusal.op == "scaled_dot_product_attention"
        assert 'test_normalize_attention.py", line' in refusal.source
        assert "sdpa(" in refusal.source
        assert str(refusal).startswith("scaled_dot_product_attention: ")

    def test_bias_needs_a_gradient(self) -> None:
        def program(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
            return sdpa(q, k, v, attn_mask=bias)

        self.refused(compare(program, *qkv(), normal(H, T, T)), "needs a gradient")

    def test_causal_with_other_lengths(self) -> None:
        def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return sdpa(q[:, :, :3], k, v, is_causal=True)

        self.refused(compare(program, *qkv()), "upper left")

    def test_batch_broadcasts(self) -> None:
        def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return sdpa(q, k[:1], v[:1])

        self.refused(compare(program, *qkv()), "batch broadcasts")

    def test_five_dims(self) -> None:
        def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return sdpa(q[None], k[None], v[None])

        self.refused(compare(program, *qkv()), "ranks")


def test_given_and_result() -> None:
    """As in the pass's docstring."""

    def program(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        k = k[:, :, None].expand(B, 2, 2, T, E).reshape(B, 4, T, E)
        v = v[:, :, None].expand(B, 2, 2, T, E).reshape(B, 4, T, E)
        return sdpa(q, k, v, mask, dropout_p=0.1)

    torch._dynamo.reset()
    captured = Captured()
    torch.compile(program, backend=captured)(*qkv(4, 2), boolean(T, T))
    (attention,) = captured.attentions()
    query, key, value, mask, seed, causal, scale, dropout_p = attention.args
    assert attention.target is ATTENTION
    assert [node.op for node in (query, key, value, mask)] == ["placeholder"] * 4
    assert seed.target is torch.randint
    assert (causal, scale, dropout_p) == (False, 1 / math.sqrt(E), 0.1)
    assert captured.count("expand") == captured.count("reshape") == 0
