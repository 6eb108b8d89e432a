"""Op rules: what each family says of its letters."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import StatelessSymbolicContext

from streambp_fx._torch import DimDynamic, FakeTensorMode, ShapeEnv
from streambp_fx.passes.rules import (
    Call,
    Chunk,
    Spec,
    call_of,
    check_spec,
    einsum_spec,
    rule_for,
)
from streambp_fx.passes.rules.arguments import outputs_in, tensors_in
from streambp_fx.passes.rules.chunked import difference, ragged, record_call
from streambp_fx.passes.rules.sizes import exact_quotient, same_size

aten = torch.ops.aten
prims = torch.ops.prims


def spec_of(call: Call) -> Spec:
    rule = rule_for(call.target)
    assert rule is not None
    spec = rule(call)
    assert spec is not None
    check_spec(call, spec)
    return spec


def rand(*shape: int) -> torch.Tensor:
    return torch.rand(*shape, dtype=torch.float64)


# --- what the families say ---


def test_broadcast_dims_of_size_one_have_no_letter() -> None:
    spec = spec_of(record_call(aten.add.Tensor, rand(2, 5, 6), rand(5, 1)))
    assert spec.outputs == ((("d0",), ("d1",), ("d2",)),)
    assert spec.inputs == ((("d0",), ("d1",), ("d2",)), (("d1",), ()))
    assert spec.local_letters() == ["d0", "d1", "d2"]


@pytest.mark.parametrize(
    ("before", "after", "shared"),
    [
        ((2, 5, 6), (10, 6), [2, 5, 6]),
        ((10, 6), (2, 5, 3, 2), [2, 5, 3, 2]),
        ((2, 5, 6), (60,), [2, 5, 6]),
        ((4, 9), (6, 6), []),
        ((3, 5, 2), (5, 6), [2]),  # 3 x 5 -> 5 x 3 mixes, the innermost 2 stays
        ((7, 2, 3), (7, 3, 2), [7]),
        ((1, 5, 1, 4), (5, 4, 1), [5, 4]),
        ((1,), (), []),
    ],
)
def test_a_view_shares_the_factors_that_both_shapes_have(
    before: tuple[int, ...], after: tuple[int, ...], shared: list[int]
) -> None:
    spec = spec_of(record_call(aten.view.default, rand(*before), list(after)))
    assert sorted(spec.sizes[letter] for letter in spec.local_letters()) == sorted(shared)


def test_a_view_of_nothing_has_no_spec() -> None:
    call = record_call(aten.view.default, rand(0, 4), [4, 0])
    rule = rule_for(call.target)
    assert rule is not None
    assert rule(call) is None


@given(data=st.data())
def test_any_regrouping_of_factors_is_local_in_every_factor(data: st.DataObject) -> None:
    factors = data.draw(st.lists(st.sampled_from([1, 2, 3, 5]), min_size=1, max_size=4))

    def grouped() -> list[int]:
        shape = [1]
        for factor in factors:
            if data.draw(st.booleans()):
                shape.append(factor)
            else:
                shape[-1] *= factor
        return shape

    before, after = grouped(), grouped()
    call = record_call(aten.view.default, rand(*before), after)
    spec = spec_of(call)
    for letter in spec.local_letters():
        assert difference(call, spec, letter, ragged(int(spec.sizes[letter]))) is None
    if before == after:
        assert not spec.whole


def test_a_product_is_a_sum_over_chunks_of_its_contracted_letter() -> None:
    spec = spec_of(record_call(aten.mm.default, rand(5, 4), rand(4, 6)))
    assert (spec.sums, spec.whole) == ({"k"}, frozenset())
    assert spec.local_letters() == ["m", "n"]


@pytest.mark.parametrize(
    ("target", "rest"),
    [
        (aten.addmm.default, lambda: (rand(7, 5), rand(5, 4))),
        (aten.index_add.default, lambda: (0, torch.arange(5), rand(5, 4))),
        (aten.index_put.default, lambda: ([torch.arange(5)], rand(5, 4), True)),
        (aten.scatter_add.default, lambda: (0, torch.zeros(5, 4).long(), rand(5, 4))),
    ],
)
def test_adding_onto_a_base_is_a_sum_only_if_the_base_is_known_to_be_zero(
    target: Any, rest: Any
) -> None:
    base = torch.zeros(7, 4, dtype=torch.float64)
    unknown = spec_of(record_call(target, base, *rest()))
    assert not unknown.sums
    known = spec_of(record_call(target, base, *rest(), constant={0: 0.0}))
    assert [known.sizes[letter] for letter in known.sums] == [5]
    assert spec_of(record_call(target, base, *rest(), constant={0: 1.0})).sums == frozenset()


def test_overwriting_is_never_a_sum() -> None:
    call = record_call(
        aten.index_put.default, rand(7, 4) * 0, [torch.arange(5)], rand(5, 4), constant={0: 0.0}
    )
    assert not spec_of(call).sums


def test_a_sum_adds_and_a_mean_does_not() -> None:
    total = spec_of(record_call(aten.sum.dim_IntList, rand(2, 5, 6), [0, 1]))
    mean = spec_of(record_call(aten.mean.dim, rand(2, 5, 6), [0, 1]))
    assert (total.sums, total.whole) == ({"d0", "d1"}, frozenset())
    assert (mean.sums, mean.whole) == (frozenset(), {"d0", "d1"})
    assert total.local_letters() == mean.local_letters() == ["d2"]


@pytest.mark.parametrize(
    ("call", "local"),
    [
        (lambda: record_call(aten.cumsum.default, rand(2, 5, 6), 1), [2, 6]),
        (lambda: record_call(aten.topk.default, rand(5, 6), 2), [5]),
        (lambda: record_call(aten._softmax.default, rand(2, 5, 6), -1, False), [2, 5]),
        (lambda: record_call(prims.rev.default, rand(2, 5, 6), [1]), [2, 6]),
        (lambda: record_call(aten.argmax.default, rand(2, 5)), []),
        (lambda: record_call(aten.slice.Tensor, rand(2, 5, 6), 1, 1, 5), [2, 6]),
        (lambda: record_call(aten.slice.Tensor, rand(2, 5, 6), 1, 0, 9), [2, 5, 6]),
        (lambda: record_call(aten.constant_pad_nd.default, rand(2, 5), [1, -1]), [2]),
        (lambda: record_call(aten.constant_pad_nd.default, rand(2, 5), [0, 0]), [2, 5]),
        (lambda: record_call(aten.cat.default, [rand(2, 5), rand(3, 5)]), [5]),
        (lambda: record_call(aten.cat.default, [rand(2, 5), rand(2, 5)], 1), [2, 5]),
        (lambda: record_call(aten.unbind.int, rand(2, 5, 6)), [5, 6]),
        (lambda: record_call(aten.squeeze.dim, rand(2, 5), 1), [2]),
        (lambda: record_call(aten.squeeze.dim, rand(5, 1), 1), [5]),
        (lambda: record_call(aten.gather.default, rand(5, 6), 1, torch.zeros(5, 3).long()), [5, 3]),
        (lambda: record_call(aten.gather.default, rand(6, 7), 1, torch.zeros(5, 3).long()), [3]),
        (
            lambda: record_call(aten.embedding.default, rand(7, 4), torch.zeros(2, 5).long()),
            [2, 5, 4],
        ),
    ],
)
def test_the_letters_that_an_op_works_along_are_whole(call: Any, local: list[int]) -> None:
    spec = spec_of(call())
    assert [spec.sizes[letter] for letter in spec.local_letters()] == local


def test_boolean_indices_have_no_spec() -> None:
    call = record_call(aten.index.Tensor, rand(5, 6), [rand(5) > 0.5])
    rule = rule_for(call.target)
    assert rule is not None
    assert rule(call) is None


def test_einsum_spec_is_for_users_with_ops_of_their_own() -> None:
    call = dataclasses.replace(
        record_call(aten.bmm.default, rand(2, 5, 4), rand(2, 4, 6)), target="mine"
    )
    spec = einsum_spec("bmk,bkn->bmn", call)
    assert spec is not None
    assert spec.local_letters() == ["b", "m", "n"]


# --- literal sizes ---


def test_iota_moves_its_start() -> None:
    call = record_call(
        prims.iota.default, 7, start=2, step=3, dtype=torch.int64, device="cpu", requires_grad=False
    )
    spec = spec_of(call)
    assert spec.resize is not None
    assert spec.resize([(3,)], Chunk("i", 4, 3)) == {"length": 3, "start": 14}


def test_view_takes_the_sizes_of_its_output() -> None:
    call = record_call(aten.view.default, rand(10, 6), [2, -1, 6])
    spec = spec_of(call)
    assert spec.resize is not None
    assert spec.resize([(2, 3, 6)], Chunk("f1", 0, 3)) == {"size": [2, 3, 6]}


# --- consistency ---


def good() -> tuple[Call, Spec]:
    call = record_call(aten.mm.default, rand(5, 4), rand(4, 6))
    return call, spec_of(call)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"inputs": ()}, "0 inputs for 2 tensors"),
        ({"outputs": ()}, "0 outputs for 1"),
        ({"outputs": (None,)}, "output 0 is a tensor in one of"),
        ({"sizes": {"m": 5, "k": 4, "n": 7}}, r"input 1 of shape \(4, 6\) .* in dim 1"),
        ({"sizes": {"m": 5, "k": 4}}, "without a size: .*n"),
        ({"sums": frozenset()}, "'k'.* in inputs alone"),
        ({"whole": frozenset("k")}, "'k'.* both whole and summed"),
        ({"sums": frozenset("km")}, "'m'.* summed but in an output"),
        ({"whole": frozenset("x")}, "'x'.* in no tensor"),
        ({"outputs": ((("m",), ("n",), ()),)}, "has 3 dims in the spec"),
        ({"inputs": ((("m",), ("m",)), (("k",), ("n",)))}, "has a letter twice"),
    ],
)
def test_check_spec_names_what_is_inconsistent(changes: dict[str, Any], message: str) -> None:
    call, spec = good()
    check_spec(call, spec)
    with pytest.raises(ValueError, match=rf"rule of aten\.mm\.default .*{message}"):
        check_spec(call, dataclasses.replace(spec, **changes))


def test_check_spec_wants_local_letters_in_all_outputs() -> None:
    call = record_call(aten.unbind.int, rand(2, 5))
    dims = (("a",), ("b",))
    spec = Spec((dims,), ((("b",),), ((),)), {"a": 2, "b": 5}, whole=frozenset("a"))
    with pytest.raises(ValueError, match="dim 0"):
        check_spec(call, spec)
    call = dataclasses.replace(call, outputs=(rand(5), rand(1)))
    with pytest.raises(ValueError, match="'b' is local, but one of the outputs lacks it"):
        check_spec(call, spec)


# --- graphs and symbolic sizes ---


def test_call_of_reads_metadata_and_knows_constant_tensors() -> None:
    def put(values: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        base = torch.zeros(7, 4).expand(7, 4).clone()
        return aten.index_put(base, [places], values, True)

    graph = make_fx(put, tracing_mode="fake")(torch.rand(5, 4), torch.arange(5)).graph
    (node,) = [node for node in graph.nodes if node.target is aten.index_put.default]
    call = call_of(node)
    assert [tuple(tensor.shape) for tensor in call.tensors] == [(7, 4), (5,), (5, 4)]
    assert call.constant == {0: 0.0}
    assert [call.outputs[0].shape] == [torch.Size([7, 4])]
    del node.args[2].meta["val"]
    with pytest.raises(ValueError, match=r"%values.* has no meta\['val'\]"):
        call_of(node)


@pytest.fixture
def symbolic() -> Iterator[tuple[torch.Tensor, ShapeEnv]]:
    """A fake ``[2, T, 12]`` with symbolic T."""
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    dynamic = [DimDynamic.STATIC, DimDynamic.DYNAMIC, DimDynamic.STATIC]
    context = StatelessSymbolicContext(dynamic_sizes=dynamic)
    tensor = mode.from_tensor(torch.rand(2, 10, 12), symbolic_context=context)
    with mode:
        yield tensor, env


def fake_call(target: Any, *args: Any) -> Call:
    return Call(target, args, {}, tensors_in(args, {}), outputs_in(target(*args)))


def test_symbolic_sizes_give_the_letters_of_static_ones_and_no_guard(
    symbolic: tuple[torch.Tensor, ShapeEnv],
) -> None:
    tensor, env = symbolic
    length = tensor.shape[1]
    calls = [
        fake_call(aten.view.default, tensor, [2 * length, 12]),
        fake_call(aten.view.default, tensor, [2, length, 3, 4]),
        fake_call(aten.view.default, tensor, [24 * length]),
        fake_call(aten.add.Tensor, tensor, tensor[:, :, :1]),
        fake_call(aten.slice.Tensor, tensor, 1, 0, length),
        fake_call(aten.slice.Tensor, tensor, 1, 1, length),
        fake_call(aten.new_zeros.default, tensor, [2, length]),
        fake_call(aten.sum.dim_IntList, tensor, [1]),
        fake_call(aten.cat.default, [tensor, tensor], 1),
        fake_call(aten.full.default, [length, 3], 0.0),
    ]
    guards, frozen = len(env.guards), env.replacements.copy()
    for call in calls:
        symbolic_spec = spec_of(call)
        static = Call(
            call.target,
            call.args,
            call.kwargs,
            tuple(torch.empty(concrete(tensor)) for tensor in call.tensors),
            tuple(torch.empty(concrete(output)) for output in call.outputs if output is not None),
        )
        # Arguments hold symbolic sizes still, which rules compare with the static ones.
        if call.target is not aten.slice.Tensor and call.target is not aten.cat.default:
            static_spec = rule_for(call.target)(static)  # type: ignore[misc]
            assert static_spec is not None
            assert symbolic_spec.inputs == static_spec.inputs
            assert symbolic_spec.outputs == static_spec.outputs
            assert symbolic_spec.whole == static_spec.whole
    assert len(env.guards) == guards
    assert env.replacements == frozen


def concrete(tensor: torch.Tensor) -> tuple[int, ...]:
    return tuple(
        size.node.hint if isinstance(size, torch.SymInt) else size for size in tensor.shape
    )


def test_symbolic_quotients_are_exact_or_none(symbolic: tuple[torch.Tensor, ShapeEnv]) -> None:
    tensor, env = symbolic
    length, guards = tensor.shape[1], len(env.guards)
    assert exact_quotient(24 * length, length) == 24
    assert same_size(exact_quotient(24 * length, 12) or 0, 2 * length)
    assert exact_quotient(length, 2) is None
    assert exact_quotient(12, length) is None
    assert exact_quotient(length + 1, length) is None
    assert exact_quotient(7, 2) is None
    assert exact_quotient(6, 2) == 3
    assert len(env.guards) == guards
