"""`plan`: the longest sequence that fits on a GPU, and the chunk sizes to use."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..explaining.body_memory import Workspace, eager_workspace, remembered
from ..explaining.peers import CHECKPOINTING, EAGER
from ..explaining.trace import Traced
from .extrapolate import Curve, piecewise_linear, quadratic, to_layers
from .lora import adapt
from .models import build, layer_counts, load_config, with_layers
from .objectives import PROGRAMS, batch_of
from .setting import DTYPES, OPTIMIZERS, Setting
from .timelines import ACTIVATIONS, Timeline, plain_timeline, streamed_step, streamed_timeline

STREAMED = "streambp"
WAYS = (EAGER, CHECKPOINTING, STREAMED)

LENGTHS = {
    EAGER: (4096, 8192, 16384),
    CHECKPOINTING: (4096, 8192, 16384),
    STREAMED: (16384, 131072),
}
"""Tokens of the whole batch at which a step is traced: three where there may be ``T^2`` terms."""
CHUNK_SIZES = (4096, 2048, 1024, 512, 256)
HEAD_CHUNK_SIZES = (1024, 512, 256, 128, 64)
"""Tokens of the whole batch that are tried as chunks, the largest first."""
SHORTEST = 64
"""Tokens of a row that are traced at least."""
GIVEN_UP = 0.02
"""How much of the longest sequence is given up for larger chunks, which run faster."""
CURVE_POINTS = 48

WEIGHTS = "weights"
REFERENCE = "reference model"
OPTIMIZER = "optimizer states"
KEPT_GRADIENTS = "gradients kept from earlier micro-batches"


@dataclass(frozen=True)
class WayPlan:
    """One way to run the step.

    longest
        Tokens in each row of the longest step that fits; 0 where none does.
    terms
        Bytes by term at the peak of that step, what is resident before it first.
    curve
        Lengths, and the peak at each, resident bytes included.
    chunk_size, head_chunk_size
        Options of the backend, in tokens of each row; ``None`` where nothing is streamed.
    """

    way: str
    longest: int
    terms: Mapping[str, int]
    curve: Sequence[tuple[int, int]]
    chunk_size: int | None = None
    head_chunk_size: int | None = None

    @property
    def peak(self) -> int:
        """Bytes at the peak of the longest step."""
        return sum(self.terms.values())


@dataclass(frozen=True)
class Plan:
    """What `plan` found: ``parameters`` and ``trained`` are counts, ``traced`` layers."""

    model: str
    setting: Setting
    layers: int
    traced: tuple[int, ...]
    parameters: int
    trained: int
    ways: tuple[WayPlan, ...]

    def __getitem__(self, way: str) -> WayPlan:
        return next(plan for plan in self.ways if plan.way == way)


def plan(
    model: str | Any,
    setting: Setting,
    *,
    chunk_size: int | None = None,
    head_chunk_size: int | None = None,
    ways: Sequence[str] = WAYS,
    workspace: Workspace = eager_workspace,
    on_progress: Callable[[float, str], object] = lambda done, text: None,
) -> Plan:
    """Find the longest sequence that fits.

    Args:
        model: as of `load_config`, or a transformers configuration.
        setting: the GPU and the run.
        chunk_size, head_chunk_size: in tokens of each row; by default the largest that give up no
            more than `GIVEN_UP` of the longest sequence.
        ways: of `WAYS`.
        workspace: how the memory of one chunk is found; by default as if it ran op by op, which
            needs no lowering.
        on_progress: called with the part that is done, and what is done next.

    Raises:
        ConfigError, PlanningError: see there.
        ValueError: an unknown way.
    """
    unknown = [way for way in ways if way not in WAYS]
    if unknown:
        raise ValueError(f"unknown way {unknown[0]!r}; there are {', '.join(WAYS)}")
    config = load_config(model) if isinstance(model, str) else model
    planner = _Planner(config, setting, workspace, on_progress, ways)
    found = []
    for way in ways:
        if way == STREAMED:
            found.append(planner.streamed(chunk_size, head_chunk_size))
        else:
            found.append(planner.plain(way))
    on_progress(1.0, "done")
    name = model if isinstance(model, str) else str(config.model_type)
    return Plan(
        name,
        setting,
        config.num_hidden_layers,
        planner.counts,
        planner.count(lambda parameter: True),
        planner.count(lambda parameter: parameter.requires_grad),
        tuple(found),
    )


class _Planner:
    """Traces the step at a few layers and lengths, and carries it to the whole model."""

    def __init__(
        self,
        config: Any,
        setting: Setting,
        workspace: Workspace,
        on_progress: Callable[[float, str], object],
        ways: Sequence[str],
    ) -> None:
        self.setting = setting
        self.workspace = remembered(workspace)  # by all lengths and numbers of layers
        self.layers: int = config.num_hidden_layers
        self.counts = layer_counts(config)
        self.lengths = {way: lengths_of_a_row(way, setting.rows) for way in ways}
        self.program = PROGRAMS[setting.objective]
        self.on_progress = on_progress
        self.done, self.steps = 0, len(self.counts) * sum(map(len, self.lengths.values()))
        self.models: dict[int, nn.Module] = {}
        for count in self.counts:
            self.models[count] = build(with_layers(config, count), DTYPES[setting.dtype])
            if setting.lora_rank is not None:
                adapt(self.models[count], setting.lora_rank)
        self.resident = self._resident()

    def count(self, which: Callable[[nn.Parameter], bool]) -> int:
        """The elements of the whole model's parameters of which ``which`` is true."""
        return self._carried(lambda parameter: parameter.numel() if which(parameter) else 0)

    def plain(self, way: str) -> WayPlan:
        """The plan for a way without this backend."""
        moments = []
        for tokens in self.lengths[way]:
            timelines: dict[int, Timeline] = {}
            for count, model in self.models.items():
                self._step(way, count, tokens)
                timelines[count] = plain_timeline(
                    self.program,
                    model,
                    batch_of(self.setting, tokens),
                    checkpointing=way == CHECKPOINTING,
                    keeps_gradients=self.setting.keeps_gradients,
                )
            moments.append(to_layers(timelines, self.layers, frozenset({ACTIVATIONS})))
        return self._planned(
            way, Curve(self.lengths[way], tuple(zip(*moments, strict=True)), quadratic)
        )

    def streamed(self, chunk_size: int | None, head_chunk_size: int | None) -> WayPlan:
        """The plan for this backend, with the chunk sizes that are given or else chosen."""
        traced: dict[int, dict[int, Traced]] = {}
        for tokens in self.lengths[STREAMED]:
            traced[tokens] = {}
            for count, model in self.models.items():
                self._step(STREAMED, count, tokens)
                batch = batch_of(self.setting, tokens)
                traced[tokens][count] = streamed_step(
                    self.program, model, batch, keeps_gradients=self.setting.keeps_gradients
                )

        def curve(layer_chunk: int, head_chunk: int) -> Curve:
            moments = []
            for of_length in traced.values():
                timelines = {
                    count: streamed_timeline(step, layer_chunk, head_chunk, self.workspace)
                    for count, step in of_length.items()
                }
                moments.append(to_layers(timelines, self.layers))
            return Curve(
                self.lengths[STREAMED], tuple(zip(*moments, strict=True)), piecewise_linear
            )

        self._tell("chunk sizes")
        sizes = self._candidates(chunk_size, CHUNK_SIZES)
        head_sizes = self._candidates(head_chunk_size, HEAD_CHUNK_SIZES)
        best = self._longest(curve(sizes[-1], head_sizes[-1]))
        enough = (1 - GIVEN_UP) * best
        head = _first(head_sizes, lambda size: self._longest(curve(sizes[-1], size)) >= enough)
        size = _first(sizes, lambda size: self._longest(curve(size, head)) >= enough)
        return self._planned(STREAMED, curve(size, head), size, head)

    def _candidates(self, given: int | None, tokens: Sequence[int]) -> list[int]:
        """Chunk sizes in tokens of each row, the largest first."""
        if given is not None:
            return [given]
        return sorted({max(16, size // self.setting.rows) for size in tokens}, reverse=True)

    def _planned(
        self,
        way: str,
        curve: Curve,
        chunk_size: int | None = None,
        head_chunk_size: int | None = None,
    ) -> WayPlan:
        longest = self._longest(curve)
        resident = sum(self.resident.values())
        furthest = max(longest * 5 // 4, self.lengths[way][0])
        lengths = [max(1, furthest * point // CURVE_POINTS) for point in range(CURVE_POINTS + 1)]
        terms = {name: round(size) for name, size in curve.terms(max(1, longest)).items()}
        return WayPlan(
            way,
            longest,
            {name: size for name, size in (self.resident | terms).items() if size},
            [(tokens, resident + round(curve.peak(tokens))) for tokens in lengths],
            chunk_size,
            head_chunk_size,
        )

    def _longest(self, curve: Curve) -> int:
        """The longest row that fits, by bisection: no term falls as rows get longer."""
        room = self.setting.budget - sum(self.resident.values())
        if curve.peak(1) > room:
            return 0
        fits, over = 1, 2
        while curve.peak(over) <= room:
            fits, over = over, 2 * over
        while over - fits > 1:
            middle = (fits + over) // 2
            fits, over = (middle, over) if curve.peak(middle) <= room else (fits, middle)
        return fits

    def _resident(self) -> dict[str, int]:
        """Bytes that are there when a step starts, by term."""
        weights = self._carried(_nbytes)
        trained = self._carried(lambda p: _nbytes(p) if p.requires_grad else 0)
        resident = {
            WEIGHTS: weights,
            REFERENCE: weights if self.setting.has_reference else 0,
            OPTIMIZER: trained * OPTIMIZERS[self.setting.optimizer],
            KEPT_GRADIENTS: trained if self.setting.keeps_gradients else 0,
        }
        return {name: size for name, size in resident.items() if size}

    def _carried(self, amount: Callable[[nn.Parameter], int]) -> int:
        """The sum of ``amount`` over the whole model's parameters."""
        sums = {count: sum(map(amount, model.parameters())) for count, model in self.models.items()}
        if len(sums) == 1:
            return next(iter(sums.values()))
        (few, less), (more, greater) = sorted(sums.items())
        return less + (greater - less) * (self.layers - few) // (more - few)

    def _step(self, way: str, count: int, tokens: int) -> None:
        self._tell(f"{way}: {count} layers, {tokens} tokens")
        self.done += 1

    def _tell(self, text: str) -> None:
        self.on_progress(self.done / (self.steps + 1), text)


def _nbytes(parameter: nn.Parameter) -> int:
    return parameter.numel() * parameter.element_size()


def _first(sizes: Sequence[int], enough: Callable[[int], bool]) -> int:
    """The first of ``sizes`` that is enough; the last one is, without being asked."""
    return next((size for size in sizes[:-1] if enough(size)), sizes[-1])


def lengths_of_a_row(way: str, rows: int) -> tuple[int, ...]:
    """The lengths at which a step of ``way`` with so many rows is traced, no two equal."""
    divisor = min(rows, LENGTHS[way][0] // SHORTEST)
    return tuple(tokens // divisor for tokens in LENGTHS[way])
