"""Brute-force validation of the op rules.

Every rule is tried on real calls: for each letter that its `Spec` calls local or summed, the op
runs once on the whole, once in ragged chunks and, where a chunk need not be a stretch, once in
interleaved ones, and the results are compared. Reported are

wrong
    A mismatch or a crash on chunks, or a `Spec` that does not fit its call; with a repro that runs.
missing
    A letter that the `Spec` calls whole although chunking it was right in every sample, and ops
    that were called but have no rule. Informative: a rule may be narrower than the truth.

Run it as ``python -m streambp_fx.passes.rule_validation [--op NAME] [--max-samples N]``; the exit
status is 1 if a rule is wrong.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from streambp_fx._torch import op_database

from .rules import Call, Spec, check_spec, rule_for, ruled_targets
from .rules.chunked import difference, interleaved, ragged
from .rules.left_out import why_left_out
from .rules.letters import letters_in
from .rules.sample_calls import hand_made_calls, opinfo_calls

aten = torch.ops.aten

_OR = "adding booleans is their `or`, but a partial result is a sum of numbers"
WHOLE_ON_PURPOSE: dict[str, str] = {
    "aten.any.default d": _OR,
    "aten.any.dim d": _OR,
    "aten.any.dims d": _OR,
    "aten.bucketize.Tensor edges": "counts of edges do add up, but no model streams its edges",
}
"""``op letter-role`` -> why a letter is called whole although chunking happens to be right."""

# Beyond this, a call is too slow to try in chunks and shows nothing that a smaller one does not.
_MAX_ELEMENTS = 200_000


@dataclass
class OpReport:
    """What the samples of one op overload showed."""

    calls: int = 0
    undecided: int = 0
    local: int = 0
    sums: int = 0
    wrong: list[str] = field(default_factory=list)
    whole_tried: Counter[str] = field(default_factory=Counter)
    whole_right: Counter[str] = field(default_factory=Counter)

    def missing(self) -> list[str]:
        """Roles of letters that are called whole although every try was right."""
        return [role for role, tries in self.whole_tried.items() if self.whole_right[role] == tries]


@dataclass
class Report:
    """What all samples showed, by op overload."""

    ops: dict[Any, OpReport] = field(default_factory=lambda: defaultdict(OpReport))
    unruled: Counter[Any] = field(default_factory=Counter)
    untraced: list[str] = field(default_factory=list)

    def wrong(self) -> list[str]:
        """The repros of all wrong rules."""
        return [repro for op in self.ops.values() for repro in op.wrong]


def validate_calls(calls: Iterable[Call], report: Report, max_samples: int) -> None:
    """Try the rule of each call on it, up to ``max_samples`` different calls of an overload."""
    seen: set[tuple[Any, ...]] = set()
    for call in calls:
        rule = rule_for(call.target)
        if rule is None:
            report.unruled[call.target] += 1
            continue
        entry = report.ops[call.target]
        key = _key(call)
        small = all(tensor.numel() <= _MAX_ELEMENTS for tensor in call.tensors)
        if entry.calls >= max_samples or key in seen or not small:
            continue
        seen.add(key)
        entry.calls += 1
        spec = rule(call)
        if spec is None:
            entry.undecided += 1
        else:
            _validate(call, spec, entry)


def _validate(call: Call, spec: Spec, entry: OpReport) -> None:
    try:
        check_spec(call, spec)
    except ValueError as error:
        entry.wrong.append(f"# {error}\n{_repro(call, None)}")
        return
    for letters, is_sum in ((spec.local_letters(), False), (sorted(spec.sums), True)):
        for letter in letters:
            if spec.sizes[letter] < 2:
                continue
            entry.sums += is_sum
            entry.local += not is_sum
            for chunks in (ragged,) if spec.positional else (ragged, interleaved):
                try:
                    found = difference(call, spec, letter, chunks(int(spec.sizes[letter])))
                except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
                    # A rule that fails is wrong, and no end of the search.
                    found = f"{type(error).__name__}: {error}"
                if found is not None:
                    entry.wrong.append(f"# {found}\n{_repro(call, letter, chunks.__name__)}")
                    break
    # A local letter needs its resize, which knows nothing of whole letters: only rules without
    # one can be tried beyond what they say.
    if spec.resize is not None:
        return
    outputs = [letters_in(dims) for dims in spec.outputs if dims is not None]
    for letter in spec.whole & letters_in(*spec.inputs):
        carried = [letter in letters for letters in outputs]
        if spec.sizes[letter] < 2 or (any(carried) and not all(carried)):
            continue
        role = re.sub(r"[\d']+$", "", letter)
        entry.whole_tried[role] += 1
        wider = replace(spec, whole=spec.whole - {letter})
        if difference(call, wider, letter, ragged(int(spec.sizes[letter]))) is None:
            entry.whole_right[role] += 1


def _key(call: Call) -> tuple[Any, ...]:
    """Calls with equal keys differ in values alone."""
    arguments = _source((call.args, call.kwargs), values=False)
    return (call.target, arguments, tuple(sorted(call.constant.items())))


def _source(value: Any, *, values: bool = True) -> str:
    """Python source of an argument; tensors as literals, or random of the same shape if large."""
    if isinstance(value, torch.Tensor):
        dtype, shape = value.dtype, tuple(value.shape)
        if not values:
            return f"{dtype}{shape}{value.stride()}"
        if value.numel() > 64 and (dtype.is_floating_point or dtype.is_complex):
            return f"torch.rand({shape}, dtype={dtype})"
        return f"torch.tensor({value.tolist()}, dtype={dtype}).reshape({shape})"
    if isinstance(value, tuple):
        return "(" + "".join(f"{_source(item, values=values)}, " for item in value) + ")"
    if isinstance(value, list):
        return "[" + ", ".join(_source(item, values=values) for item in value) + "]"
    if isinstance(value, dict):
        items = (f"{key!r}: {_source(item, values=values)}" for key, item in value.items())
        return "{" + ", ".join(items) + "}"
    if isinstance(value, torch.device):
        return f"torch.{value!r}"
    if isinstance(value, float) and str(value) in ("inf", "-inf", "nan"):
        return f"float({str(value)!r})"
    return repr(value)


def _repro(call: Call, letter: str | None, chunks: str = "ragged") -> str:
    lines = [
        "import torch",
        "from streambp_fx.passes.rules import check_spec, rule_for",
        f"from streambp_fx.passes.rules.chunked import difference, {chunks}, record_call",
        f"call = record_call(torch.ops.{call.target}, *{_source(call.args)}, "
        f"constant={dict(call.constant)}, **{_source(dict(call.kwargs))})",
        "spec = rule_for(call.target)(call)",
        "check_spec(call, spec)",
    ]
    if letter is not None:
        lines.append(f"print(difference(call, spec, {letter!r}, {chunks}(spec.sizes[{letter!r}])))")
    return "\n".join(lines)


def validate(
    op: str | None = None,
    max_samples: int = 20,
    watch: Callable[[list[Any]], Iterable[Any]] = iter,
) -> Report:
    """Validate all rules, or those reached by database entries and calls named like ``op``.

    ``max_samples`` bounds both the samples taken of an entry and the calls tried of an overload.
    ``watch`` may show the progress over the entries.
    """
    report = Report()
    torch.manual_seed(0)
    validate_calls((call for call in hand_made_calls() if _named(call, op)), report, max_samples)
    entries = [
        entry
        for entry in op_database()
        if op is None or op in (entry.name, entry.aten_name, entry.aten_backward_name)
    ]
    for entry in watch(entries):
        calls = opinfo_calls(entry, max_samples, report.untraced.append)
        validate_calls(calls, report, max_samples)
    return report


def _named(call: Call, op: str | None) -> bool:
    return op is None or str(call.target).split(".")[1] == op


def _rows(report: Report) -> Iterator[tuple[str, ...]]:
    for target, entry in sorted(report.ops.items(), key=lambda item: str(item[0])):
        missing = [role for role in entry.missing() if f"{target} {role}" not in WHOLE_ON_PURPOSE]
        verdict = "[red]wrong[/red]" if entry.wrong else "right"
        if entry.local + entry.sums == 0 and not entry.wrong:
            verdict = "untried"
        yield (
            str(target),
            str(entry.calls),
            str(entry.undecided),
            str(entry.local),
            str(entry.sums),
            verdict,
            ", ".join(missing),
        )


def main(
    op: Annotated[str | None, typer.Option(help="Validate this op alone.")] = None,
    max_samples: Annotated[int, typer.Option(min=1, help="Samples of an op at most.")] = 10,
) -> None:
    """Try every op rule on real calls, whole and in chunks."""
    console = Console()
    report = validate(op, max_samples, partial(track, description="entries", transient=True))
    table = Table(
        "op", "calls", "no spec", "local", "sums", "rule", "whole, though right in chunks"
    )
    for row in _rows(report):
        table.add_row(*row)
    console.print(table)
    unruled = sorted(str(target) for target in report.unruled if why_left_out(target) is None)
    console.print(f"called without a rule ({len(unruled)}): " + ", ".join(unruled))
    if op is None:
        never = sorted(str(target) for target in ruled_targets() if target not in report.ops)
        console.print(f"ruled but never called ({len(never)}): " + ", ".join(never))
    console.print(f"samples that could not be traced: {len(report.untraced)}")
    for repro in report.wrong():
        console.print("[red]wrong rule:[/red]")
        console.print(repro, markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(code=1 if report.wrong() else 0)


if __name__ == "__main__":
    typer.run(main)
