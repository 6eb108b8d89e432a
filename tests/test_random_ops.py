"""Random numbers that are a function of a seed and a position, and the pass that makes them so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.fx import GraphModule

from streambp_fx._torch import (
    aot_autograd,
    aot_function,
    default_partition,
    make_boxed_func,
    select_decomp_table,
)
from streambp_fx.ops.philox import _philox, uniform, uniform_decomposition
from streambp_fx.passes.random_ops import is_seed, replay_random_ops
from streambp_fx.passes.rules import call_of, check_spec
from streambp_fx.passes.rules.random import uniform_spec
from streambp_fx.passes.rules.spec import Chunk

aten = torch.ops.aten
SEED = torch.tensor(0x1234_5678_9ABC_DEF0)


def _word(value: int) -> Tensor:
    return torch.tensor(value, dtype=torch.int64)


# Known answers of philox4x32-10 published with Random123: counter, key, result.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
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
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_hash_gives_the_published_answers(counter: Any, key: Any, expected: Any) -> None:
    words = _philox(tuple(map(_word, counter)), tuple(map(_word, key)))  # type: ignore[arg-type]
    assert tuple(int(word) for word in words) == expected


@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=6),
    st.integers(0, 2**62 - 1),
    st.data(),
)
def test_every_part_is_the_same_part_of_the_whole(size: list[int], seed: int, data: Any) -> None:
    whole = uniform(_word(seed), size, [0] * len(size), torch.float32)
    starts = [data.draw(st.integers(0, length - 1)) for length in size]
    ends = [data.draw(st.integers(a + 1, b)) for a, b in zip(starts, size, strict=True)]
    lengths = [end - start for start, end in zip(starts, ends, strict=True)]
    part = uniform(_word(seed), lengths, starts, torch.float32)
    index = tuple(slice(start, end) for start, end in zip(starts, ends, strict=True))
    assert torch.equal(part, whole[index])


@pytest.mark.parametrize(
    ("dtype", "digits"),
    [(torch.float16, 11), (torch.bfloat16, 8), (torch.float32, 24), (torch.float64, 53)],
)
def test_distribution_and_resolution(dtype: torch.dtype, digits: int) -> None:
    numbers = uniform(SEED, [4, 25, 50, 40], [0, 7, 0, 0], dtype)
    assert numbers.dtype is dtype
    exact = numbers.double().flatten()
    assert exact.min() >= 0 and exact.max() < 1
    scaled = exact * 2.0**digits
    assert torch.equal(scaled, scaled.round())
    assert (scaled.remainder(2) == 1).any()  # the last digit is used
    # Kolmogorov-Smirnov at a level of 1e-6, and the grid's own step.
    steps = torch.arange(1, exact.numel() + 1) / exact.numel()
    distance = (exact.sort().values - steps).abs().max()
    assert distance < 2.7 / exact.numel() ** 0.5 + 2.0**-digits


@pytest.mark.parametrize("dim", range(5))
def test_neighbours_along_each_dim_are_uncorrelated(dim: int) -> None:
    numbers = uniform(SEED, [8, 8, 8, 8, 9], [0] * 5, torch.float64) - 0.5
    length = numbers.shape[dim]
    product = numbers.narrow(dim, 0, length - 1) * numbers.narrow(dim, 1, length - 1)
    assert product.mean().abs() < 5 / (12 * product.numel() ** 0.5)
    assert not torch.equal(numbers.narrow(dim, 0, 1), numbers.narrow(dim, 1, 1))


def test_seeds_give_unrelated_numbers() -> None:
    one, other = (uniform(_word(s), [4096], [0], torch.float64) - 0.5 for s in (5, 5 + 2**33))
    assert (one * other).mean().abs() < 5 / (12 * 4096**0.5)


def test_wrong_operands_are_refused() -> None:
    with pytest.raises(ValueError, match="0-d int64 seed"):
        uniform(torch.zeros(2, dtype=torch.int64), [3], [0], torch.float32)
    with pytest.raises(ValueError, match="one offset for each dim"):
        uniform(SEED, [3, 4], [0], torch.float32)
    with pytest.raises(ValueError, match=r"no numbers of torch\.int32"):
        uniform(SEED, [3], [0], torch.int32)


def test_op_and_its_decomposition_pass_opcheck() -> None:
    torch.library.opcheck(uniform, (SEED, [3, 4], [0, 2], torch.float32))


def test_compiled_decomposition_is_bitwise_the_op() -> None:
    def draw(seed: Tensor, like: Tensor, start: int) -> Tensor:
        return uniform_decomposition(seed, like.shape, [0, start], torch.float32)

    compiled = torch.compile(draw, dynamic=True)
    for length, start in ((37, 0), (64, 5)):
        like = torch.empty(3, length)
        assert torch.equal(
            compiled(SEED, like, start), uniform(SEED, [3, length], [0, start], torch.float32)
        )


# -- the pass ---------------------------------------------------------------------------------


class Joint:
    """A function compiled with the pass applied to its joint graph."""

    def __init__(self, function: Callable[..., Any], decompositions: Any = None) -> None:
        self.graphs: list[GraphModule] = []
        self.left: list[tuple[Any, str]] = []

        def partition(joint: GraphModule, inputs: Any, **settings: Any) -> Any:
            self.left += replay_random_ops(joint)
            self.graphs.append(joint)
            return default_partition(joint, inputs, **settings)

        def compiler(gm: GraphModule, example_inputs: Any) -> Any:
            return make_boxed_func(gm.forward)

        self.call = aot_function(
            function,
            fw_compiler=compiler,
            bw_compiler=compiler,
            partition_fn=partition,
            decompositions=select_decomp_table() if decompositions is None else decompositions,
        )

    def targets(self) -> set[Any]:
        return {node.target for graph in self.graphs for node in graph.graph.nodes}


def _random_nodes(joint: Joint) -> list[Any]:
    return [
        node
        for graph in joint.graphs
        for node in graph.graph.nodes
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
        and not is_seed(node)
    ]


N = 200_000
UNIFORM_STD = 12**-0.5

# What is drawn, and the mean and standard deviation of it where x is 1.
DRAWS: dict[str, tuple[Callable[[Tensor], Tensor], float, float]] = {
    "dropout": (lambda x: F.dropout(x, 0.1), 1.0, (0.1 / 0.9) ** 0.5),
    "dropout_p1": (lambda x: F.dropout(x, 1.0), 0.0, 0.0),
    "feature_dropout": (lambda x: F.dropout1d(x.reshape(1, -1, 1), 0.2).flatten(), 1.0, 0.5),
    "bernoulli_p": (lambda x: x * torch.empty_like(x).bernoulli_(0.3), 0.3, 0.21**0.5),
    "bernoulli": (lambda x: x * torch.bernoulli(x.detach() * 0.2), 0.2, 0.4),
    "rand": (lambda x: x * torch.rand(x.shape), 0.5, UNIFORM_STD),
    "rand_like": (lambda x: x * torch.rand_like(x), 0.5, UNIFORM_STD),
    "uniform": (lambda x: x * torch.empty_like(x).uniform_(-1, 3), 1.0, 4 * UNIFORM_STD),
    "randn": (lambda x: x * torch.randn_like(x), 0.0, 1.0),
    "normal": (lambda x: x * torch.empty_like(x).normal_(2, 3), 2.0, 3.0),
    "normal_of": (lambda x: torch.normal(x.detach(), 2.0) * x, 1.0, 2.0),
    "exponential": (lambda x: x * torch.empty_like(x).exponential_(2.0), 0.5, 0.5),
    "randint": (lambda x: x * torch.randint(3, 9, x.shape), 5.5, (35 / 12) ** 0.5),
    "rrelu": (lambda x: F.rrelu(-x, 0.0, 1.0, training=True), -0.5, UNIFORM_STD),
}


# Their aten ops always decompose under Inductor, and the pass does not know them.
ONLY_DECOMPOSED = {"normal_of", "rrelu"}


@pytest.mark.parametrize(
    ("name", "decomposed"),
    [(name, True) for name in DRAWS]
    + [(name, False) for name in DRAWS if name not in ONLY_DECOMPOSED],
)
def test_moments_of_each_draw(name: str, decomposed: bool) -> None:
    function, mean, std = DRAWS[name]
    joint = Joint(function, None if decomposed else {})
    x = torch.ones(N, requires_grad=True)
    torch.manual_seed(0)
    y = joint.call(x)
    if (name, decomposed) != ("dropout_p1", True):  # decomposes into zeros, without a draw
        assert uniform in joint.targets()
    assert joint.left == [] and _random_nodes(joint) == []
    assert abs(float(y.detach().mean()) - mean) <= 5 * std / N**0.5
    assert abs(float(y.detach().std()) - std) <= 0.02 * std


@pytest.mark.parametrize("name", DRAWS)
def test_each_step_draws_anew_and_the_generator_reproduces_it(name: str) -> None:
    joint = Joint(DRAWS[name][0])
    x = torch.ones(64, 3, requires_grad=True)
    torch.manual_seed(3)
    first, second = joint.call(x), joint.call(x)
    torch.manual_seed(3)
    again = joint.call(x)
    assert torch.equal(first, again)
    assert name == "dropout_p1" or not torch.equal(first, second)
    assert len(joint.graphs) == 1


def test_gradient_of_dropout_uses_the_mask_of_forward() -> None:
    joint = Joint(lambda x: F.dropout(x * x, 0.4))
    x = torch.linspace(1, 2, 500, dtype=torch.float64, requires_grad=True)
    y = joint.call(x)
    (gradient,) = torch.autograd.grad(y, x, torch.ones_like(y))
    kept = (y != 0).double() / 0.6
    assert 0 < kept.count_nonzero() < 500
    torch.testing.assert_close(y, x * x * kept)
    torch.testing.assert_close(gradient, 2 * x * kept)


def test_two_dropouts_have_two_masks() -> None:
    joint = Joint(lambda x: (F.dropout(x, 0.5), F.dropout(x, 0.5)))
    one, other = joint.call(torch.ones(256, requires_grad=True))
    assert not torch.equal(one, other)
    assert sum(is_seed(node) for node in joint.graphs[0].graph.nodes) == 2


def test_dropout_of_narrow_dtypes_drops_the_rate() -> None:
    joint = Joint(lambda x: F.dropout(x, 0.1))
    y = joint.call(torch.ones(N, dtype=torch.bfloat16, requires_grad=True))
    dropped = float((y == 0).float().mean())
    assert abs(dropped - 0.1) < 5 * (0.09 / N) ** 0.5


def test_seeds_come_first_and_a_seed_in_the_graph_stays() -> None:
    def function(x: Tensor) -> Tensor:
        seed = torch.randint(0, 2**62, (), dtype=torch.int64)
        return F.dropout(x.exp(), 0.5) + (seed % 2)

    joint = Joint(function)
    joint.call(torch.ones(8, requires_grad=True))
    nodes = [node for node in joint.graphs[0].graph.nodes if node.op == "call_function"]
    assert is_seed(nodes[0])
    assert sum(map(is_seed, nodes)) == 2
    assert joint.left == []


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x: x[torch.randperm(x.shape[0])], "no pointwise function"),
        (lambda x: x * torch.poisson(x.detach()), "no pointwise function"),
        (lambda x: x * torch.randint(0, 2**60, x.shape), "range"),
        (lambda x: x.t() * torch.rand_like(x.t()), "permuted"),
    ],
    ids=["randperm", "poisson", "randint", "permuted"],
)
def test_what_stays_is_reported(function: Callable[[Tensor], Tensor], reason: str) -> None:
    joint = Joint(function, {})
    joint.call(torch.ones(6, 4, requires_grad=True))
    (left,) = joint.left
    assert reason in left[1] and left[0] in _random_nodes(joint)


def test_dropout_that_is_switched_off_is_not_random() -> None:
    joint = Joint(lambda x: torch.native_dropout(x, 0.5, False)[0], {})
    x = torch.ones(6, requires_grad=True)
    assert torch.equal(joint.call(x), x)
    assert joint.left == [] and uniform not in joint.targets()


def test_symbolic_sizes_add_no_guard() -> None:
    seen: list[tuple[int, int]] = []

    def backend(gm: GraphModule, inputs: Any) -> Any:
        def partition(joint: GraphModule, joint_inputs: Any, **settings: Any) -> Any:
            sizes = [i.node.shape_env for i in inputs if isinstance(i, torch.SymInt)]
            before = len(sizes[0].guards)
            assert replay_random_ops(joint) == []
            seen.append((before, len(sizes[0].guards)))
            return default_partition(joint, joint_inputs, **settings)

        def compiler(gm: GraphModule, example_inputs: Any) -> Any:
            return make_boxed_func(gm.forward)

        return aot_autograd(
            fw_compiler=compiler,
            bw_compiler=compiler,
            partition_fn=partition,
            decompositions=select_decomp_table(),
        )(gm, inputs)

    def function(x: Tensor) -> Tensor:
        return F.dropout(x, 0.5) * F.rrelu(x - 1, training=True) + torch.randn_like(x)

    compiled = torch.compile(function, backend=backend, dynamic=True)
    for rows in (5, 9):
        compiled(torch.rand(rows, 7, requires_grad=True)).sum().backward()
    assert len(seen) == 1 and seen[0][0] == seen[0][1]


# -- the rule ---------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [1, 2, 7, 20])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_rule_resizes_the_chunk_of_the_whole(dim: int, chunk: int) -> None:
    graph = torch.fx.Graph()
    seed = graph.placeholder("seed")
    seed.meta["val"] = SEED
    size, offset = [20, 1 if dim == 0 else 20, 20], [0, 3, 0]
    node = graph.call_function(uniform, (seed, size, offset, torch.float32))
    node.meta["val"] = whole = uniform(SEED, size, offset, torch.float32)
    spec = uniform_spec(call_of(node))
    assert spec is not None and spec.resize is not None and spec.outputs[0] is not None
    check_spec(call_of(node), spec)
    (letter,) = spec.outputs[0][dim]
    parts = []
    for start in range(0, 20, chunk):
        length = min(chunk, 20 - start)
        shape = tuple(length if i == dim else s for i, s in enumerate(size))
        changes = spec.resize([shape], Chunk(letter, start, length))
        parts.append(uniform(SEED, changes["size"], changes["offset"], torch.float32))
    assert torch.equal(torch.cat(parts, dim), whole)
