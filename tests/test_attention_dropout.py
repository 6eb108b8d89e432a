"""Dropout of the attention op: a mask that no chunking changes."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from streambp_fx.ops import attention_engines
from streambp_fx.ops.attention_dropout import keep_factors, philox4x32

from .attention_cases import (
    BIASES,
    SCALE,
    SIZES,
    TILINGS,
    assert_equal,
    make_case,
    run_chunked,
    set_tiling,
)

streambp = torch.ops.streambp


@pytest.fixture(params=TILINGS, ids=["one_tile", "many_tiles"])
def tiling(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    set_tiling(monkeypatch, request.param)


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
    def test_equals_the_definition_for_every_chunking(self, tiling: None, bias: str) -> None:
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
