"""What a step keeps in memory, and how exact its gradients are, as sequences are cut finer.

    python -m benchmarks.memory_by_chunks
    python -m benchmarks.memory_by_chunks --tokens 4096 --chunks 1 --chunks 16

At a fixed length, layers and head in 1, 2, 4 ... 64 chunks: each buffer by name as the memory model
has it, the peak that it predicts beside the measured one, and the error of the gradients against
fp64 beside that of other orders of the same additions. The model is the reference benchmark's, at
half the width. A run of all that writes benchmarks/results/memory_by_chunks.json, another one the
file that ``--name`` says, if any.
"""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from streambp_fx._torch import TorchDispatchMode
from streambp_fx.demo import Gradients, allocate_gradients, build_model, gradients_of, training_step
from streambp_fx.explaining.body_memory import CompiledWorkspace, eager_workspace
from streambp_fx.explaining.step_memory import Moment, StepMemory
from streambp_fx.explaining.terms import Term, body_of
from streambp_fx.explaining.trace import Traced
from streambp_fx.measure import Quartiles, gradient_error, memory_use
from streambp_fx.options import parse_options
from streambp_fx.passes.body import Ref
from streambp_fx.passes.loops import StreamLoop
from streambp_fx.passes.pipeline import History

from .machine import commit, describe

RESULTS = Path(__file__).parent / "results"
WHOLE = "memory_by_chunks"
TOKENS = 2048
LAYERS, WIDTH, VOCABULARY, HEADS = 4, 256, 8192, 4
CHUNKS = (1, 2, 4, 8, 16, 32, 64)
ORDERS = 5
KEYS = ("error", "from_eager")
MIB = 2**20

aten = torch.ops.aten
_ROLES = {
    torch.ops.streambp.attention_chunk.default: {1: "K", 2: "V"},
    torch.ops.streambp.attention_chunk_backward.default: {2: "K", 3: "V", 8: "dK", 9: "dV"},
}
"""Which buffer each argument of the attention ops is."""
NAMES = {
    Term.LAYER_INPUTS: "layer inputs H_in",
    Term.RESIDUAL_GRADIENT: "residual gradient",
    Term.PARAMETER_GRADIENTS: "gradients of weights",
    Term.CHUNK: "chunk workspace",
    Term.HEAD: "head workspace",
}
RESIDENT = ("layer inputs H_in", "residual gradient", "K", "V", "dK", "dV", "gradients of weights")
WORKSPACES = ("chunk workspace", "head workspace")


@dataclass(frozen=True)
class Exactness:
    """The worst parameter's relative difference from eager in fp64, and from eager in fp32."""

    error: float
    from_eager: float


@dataclass(frozen=True)
class Row:
    """One number of chunks.

    buffers
        Bytes by name, each at the moment when there are most of it.
    predicted, measured
        Peak bytes above the step's start, gradients allocated.
    streamed, regrouped
        How the gradients of the streamed step come out, and those of eager with its sums over
        tokens cut into as many parts.
    """

    chunks: int
    chunk_size: int
    buffers: Mapping[str, int]
    predicted: int
    measured: int
    streamed: Exactness
    regrouped: Exactness


class Regrouped(TorchDispatchMode):
    """Computes sums over tokens, in matrix products and alone, from sums over some of the tokens.

    Args:
        tokens: the number of tokens, by which such sums are told.
        parts: how many groups of neighbouring tokens; they are added from the last to the first,
            as a streamed backward adds them.
        order: takes the tokens in this order before they are grouped.
    """

    def __init__(self, tokens: int, parts: int, order: torch.Tensor | None = None) -> None:
        super().__init__()
        self.tokens, self.parts, self.order = tokens, parts, order
        self.met = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is aten.mm.default and args[0].shape[1] == self.tokens:
            return self._sum(torch.mm, [(args[0], 1), (args[1], 0)])
        if func is aten.sum.dim_IntList:
            values, dims, *rest = args
            for dim in dims:
                if values.shape[dim] == self.tokens:
                    return self._sum(
                        lambda part: func(part, dims, *rest, **kwargs), [(values, dim)]
                    )
        return func(*args, **kwargs)

    def _sum(
        self, sum_of: Callable[..., torch.Tensor], operands: list[tuple[torch.Tensor, int]]
    ) -> torch.Tensor:
        """``sum_of`` operands that hold the tokens in the given dims, from its parts."""
        self.met += 1
        if self.order is not None:
            operands = [(value.index_select(dim, self.order), dim) for value, dim in operands]
        groups = list(
            zip(*(value.tensor_split(self.parts, dim) for value, dim in operands), strict=True)
        )
        total = sum_of(*groups.pop())
        while groups:
            total += sum_of(*groups.pop())
        return total


class Benchmark:
    """The model, its batch and its gradients in fp64."""

    def __init__(self, tokens: int, compile_bodies: bool) -> None:
        self.tokens, self.compile_bodies = tokens, compile_bodies
        generator = torch.Generator().manual_seed(0)
        self.ids = torch.randint(0, VOCABULARY, (1, tokens), generator=generator)
        self.model = build_model(
            layers=LAYERS,
            width=WIDTH,
            vocabulary=VOCABULARY,
            intermediate=3 * WIDTH,
            heads=HEADS,
        )
        exact = copy.deepcopy(self.model).double()
        allocate_gradients(exact)
        training_step(exact, exact, self.ids)()
        self.reference = gradients_of(exact)
        plain = copy.deepcopy(self.model)
        allocate_gradients(plain)
        training_step(plain, plain, self.ids)()
        self.eager = gradients_of(plain)

    def row(self, chunks: int) -> Row:
        """Measure and predict the step in ``chunks`` chunks."""
        size = -(-self.tokens // chunks)
        options: dict[str, Any] = {
            "chunk_size": size,
            "head_chunk_size": size,
            "compile_bodies": self.compile_bodies,
        }
        inputs = {"input_ids": self.ids, "labels": self.ids}
        traced = Traced(self.model, (), inputs, parse_options(options))
        workspace = CompiledWorkspace({}) if self.compile_bodies else eager_workspace
        memory = traced.memory(workspace)

        torch.compiler.reset()
        model = copy.deepcopy(self.model)
        allocate_gradients(model)
        call = torch.compile(model, backend="streambp", options=options)
        step = training_step(model, call, self.ids)
        step()
        return Row(
            chunks,
            size,
            buffers_by_name(traced.captures[0].segments, memory),
            memory.peak.nbytes,
            memory_use(step).peak,
            self._exactness(gradients_of(model)),
            self.reordered(chunks),
        )

    def _exactness(self, gradients: Gradients) -> Exactness:
        return Exactness(
            gradient_error(gradients, self.reference), gradient_error(gradients, self.eager)
        )

    def reordered(self, parts: int, order: torch.Tensor | None = None) -> Exactness:
        """Eager with its sums over tokens in another order.

        Raises:
            RuntimeError: no sum over tokens was met, so that nothing was reordered.
        """
        model = copy.deepcopy(self.model)
        allocate_gradients(model)
        with Regrouped(self.tokens, parts, order) as mode:
            training_step(model, model, self.ids)()
        if not mode.met:
            raise RuntimeError("eager runs no sum over tokens that could be reordered")
        return self._exactness(gradients_of(model))

    def orders(self) -> dict[str, Quartiles]:
        """Eager with its sums over tokens in random orders."""
        generator = torch.Generator().manual_seed(0)
        found = [
            self.reordered(1, torch.randperm(self.tokens, generator=generator))
            for _ in range(ORDERS)
        ]
        return {
            "error": Quartiles.of([one.error for one in found]),
            "from_eager": Quartiles.of([one.from_eager for one in found]),
        }


def buffers_by_name(segments: Sequence[History], memory: StepMemory) -> dict[str, int]:
    """For each buffer that the memory model names, the most bytes that there are of it."""
    roles = {
        name: role
        for history in segments
        for key in ("forward", "backward")
        for name, role in _attention_buffers(history.graphs[key])
    }
    most: Counter[str] = Counter()
    for moment in memory.moments:
        for name, size in _named(moment, roles).items():
            most[name] = max(most[name], size)
    return dict(most)


def _named(moment: Moment, roles: Mapping[str, str]) -> Counter[str]:
    sizes: Counter[str] = Counter()
    for buffer in moment.buffers:
        name = roles.get(buffer.name) or NAMES.get(buffer.term)
        if name is not None:
            sizes[name] += buffer.nbytes
    return sizes


def _attention_buffers(graph_module: torch.fx.GraphModule) -> Iterator[tuple[str, str]]:
    """Names of the values that loops take as keys, values and their gradients, and which."""
    for loop in graph_module.graph.nodes:
        if isinstance(loop.target, StreamLoop):
            for call in body_of(loop).plan.calls:
                for position, role in _ROLES.get(call.target, {}).items():
                    argument = call.args[position]
                    if isinstance(argument, Ref) and argument.kind == "operand":
                        yield loop.args[2 + argument.index].name, role


def verdict(sizes: list[int], chunks: list[int]) -> str:
    """How a buffer falls from the fewest chunks to the most."""
    fall = sizes[0] / max(sizes[-1], 1)
    if fall < 1.05:
        return "stays"
    share = fall / (chunks[-1] / chunks[0])
    return "as 1/D" if share > 0.8 else f"to 1/{fall:.1f}"


def main(
    tokens: Annotated[int, typer.Option(min=2, help="Length of the sequence.")] = TOKENS,
    chunks: Annotated[list[int] | None, typer.Option(min=1, help="Repeatable.")] = None,
    compile_bodies: Annotated[
        bool, typer.Option(help="Compile loop bodies with Inductor, as the backend does.")
    ] = True,
    name: Annotated[
        str | None,
        typer.Option(help=f"Name of the results file; without options, {WHOLE}, else none."),
    ] = None,
) -> None:
    """Measure, and print the tables of docs/memory.md."""
    if name is None and tokens == TOKENS and not chunks and compile_bodies:
        name = WHOLE
    progress = Console(stderr=True)
    made_at = commit()
    benchmark = Benchmark(tokens, compile_bodies)
    counts = sorted(chunks or CHUNKS)
    rows = [
        benchmark.row(count)
        for count in track(counts, description="numbers of chunks", console=progress)
    ]
    report = {
        "machine": describe("cpu"),
        "commit": made_at,
        "model": {"layers": LAYERS, "width": WIDTH, "vocabulary": VOCABULARY, "heads": HEADS},
        "tokens": tokens,
        "compile_bodies": compile_bodies,
        "rows": [asdict(row) for row in rows],
        "eager": asdict(benchmark.reordered(1)),
        "random_orders": {key: asdict(value) for key, value in benchmark.orders().items()},
    }
    if name is not None:
        (RESULTS / f"{name}.json").write_text(json.dumps(report, indent=2) + "\n")
    print_tables(report, Console())


def print_tables(report: dict[str, Any], console: Console) -> None:
    """Memory by name, and exactness, one column a number of chunks."""
    rows = report["rows"]
    counts = [row["chunks"] for row in rows]
    memory = Table(title=f"MiB at {report['tokens']} tokens, by number of chunks D")
    memory.add_column("buffer", no_wrap=True)
    for count in counts:
        memory.add_column(str(count), justify="right")
    memory.add_column("falls", no_wrap=True)
    for name in (*RESIDENT, *WORKSPACES):
        sizes = [row["buffers"].get(name, 0) for row in rows]
        memory.add_row(name, *map(_mib, sizes), verdict(sizes, counts))
    for name in ("predicted", "measured"):
        sizes = [row[name] for row in rows]
        memory.add_row(f"peak, {name}", *map(_mib, sizes), verdict(sizes, counts))
    console.print(memory)
    exactness = Table(title="Worst parameter's relative gradient error, fp32, against fp64")
    exactness.add_column("D", justify="right")
    for heading in ("streamed", "eager, sums in D parts"):
        exactness.add_column(heading, justify="right")
        exactness.add_column("from eager", justify="right")
    for row in rows:
        cells = [row[step][key] for step in ("streamed", "regrouped") for key in KEYS]
        exactness.add_row(str(row["chunks"]), *(f"{cell:.2e}" for cell in cells))
    console.print(exactness)
    for key, orders in report["random_orders"].items():
        console.print(
            f"eager, {key.replace('_', ' ')}: {report['eager'][key]:.2e}; with tokens in random "
            f"orders {orders['median']:.2e} ({orders['lower']:.2e} to {orders['upper']:.2e})",
            highlight=False,
        )


def _mib(size: int) -> str:
    return f"{size / MIB:.2f}"


if __name__ == "__main__":
    typer.run(main)
