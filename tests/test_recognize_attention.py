"""Written-out attention becomes the attention op, or is reported."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .attention_graphs import Captured, compare
from .test_normalize_attention import B, E, H, T, boolean, normal, normalised, qkv

MIN = torch.finfo(torch.float64).min


def causal(q: Tensor) -> Tensor:
    return torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool).tril()


def scaled(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.transpose(-2, -1) * E**-0.5


FORMS = {
    "plain": lambda q, k, v: scaled(q, k).softmax(-1) @ v,
    "unscaled": lambda q, k, v: F.softmax(torch.matmul(q, k.mT), dim=3).matmul(v),
    "scaled_query": lambda q, k, v: torch.softmax((q * 0.3) @ k.permute(0, 1, 3, 2), -1) @ v,
    "divided": lambda q, k, v: F.softmax(q @ k.transpose(2, 3) / math.sqrt(E), dim=-1) @ v,
    "divided_by_a_tensor": lambda q, k, v: (
        F.softmax(q @ k.transpose(2, 3) / torch.full([], 8**0.5, dtype=q.dtype), dim=-1) @ v
    ),
    "upcast": lambda q, k, v: (
        F.softmax(scaled(q, k).to(torch.float64), dim=-1, dtype=torch.float64).type_as(q) @ v
    ),
    "masked_fill_inf": lambda q, k, v: (
        scaled(q, k).masked_fill(causal(q) == 0, -math.inf).softmax(-1) @ v
    ),
    "masked_fill_min": lambda q, k, v: scaled(q, k).masked_fill(~causal(q), MIN).softmax(-1) @ v,
    "where_min": lambda q, k, v: torch.where(causal(q), scaled(q, k), MIN).softmax(-1) @ v,
    "where_tensor": lambda q, k, v: (
        torch.where(causal(q), scaled(q, k), torch.tensor(MIN, dtype=q.dtype)).softmax(-1) @ v
    ),
    "where_reversed": lambda q, k, v: torch.where(~causal(q), MIN, scaled(q, k)).softmax(-1) @ v,
    "where_then_scaled": lambda q, k, v: (
        (torch.where(causal(q), q @ k.mT, -math.inf) * 0.3).softmax(-1) @ v
    ),
    "two_masks": lambda q, k, v: (
        scaled(q, k)
        .masked_fill(~causal(q), -math.inf)
        .masked_fill(torch.arange(q.shape[-2]) == 1, -math.inf)
        .softmax(-1)
        @ v
    ),
    "einsum": lambda q, k, v: torch.einsum(
        "bhqk,bkhd->bqhd",
        F.softmax(torch.einsum("bqhd,bhkd->bhqk", q.transpose(1, 2), k) * 0.3, -1),
        v.transpose(1, 2),
    ),
    "bmm": lambda q, k, v: F.softmax(torch.bmm(q[:, 0], k[:, 0].transpose(1, 2)), dim=-1).bmm(
        v[:, 0]
    ),
    "baddbmm": lambda q, k, v: (
        torch.baddbmm(
            torch.arange(q.shape[-2], dtype=q.dtype).expand(B, 1, q.shape[-2]),
            q[:, 0],
            k[:, 0].transpose(1, 2),
            beta=0.5,
            alpha=0.3,
        ).softmax(-1)
        @ v[:, 0]
    ),
    "dropout_of_zero": lambda q, k, v: F.dropout(scaled(q, k).softmax(-1), 0.0, True) @ v,
    "dropout_in_evaluation": lambda q, k, v: F.dropout(scaled(q, k).softmax(-1), 0.3, False) @ v,
    "one_key_head": lambda q, k, v: scaled(q, k[:, :1]).softmax(-1) @ v[:, :1],
}


@pytest.mark.parametrize("form", FORMS)
def test_forms(form: str) -> None:
    captured = compare(FORMS[form], *qkv())
    normalised(captured)
    for name in ("softmax", "matmul", "bmm", "baddbmm", "einsum", "dropout"):
        assert captured.count(name) == 0, name


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_symbolic_length(form: str) -> None:
    def program(x: Tensor) -> Tensor:
        return FORMS[form](*x.chunk(3, -1))

    normalised(compare(program, normal(B, H, T, 3 * E), dynamic=True))


@pytest.mark.parametrize("shape", [(T, T), (H, T, T), (B, 1, T, T), (B, 1, 1, T)])
def test_added_biases(shape: tuple[int, ...]) -> None:
    def program(q: Tensor, k: Tensor, v: Tensor, one: Tensor, other: Tensor) -> Tensor:
        scores = (one + (q @ k.mT) + other) * 0.5
        return scores.softmax(-1) @ v

    normalised(compare(program, *qkv(), normal(*shape, grad=False), normal(T, grad=False)))


def test_bias_and_masks() -> None:
    def program(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor) -> Tensor:
        scores = scaled(q, k) + bias
        scores = scores.masked_fill(~causal(q), -math.inf)
        return torch.where(mask, scores, -math.inf).softmax(-1) @ v

    mask = boolean(B, 1, T, T)
    normalised(compare(program, *qkv(), normal(H, T, T, grad=False), mask))


@pytest.mark.parametrize(("fill", "added"), [(MIN, True), (MIN, False), (-1e9, True)])
def test_rows_that_are_filled_all_over(fill: float, added: bool) -> None:
    """They average V; a gradient reaches q and k through an added fill alone."""

    def program(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        scores = scaled(q, k)
        if added:
            scores = scores + torch.where(mask, torch.zeros((), dtype=q.dtype), fill)
        else:
            scores = scores.masked_fill(~mask, fill)
        return scores.softmax(-1) @ v

    mask = boolean(B, 1, T, T)
    mask[:, :, 2] = False
    # -1e9 absorbs not all of a score in float64.
    normalised(compare(program, *qkv(), mask, atol=1e-12 if fill == MIN else 1e-5))


@pytest.mark.parametrize("added", [True, False])
def test_rows_without_a_key_are_nan(added: bool) -> None:
    def program(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        scores = scaled(q, k)
        if added:
            scores = scores + torch.where(mask, 0.0, torch.full((), -math.inf, dtype=q.dtype))
        else:
            scores = scores.masked_fill(~mask, -math.inf)
        return scores.softmax(-1) @ v

    mask = boolean(B, 1, T, T)
    mask[0, :, 2] = False
    operands = [x.detach() for x in qkv()]
    normalised(compare(program, *operands, mask))
    eager = program(*operands, mask)
    assert eager[0, :, 2].isnan().all() and not eager[1].isnan().any()


def test_a_fill_of_upcast_scores() -> None:
    """``finfo(float32).min`` is ``-inf`` in the dtype of the product: a row would be nan."""

    def program(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        scores = (q @ k.mT).float().masked_fill(~mask, torch.finfo(torch.float32).min)
        return F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype) @ v

    mask = boolean(B, 1, T, T)
    mask[0, :, 2] = False
    normalised(compare(program, *qkv(dtype=torch.bfloat16), mask, atol=6e-2))


def test_no_gradient_is_finite_where_eager_has_nan() -> None:
    def program(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return scaled(q, k).masked_fill(~mask, -math.inf).softmax(-1) @ v

    mask = boolean(B, 1, T, T)
    mask[0, :, 2] = False
    operands = qkv()
    eager = torch.autograd.grad(program(*operands, mask).sum(), operands)
    compiled = torch.compile(program, backend=Captured(), fullgraph=True)
    ours = torch.autograd.grad(compiled(*operands, mask).sum(), operands)
    assert eager[2].isnan().any()
    for own, other in zip(ours, eager, strict=True):
        assert own[other.isnan()].isnan().all()


def test_a_finite_fill_brings_back_keys_at_minus_infinity() -> None:
    def program(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        scores = scaled(q, k).masked_fill(~causal(q), -math.inf)
        return scores.masked_fill(~mask, MIN).softmax(-1) @ v

    mask = boolean(B, 1, 1, T)
    mask[..., :3] = False
    normalised(compare(program, *qkv(), mask, atol=1e-6))


def test_dropout() -> None:
    torch._dynamo.reset()
    captured = Captured()

    @torch.compile(backend=captured)
    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.dropout(scaled(q, k).softmax(-1), p=0.25, training=True) @ v

    q, k, _ = qkv()
    out = program(q, k, torch.ones(B, H, T, E, dtype=torch.float64))
    normalised(captured)
    assert captured.attentions()[0].args[-1] == 0.25
    assert out.std() > 0.05
    assert abs(out.mean() - 1.0) < 0.2


def test_autocast_decides_the_dtype() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        captured = compare(FORMS["masked_fill_inf"], *qkv(dtype=torch.float32), atol=3e-2)
    normalised(captured)
    assert captured.attentions()[0].args[0].meta["example_value"].dtype == torch.bfloat16


def test_a_fill_after_a_bias_of_positions() -> None:
    """ALiBi is bounded by what its integers hold: it is no mask."""

    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        slopes = 1.0 / torch.pow(2, torch.arange(1, H + 1).double())
        positions = torch.arange(1 - q.shape[-2], 1, dtype=torch.int32)
        bias = positions.view(1, 1, 1, -1) * slopes.view(1, H, 1, 1)
        return (scaled(q, k) + bias).masked_fill(~causal(q), MIN).softmax(-1) @ v

    normalised(compare(program, *qkv()))


class TestRefusals:
    def refused(self, captured: Captured, reason: str) -> None:
        assert captured.attentions() == []
        assert [reason in refusal.reason for refusal in captured.refusals] == [True]
        assert captured.refusals[0].op == "softmax"
        assert 'test_recognize_attention.py", line' in captured.refusals[0].source

    def test_weights_are_returned(self) -> None:
        def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            weights = scaled(q, k).softmax(-1)
            return torch.cat([weights @ v, weights], -1)

        self.refused(compare(program, *qkv()), "are used elsewhere as well")

    def test_scores_are_used(self) -> None:
        def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            scores = scaled(q, k)
            return scores.softmax(-1) @ v + scores.mean()

        self.refused(compare(program, *qkv()), "are used elsewhere")

    def test_bias_needs_a_gradient(self) -> None:
        def program(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
            return (scaled(q, k) + bias).softmax(-1) @ v

        self.refused(compare(program, *qkv(), normal(H, T, T)), "needs a gradient")

    def test_bias_after_a_fill(self) -> None:
        def program(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
            return (scaled(q, k).masked_fill(~causal(q), MIN) + bias).softmax(-1) @ v

        self.refused(compare(program, *qkv(), normal(T, grad=False)), "added to scores that were")

    def test_fill_after_an_unknown_bias(self) -> None:
        def program(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
            return (scaled(q, k) + bias).masked_fill(~causal(q), MIN).softmax(-1) @ v

        bias = normal(T, T, grad=False)
        self.refused(compare(program, *qkv(), bias), "after a mask was added")

    def test_fill_after_a_mask(self) -> None:
        """Padding added and the future filled: in a padded row both are as low."""

        def program(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
            bias = torch.where(mask, torch.zeros((), dtype=q.dtype), MIN)
            return (scaled(q, k) + bias).masked_fill(~causal(q), MIN).softmax(-1) @ v

        mask = boolean(B, 1, 1, T)
        mask[..., :3] = False
        self.refused(compare(program, *qkv(), mask), "after a mask was added")

    @pytest.mark.parametrize("fill", [-1e4, -1e9, -3.4e38])
    def test_scores_may_reach_the_fill(self, fill: float) -> None:
        def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return (q @ k.mT * -fill).masked_fill(~causal(q), fill).softmax(-1) @ v

        self.refused(compare(program, *qkv(), atol=1e-4), "scores may be as low")

    def test_scaled_after_a_finite_fill(self) -> None:
        def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return (scaled(q, k).masked_fill(~causal(q), MIN) * 1e-308).softmax(-1) @ v

        self.refused(compare(program, *qkv()), "after they were filled")

    def test_scores_of_zero(self) -> None:
        def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return ((q @ k.mT) * 0.0).masked_fill(~causal(q), -math.inf).softmax(-1) @ v

        self.refused(compare(program, *qkv()), "multiplied by 0")

    def test_fill_is_no_mask(self) -> None:
        def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return scaled(q, k).masked_fill(~causal(q), -3.0).softmax(-1) @ v

        self.refused(compare(program, *qkv()), "which is no mask")

    def test_softcap_has_no_place_in_the_op(self) -> None:
        def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return (scaled(q, k) / 30.0).tanh().mul(30.0).softmax(-1) @ v

        self.refused(compare(program, *qkv()), "tanh")


def test_other_softmaxes_are_left_alone() -> None:
    captured = compare(lambda q: q.softmax(-1) + q.softmax(2), normal(B, H, T, E))
    assert captured.refusals == []
    assert captured.attentions() == []


class TrilAttention(nn.Module):
    """Causal self-attention over a buffer of ones, with the mask sliced from it."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(32, 96)
        self.register_buffer("allowed", torch.ones(16, 16).tril().view(1, 1, 16, 16))
        self.dropout = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, size = x.shape
        q, k, v = (
            part.view(batch, length, 4, 8).transpose(1, 2) for part in self.qkv(x).split(32, dim=2)
        )
        weights = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        weights = weights.masked_fill(self.allowed[:, :, :length, :length] == 0, float("-inf"))
        weights = self.dropout(F.softmax(weights, dim=-1))
        return (weights @ v).transpose(1, 2).contiguous().view(batch, length, size)


def test_module_with_a_tril_buffer() -> None:
    module = TrilAttention().double()
    normalised(compare(module.__call__, normal(B, T, 32)))


def make_model(name: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    family, implementation = name.split("_")
    common = {"vocab_size": 97, "bos_token_id": 0, "eos_token_id": 0}
    if family == "llama":
        config = transformers.LlamaConfig(
            **common,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
    else:
        none = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
        config = transformers.GPT2Config(
            **common, **none, n_embd=32, n_layer=2, n_head=4, n_positions=64
        )
    make = transformers.AutoModelForCausalLM.from_config
    return make(config, attn_implementation=implementation)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama_sdpa", "llama_eager", "gpt2_eager", "gpt2_sdpa"])
@pytest.mark.parametrize("padded", [False, True])
def test_transformers_models(name: str, padded: bool) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    dtype, atol = torch.float32, 1e-5  # written-out softmax runs in float32
    model = make_model(name).to(dtype).train()
    ids = torch.randint(0, 97, (2, 11))
    mask = torch.ones_like(ids)
    if padded:
        mask[1, :3] = 0
    labels = ids.masked_fill(mask == 0, -100)
    captured = Captured()
    compiled = torch.compile(model, backend=captured)
    results = []
    for function in (model, compiled):
        out = function(input_ids=ids, labels=labels, attention_mask=mask, use_cache=False)
        gradients = torch.autograd.grad(out.loss, list(model.parameters()))
        results.append((out.loss, *gradients))
    assert captured.refusals == []
    assert len(captured.attentions()) == 2
    if name.startswith("llama"):
        for node in captured.attentions():
            assert node.args[1].meta["example_value"].shape[1] == 2
    for eager, other in zip(*results, strict=True):
        torch.testing.assert_close(other, eager, rtol=0.0, atol=atol, equal_nan=True)
