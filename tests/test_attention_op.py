"""``streambp::attention`` and its chunked forms against SDPA."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._inductor.compile_fx import compile_fx_inner
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

import streambp_fx.passes.rules.attention  # noqa: F401  (registers the rules)
from streambp_fx.ops import attention_engines
from streambp_fx.passes.rules import call_of, check_spec, rule_for

from .attention_cases import (
    BIASES,
    SCALE,
    SIZES,
    TILINGS,
    Case,
    assert_equal,
    check_against_sdpa,
    make_case,
    run_chunked,
    set_tiling,
)

streambp = torch.ops.streambp


@pytest.fixture(params=TILINGS, ids=["one_tile", "many_tiles"])
def tiling(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    set_tiling(monkeypatch, request.param)


@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("batch", "heads", "key_heads"), [(1, 4, 4), (2, 4, 2), (3, 3, 1)])
def test_equals_sdpa(
    tiling: None, batch: int, heads: int, key_heads: int, causal: bool, bias: str
) -> None:
    torch.manual_seed(0)
    made = BIASES[bias](batch, heads, 23)
    case = make_case(batch, heads, key_heads, bias=made, causal=causal)
    check_against_sdpa(case, SIZES)


def test_equals_sdpa_where_queries_and_keys_differ_in_number(tiling: None) -> None:
    torch.manual_seed(0)
    check_against_sdpa(make_case(queries=7, keys=23, causal=False), (7, 3))
    bias = torch.rand(7, 23) > 0.3
    check_against_sdpa(make_case(queries=7, keys=23, causal=False, bias=bias), (7, 3))


@pytest.mark.parametrize(("size", "value_size"), [(8, 5), (7, 7), (3, 16)])
def test_head_sizes_that_kernels_refuse(tiling: None, size: int, value_size: int) -> None:
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
    seed = torch.tensor(7) if dropout_p else None
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
