"""``streambp::attention`` and its chunked forms against SDPA."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._inductor.compile_fx import compile_fx_inner
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

import streambp_fx.passes.rules.attention  # noqa: F401  (registers the rules)
from streambp_fx.ops import attention_engines
from streambp_fx.ops.attention_dropout import keep_factors, philox4x32
from streambp_fx.passes.rules import call_of, check_spec, rule_for

streambp = torch.ops.streambp
SCALE = 0.3


@dataclass
class Case:
    """Operands of one attention, and the same attention by SDPA."""

    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor | None
    causal: bool

    def reference(self) -> Tensor:
        mask = self.bias
        if self.causal and mask is not None:
            triangle = torch.ones(self.query.shape[2], self.key.shape[2]).tril().bool()
            if mask.dtype == torch.bool:
                mask = mask & triangle
            else:
                mask = mask.masked_fill(~triangle, -math.inf)
        # The math backend: the fused one is wrong in backward for rows with a finite fill.
        with sdpa_kernel(SDPBackend.MATH):
            return F.scaled_dot_product_attention(
                self.query,
                self.key,
                self.value,
                attn_mask=mask,
                is_causal=self.causal and mask is None,
                scale=SCALE,
                enable_gqa=True,
            )

    def operands(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.query, self.key, self.value


def make_case(
    batch: int = 2,
    heads: int = 4,
    key_heads: int = 2,
    queries: int = 23,
    keys: int | None = None,
    size: int = 8,
    value_size: int = 8,
    bias: Tensor | None = None,
    causal: bool = True,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> Case:
    generator = torch.Generator().manual_seed(seed)

    def normal(heads: int, length: int, size: int) -> Tensor:
        drawn = torch.randn(batch, length, heads, size, generator=generator, dtype=torch.float64)
        return drawn.to(dtype).transpose(1, 2).requires_grad_()

    keys = queries if keys is None else keys
    return Case(
        normal(heads, queries, size),
        normal(key_heads, keys, size),
        normal(key_heads, keys, value_size),
        bias,
        causal,
    )


def chunks(length: int, size: int) -> Iterator[tuple[int, int]]:
    for start in range(0, length, size):
        yield start, min(start + size, length)


def rows_of(bias: Tensor | None, start: int, stop: int) -> Tensor | None:
    if bias is None or bias.dim() < 2 or bias.shape[-2] == 1:
        return bias
    return bias[..., start:stop, :]


def run_chunked(
    case: Case,
    grad_out: Tensor,
    size: int,
    seed: Tensor | None = None,
    dropout_p: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Out and gradients, with what a causal chunk must not read set to nan."""
    query, key, value = (operand.detach() for operand in case.operands())
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    grad_key, grad_value = (torch.zeros_like(operand, dtype=dtype) for operand in (key, value))
    outs, grad_queries = [], []
    for start, stop in reversed(list(chunks(query.shape[2], size))):
        past_key, past_value = key.clone(), value.clone()
        if case.causal:
            past_key[:, :, stop:] = math.nan
            past_value[:, :, stop:] = math.nan
        common = (rows_of(case.bias, start, stop), seed)
        constants = (start, case.causal, SCALE, dropout_p)
        chunk = query[:, :, start:stop]
        out, logsumexp = streambp.attention_chunk(chunk, past_key, past_value, *common, *constants)
        operands = (grad_out[:, :, start:stop], chunk, past_key, past_value, *common)
        grad_queries.append(
            streambp.attention_chunk_backward(
                *operands, out, logsumexp, grad_key, grad_value, *constants
            )
        )
        outs.append(out)
    return torch.cat(outs[::-1], 2), torch.cat(grad_queries[::-1], 2), grad_key, grad_value


def assert_equal(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...], atol: float) -> None:
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0.0, atol=atol)


def check_against_sdpa(case: Case, sizes: tuple[int, ...], atol: float = 1e-12) -> None:
    reference = case.reference()
    grad_out = torch.randn(reference.shape, dtype=reference.dtype)
    expected = (reference, *torch.autograd.grad(reference, case.operands(), grad_out))
    out, _ = streambp.attention(*case.operands(), case.bias, None, case.causal, SCALE, 0.0)
    whole = (out, *torch.autograd.grad(out, case.operands(), grad_out))
    assert_equal(whole, expected, atol)
    for size in sizes:
        assert_equal(run_chunked(case, grad_out, size), expected, atol)


SIZES = (23, 12, 8, 4, 1)
TILINGS = [2048, 5]


@pytest.fixture(params=TILINGS, ids=["one_tile", "many_tiles"])
def tiling(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(attention_engines, "_KEYS", request.param)
    if request.param != 2048:
        monkeypatch.setattr(attention_engines, "_SCORES", 200)
        monkeypatch.setattr(attention_engines, "_BIAS", 30)
    return request.param


def padding(batch: int, length: int) -> Tensor:
    """Left padding: the first rows of all but the first sequence have no key under causality."""
    padded = torch.arange(batch)[:, None] * 3
    return (torch.arange(length) >= padded)[:, None, None, :]


BIASES = {
    "none": lambda b, h, t: None,
    "random_bool": lambda b, h, t: torch.rand(b, 1, t, t) > 0.3,
    "left_padding": lambda b, h, t: padding(b, t),
    "some_rows_see_nothing": lambda b, h, t: torch.rand(b, h, t, 1) > 0.3,
    "two_dims": lambda b, h, t: torch.rand(t, t) > 0.3,
    "three_dims": lambda b, h, t: torch.randn(h, t, t, dtype=torch.float64),
    "alibi": lambda b, h, t: (
        -torch.arange(1, h + 1)[:, None, None]
        * (torch.arange(t)[:, None] - torch.arange(t)).abs().double()
    ),
    "additive_inf_padding": lambda b, h, t: torch.zeros(
        b, 1, t, t, dtype=torch.float64
    ).masked_fill(~padding(b, t), -math.inf),
    "additive_finite_padding": lambda b, h, t: torch.zeros(
        b, 1, 1, t, dtype=torch.float64
    ).masked_fill(~padding(b, t), torch.finfo(torch.float64).min),
    "additive_float32_fill": lambda b, h, t: torch.zeros(
        b, 1, t, t, dtype=torch.float64
    ).masked_fill(~padding(b, t) | torch.ones(t, t).triu(1).bool(), torch.finfo(torch.float32).min),
}


@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("batch", "heads", "key_heads"), [(1, 4, 4), (2, 4, 2), (3, 3, 1)])
def test_equals_sdpa(
    tiling: int, batch: int, heads: int, key_heads: int, causal: bool, bias: str
) -> None:
    torch.manual_seed(0)
    made = BIASES[bias](batch, heads, 23)
    case = make_case(batch, heads, key_heads, bias=made, causal=causal)
    check_against_sdpa(case, SIZES)


def test_equals_sdpa_where_queries_and_keys_differ_in_number(tiling: int) -> None:
    torch.manual_seed(0)
    check_against_sdpa(make_case(queries=7, keys=23, causal=False), (7, 3))
    bias = torch.rand(7, 23) > 0.3
    check_against_sdpa(make_case(queries=7, keys=23, causal=False, bias=bias), (7, 3))


@pytest.mark.parametrize(("size", "value_size"), [(8, 5), (7, 7), (3, 16)])
def test_head_sizes_that_kernels_refuse(tiling: int, size: int, value_size: int) -> None:
    torch.manual_seed(0)
    for bias in (None, torch.rand(2, 1, 23, 23) > 0.3):
        case = make_case(size=size, value_size=value_size, bias=bias)
        check_against_sdpa(case, SIZES)


@pytest.mark.parametrize("length", [1, 2])
def test_short_sequences(length: int) -> None:
    check_against_sdpa(make_case(queries=length), (1, 2))


def test_no_rows() -> None:
    case = make_case(queries=4)
    out, logsumexp = streambp.attention_chunk(
        case.query[:, :, :0], case.key, case.value, None, None, 4, True, SCALE, 0.0
    )
    assert out.shape == (2, 4, 0, 8)
    assert logsumexp.shape == (2, 4, 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", ["none", "left_padding"])
def test_error_in_narrow_dtypes_is_near_sdpas(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, bias: str
) -> None:
    """Averaged over seeds, against float64; tiles are merged in float32."""
    monkeypatch.setattr(attention_engines, "_KEYS", 64)
    monkeypatch.setattr(attention_engines, "_BIAS", 2 * 32 * 128)
    errors = torch.zeros(2, 4, dtype=torch.float64)
    for seed in range(6):
        torch.manual_seed(seed)
        case = make_case(
            queries=192,
            size=32,
            value_size=32,
            dtype=dtype,
            seed=seed,
            bias=BIASES[bias](2, 4, 192),
        )
        exact = Case(
            *(x.detach().double().requires_grad_() for x in case.operands()), case.bias, True
        )
        reference = exact.reference()
        grad_out = torch.randn(reference.shape).to(dtype)
        expected = (reference, *torch.autograd.grad(reference, exact.operands(), grad_out.double()))
        mask, causal = case.bias, True
        if mask is not None:
            mask, causal = mask & torch.ones(192, 192).tril().bool(), False
        sdpa = F.scaled_dot_product_attention(
            *case.operands(), attn_mask=mask, is_causal=causal, scale=SCALE, enable_gqa=True
        )
        eager = (sdpa, *torch.autograd.grad(sdpa, case.operands(), grad_out))
        chunked = run_chunked(case, grad_out, 32)
        for which, results in enumerate((eager, chunked)):
            for index, (one, other) in enumerate(zip(results, expected, strict=True)):
                errors[which, index] += (one.double() - other).abs().mean()
    ratios = errors[1] / errors[0]
    assert ratios.max() < 1.1, ratios


def test_float32_bias_is_not_narrowed() -> None:
    """``finfo(float32).min`` is ``-inf`` in bfloat16: a row without a key would be 0."""
    fill = torch.zeros(5, 5).masked_fill(torch.ones(5, 5).triu(-1).bool(), torch.finfo().min)
    case = make_case(queries=5, dtype=torch.bfloat16, causal=False, bias=fill)
    out, _ = streambp.attention(*case.operands(), fill, None, False, SCALE, 0.0)
    expected = F.scaled_dot_product_attention(
        *case.operands(), attn_mask=fill, scale=SCALE, enable_gqa=True
    )
    assert expected[:, :, 0].abs().max() > 0
    torch.testing.assert_close(out, expected, rtol=0.0, atol=1e-2)


def test_layouts() -> None:
    case = make_case()
    out, logsumexp = streambp.attention(*case.operands(), None, None, True, SCALE, 0.0)
    assert out.transpose(1, 2).is_contiguous()
    assert logsumexp.dtype == torch.float64
    assert not logsumexp.requires_grad
    # The elements of a row need not be adjacent in memory.
    swapped = [operand.detach().mT.contiguous().mT for operand in case.operands()]
    again, _ = streambp.attention(*swapped, None, None, True, SCALE, 0.0)
    torch.testing.assert_close(again, out, rtol=0.0, atol=1e-12)


def test_opcheck() -> None:
    case = make_case()
    plain = [operand.detach() for operand in case.operands()]
    torch.library.opcheck(
        streambp.attention.default, (*case.operands(), None, None, True, SCALE, 0.0)
    )
    out, logsumexp = streambp.attention(*plain, None, None, True, SCALE, 0.0)
    results = (None, None, out, logsumexp)
    torch.library.opcheck(
        streambp.attention_backward.default, (out, *plain, *results, True, SCALE, 0.0)
    )
    chunk, rest = slice(8, 16), (8, True, SCALE, 0.0)
    torch.library.opcheck(
        streambp.attention_chunk.default, (plain[0][:, :, chunk], *plain[1:], None, None, *rest)
    )
    results = (None, None, out[:, :, chunk], logsumexp[:, :, chunk])
    grads = (torch.zeros_like(plain[1]), torch.zeros_like(plain[2]))
    operands = (out[:, :, chunk], plain[0][:, :, chunk], *plain[1:])
    torch.library.opcheck(
        streambp.attention_chunk_backward.default, (*operands, *results, *grads, *rest)
    )


class TestErrors:
    def test_causal_needs_as_many_queries_as_keys(self) -> None:
        case = make_case(queries=3, keys=5)
        with pytest.raises(ValueError, match="as many queries as keys, got 3 and 5"):
            streambp.attention(*case.operands(), None, None, True, SCALE, 0.0)

    def test_chunk_outside_of_the_sequence(self) -> None:
        case = make_case(queries=5)
        with pytest.raises(ValueError, match=r"rows \[3, 8\) are not in a sequence of 5"):
            streambp.attention_chunk(*case.operands(), None, None, 3, True, SCALE, 0.0)

    def test_dtypes_differ(self) -> None:
        case = make_case(queries=5)
        with pytest.raises(TypeError, match="one dtype"):
            streambp.attention(
                case.query.float(), case.key, case.value, None, None, True, SCALE, 0.0
            )

    def test_heads_are_no_multiple(self) -> None:
        case = make_case(heads=3, key_heads=2)
        with pytest.raises(ValueError, match="multiple of the 2 key heads"):
            streambp.attention(*case.operands(), None, None, True, SCALE, 0.0)

    def test_dropout_without_a_seed(self) -> None:
        case = make_case()
        with pytest.raises(ValueError, match="needs a seed"):
            streambp.attention(*case.operands(), None, None, True, SCALE, 0.5)


class TestDropout:
    SEED = torch.tensor(0x1234567890ABCDE)

    def test_philox_known_answers(self) -> None:
        """From the Random123 distribution (kat_vectors, philox4x32 10)."""
        for words, key, expected in [
            ((0,) * 4, (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
            (
                (0xFFFFFFFF,) * 4,
                (0xFFFFFFFF,) * 2,
                (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
            ),
            (
                (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
                (0xA4093822, 0x299F31D0),
                (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
            ),
        ]:
            counter = tuple(torch.tensor(word) for word in words)
            result = philox4x32(counter, tuple(torch.tensor(word) for word in key))
            assert tuple(word.item() for word in result) == expected

    def test_tiles_are_parts_of_one_mask(self) -> None:
        whole = keep_factors(self.SEED, 2, 3, range(11), range(13), 0.3, torch.float64)
        for rows, keys in [(range(3, 7), range(5, 13)), (range(11), range(1, 2))]:
            tile = keep_factors(self.SEED, 2, 3, rows, keys, 0.3, torch.float64)
            expected = whole[:, :, rows.start : rows.stop, keys.start : keys.stop]
            assert torch.equal(tile, expected)

    def test_distribution(self) -> None:
        factors = keep_factors(self.SEED, 2, 4, range(200), range(200), 0.3, torch.float64)
        kept = (factors > 0).double()
        assert set(factors.unique().tolist()) == {0.0, 1 / 0.7}
        deviation = math.sqrt(0.3 * 0.7)
        assert abs(kept.mean() - 0.7) < 4 * deviation / math.sqrt(kept.numel())
        for dim in range(4):
            others = [other for other in range(4) if other != dim]
            means = kept.mean(others)
            count = kept.numel() / kept.shape[dim]
            assert (means - 0.7).abs().max() < 5 * deviation / math.sqrt(count)
        # Neighbours along each index are independent.
        centred = kept - 0.7
        for dim in range(4):
            size = kept.shape[dim] - 1
            products = centred.narrow(dim, 0, size) * centred.narrow(dim, 1, size)
            assert abs(products.mean()) < 5 * deviation**2 / math.sqrt(products.numel())

    def test_another_seed_is_another_mask(self) -> None:
        one, other = (
            keep_factors(torch.tensor(seed), 1, 1, range(32), range(32), 0.5, torch.float32)
            for seed in (1, 1 + 2**40)
        )
        assert 0.3 < (one == other).double().mean() < 0.7

    @pytest.mark.parametrize("bias", ["none", "left_padding"])
    def test_equals_the_definition_for_every_chunking(self, tiling: int, bias: str) -> None:
        torch.manual_seed(0)
        case = make_case(bias=BIASES[bias](2, 4, 23))
        length, dropout_p = 23, 0.4
        allowed = torch.ones(length, length).tril().bool()
        if case.bias is not None:
            allowed = allowed & case.bias
        repeated = [operand.repeat_interleave(2, 1) for operand in (case.key, case.value)]
        scores = (case.query @ repeated[0].mT * SCALE).masked_fill(~allowed, -math.inf)
        weights = scores.softmax(-1).nan_to_num(0.0)
        factors = keep_factors(
            self.SEED, 2, 4, range(length), range(length), dropout_p, torch.float64
        )
        reference = (weights * factors) @ repeated[1]
        grad_out = torch.randn(reference.shape, dtype=torch.float64)
        expected = (
            reference,
            *(
                gradient.nan_to_num(0.0)
                for gradient in torch.autograd.grad(reference, case.operands(), grad_out)
            ),
        )
        out, _ = streambp.attention(*case.operands(), case.bias, self.SEED, True, SCALE, dropout_p)
        assert_equal((out, *torch.autograd.grad(out, case.operands(), grad_out)), expected, 1e-12)
        for size in SIZES:
            chunked = run_chunked(case, grad_out, size, self.SEED, dropout_p)
            assert_equal(chunked, expected, 1e-12)

    def test_everything_is_dropped(self) -> None:
        case = make_case()
        out, _ = streambp.attention(*case.operands(), None, self.SEED, True, SCALE, 1.0)
        assert torch.equal(out, torch.zeros_like(out))


def test_no_matrix_of_all_scores_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tensor ops stay within their bound of elements at a time."""
    monkeypatch.setattr(attention_engines, "_KEYS", 16)
    monkeypatch.setattr(attention_engines, "_SCORES", 1024)
    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            result = func(*args, **(kwargs or {}))
            if isinstance(result, Tensor):
                largest = max(largest, result.numel())
            return result

    case = make_case(queries=128)
    grad_out = torch.zeros(2, 4, 128, 8, dtype=torch.float64)
    with Watch():
        run_chunked(case, grad_out, 32, TestDropout.SEED, 0.2)
    assert largest <= max(1024, case.query.numel())


class TestCompiled:
    def chunk_program(self):
        def program(grad_out, query, key, value, grad_key, grad_value, at):
            start = at.shape[0]
            chunk = query * 2.0
            out, logsumexp = streambp.attention_chunk(
                chunk, key, value, None, None, start, True, SCALE, 0.0
            )
            grad_query = streambp.attention_chunk_backward(
                grad_out,
                chunk,
                key,
                value,
                None,
                None,
                out,
                logsumexp,
                grad_key,
                grad_value,
                start,
                True,
                SCALE,
                0.0,
            )
            return out + 1.0, grad_query * 2.0

        return program

    def inputs(self, start: int, length: int, whole: int) -> list[Tensor]:
        case = make_case(queries=whole)
        query, key, value = (operand.detach().contiguous() for operand in case.operands())
        chunk = query[:, :, start : start + length].clone()
        gradients = [torch.zeros_like(key), torch.zeros_like(value)]
        return [torch.ones_like(chunk), chunk, key, value, *gradients, torch.empty(start)]

    @pytest.mark.slow
    def test_inductor_with_symbolic_sizes_and_start(self) -> None:
        """Traced once, without a guard on the sizes; the accumulators are written in place."""
        shape_env = ShapeEnv()
        mode = FakeTensorMode(shape_env=shape_env)
        example = self.inputs(5, 6, 19)
        axes = [2, 2, 2, 2, 2, 2, 0]
        fakes = []
        for tensor, axis in zip(example, axes, strict=True):
            sizes = [DimDynamic.STATIC] * tensor.dim()
            sizes[axis] = DimDynamic.DYNAMIC
            context = StatelessSymbolicContext(sizes)
            fakes.append(mode.from_tensor(tensor, symbolic_context=context))
        graph = make_fx(self.chunk_program())(*fakes)
        targets = [node.target for node in graph.graph.nodes]
        assert streambp.attention_chunk_backward.default in targets
        assert not [guard for guard in shape_env.guards if "19" in str(guard.expr)]
        compiled = compile_fx_inner(graph, fakes)
        for start, length, whole in [(5, 6, 19), (0, 7, 30), (11, 3, 14)]:
            real = self.inputs(start, length, whole)
            expected_inputs = [tensor.clone() for tensor in real]
            expected = self.chunk_program()(*expected_inputs)
            results = compiled(list(real))
            assert_equal(tuple(results[-2:]), expected, 1e-12)
            assert real[4].abs().max() > 0
            assert_equal(tuple(real[4:6]), tuple(expected_inputs[4:6]), 1e-12)


@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
@pytest.mark.parametrize("biased", [True, False])
def test_rules(biased: bool, dropout_p: float) -> None:
    bias = torch.rand(2, 1, 23, 23) > 0.3 if biased else None
    case = make_case(bias=bias)
    plain = [operand.detach() for operand in case.operands()]
    seed = TestDropout.SEED if dropout_p else None
    constants = (True, SCALE, dropout_p)

    def program(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        out, logsumexp = streambp.attention(query, key, value, bias, seed, *constants)
        return streambp.attention_backward(
            out, query, key, value, bias, seed, out, logsumexp, *constants
        )

    graph = make_fx(program)(*plain).graph
    attentions = [node for node in graph.nodes if "attention" in node.name]
    assert len(attentions) == 2
    for node in attentions:
        call = call_of(node)
        rule = rule_for(node.target)
        assert rule is not None
        spec = rule(call)
        assert spec is not None
        check_spec(call, spec)
        assert spec.local_letters() == ([] if dropout_p else ["query0"])
