"""The brute-force validator: no rule is wrong on a sample of calls, and a wrong one is found."""

from __future__ import annotations

import contextlib
import dataclasses
import io
from collections.abc import Iterator

import pytest
import torch
import typer

from streambp_fx.passes import rule_validation
from streambp_fx.passes.rule_validation import Report, validate, validate_calls
from streambp_fx.passes.rules import Call, Spec, register_rule, registry
from streambp_fx.passes.rules.chunked import difference, interleaved, ragged, record_call
from streambp_fx.passes.rules.elementwise import elementwise_spec
from streambp_fx.passes.rules.reductions import reduction_spec
from streambp_fx.passes.rules.sample_calls import hand_made_calls

aten = torch.ops.aten


@pytest.fixture
def own_table(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(registry, "_RULES", dict(registry._RULES))
    yield


def validated(*calls: Call) -> Report:
    report = Report()
    validate_calls(calls, report, max_samples=100)
    return report


def test_rules_are_right_on_hand_made_calls() -> None:
    report = validated(*hand_made_calls())
    assert report.wrong() == []
    assert not report.unruled
    untried = [str(op) for op, entry in report.ops.items() if not entry.local + entry.sums]
    assert untried == []


@pytest.mark.parametrize(
    ("op", "reached"),
    [
        ("nn.functional.silu", "aten.silu_backward.default"),
        ("nn.functional.cross_entropy", "aten.scatter.value"),
        ("nn.functional.embedding", "aten.embedding_dense_backward.default"),
        ("nn.functional.layer_norm", "aten.var_mean.correction"),
        ("softmax", "aten._softmax_backward_data.default"),
        ("logsumexp", "aten.amax.default"),
        ("cumsum", "aten.cumsum.default"),
        ("addmm", "aten.mm.default"),
        ("gather", "aten.scatter_add.default"),
        ("index_select", "aten.index_add.default"),
        ("cat", "aten.cat.default"),
        ("topk", "aten.topk.default"),
    ],
)
def test_rules_are_right_on_samples_of_the_database(op: str, reached: str) -> None:
    report = validate(op, max_samples=3)
    assert report.wrong() == []
    assert reached in {str(target) for target, entry in report.ops.items() if entry.calls}


@pytest.mark.usefixtures("own_table")
@pytest.mark.parametrize(
    ("call", "rule"),
    [
        (lambda: record_call(aten.cumsum.default, torch.rand(4, 5), 1), elementwise_spec),
        (lambda: record_call(aten.flip.default, torch.rand(4, 5), [0]), elementwise_spec),
        (
            lambda: record_call(aten.amax.default, torch.rand(4, 5), [1]),
            lambda call: reduction_spec(call, [1], adds=True),
        ),
        (
            lambda: record_call(aten.full.default, [4, 5], 0.0),
            lambda call: dataclasses.replace(registry_rule(call), resize=None),
        ),
    ],
    ids=["scan", "order", "reduction", "literal size"],
)
def test_a_wrong_rule_is_found_and_its_repro_shows_it(call, rule) -> None:  # type: ignore[no-untyped-def]
    recorded = call()
    register_rule(recorded.target)(rule)
    wrong = validated(recorded).wrong()
    assert wrong
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(wrong[0], {})
    assert printed.getvalue().strip() not in ("", "None")
    assert printed.getvalue().split(":")[0] in wrong[0]


_FULL_RULE = registry.rule_for(aten.full.default)


def registry_rule(call: Call) -> Spec:
    assert _FULL_RULE is not None
    spec = _FULL_RULE(call)
    assert spec is not None
    return spec


@pytest.mark.usefixtures("own_table")
def test_a_spec_that_does_not_fit_its_call_is_wrong() -> None:
    @register_rule(aten.neg.default)
    def transposed(call: Call) -> Spec:
        dims = (("a",), ("b",))
        return Spec((dims,), (dims[::-1],), {"a": 4, "b": 5})

    (wrong,) = validated(record_call(aten.neg.default, torch.rand(4, 5))).wrong()
    assert "output 0 of shape (4, 5)" in wrong
    with pytest.raises(ValueError, match=r"rule of aten\.neg\.default is inconsistent"):
        exec(wrong, {})


@pytest.mark.usefixtures("own_table")
def test_a_rule_that_is_narrower_than_the_truth_is_reported_as_missing() -> None:
    @register_rule(aten.neg.default)
    def timid(call: Call) -> Spec:
        dims = (("rows",), ("columns",))
        return Spec((dims,), (dims,), {"rows": 4, "columns": 5}, whole=frozenset({"rows"}))

    report = validated(record_call(aten.neg.default, torch.rand(4, 5)))
    assert report.wrong() == []
    assert report.ops[aten.neg.default].missing() == ["rows"]
    assert [row[-1] for row in rule_validation._rows(report)] == ["rows"]
    scan = validated(record_call(aten.cumsum.default, torch.rand(4, 5), 1))
    assert scan.ops[aten.cumsum.default].missing() == []


def test_what_is_whole_on_purpose_is_not_shown_as_missing() -> None:
    report = validated(record_call(aten.any.dim, torch.rand(4, 5) > 0.9, 1))
    assert report.ops[aten.any.dim].missing() == ["d"]
    assert [row[-1] for row in rule_validation._rows(report)] == [""]


def test_calls_without_a_rule_are_counted() -> None:
    call = record_call(aten.histc.default, torch.rand(9), 3)
    assert validated(call, call).unruled == {aten.histc.default: 2}


@pytest.mark.usefixtures("own_table")
def test_the_exit_status_tells_whether_a_rule_is_wrong(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rule_validation, "op_database", list)
    with pytest.raises(typer.Exit) as right:
        rule_validation.main("gather", 1)
    assert right.value.exit_code == 0
    register_rule(aten.gather.default)(lambda call: Spec((), (), {}))
    with pytest.raises(typer.Exit) as wrong:
        rule_validation.main("gather", 1)
    assert wrong.value.exit_code == 1
    assert "record_call(torch.ops.aten.gather.default" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("size", "lengths"), [(1, [1]), (2, [1, 1]), (3, [1, 2]), (4, [1, 2, 1]), (9, [1, 2, 6])]
)
def test_chunks_cover_every_position_once(size: int, lengths: list[int]) -> None:
    assert [len(positions) for positions in ragged(size)] == lengths
    for chunks in (ragged(size), interleaved(size)):
        assert sorted(place for positions in chunks for place in positions) == list(range(size))


@pytest.mark.usefixtures("own_table")
def test_a_rule_that_reads_the_start_of_a_chunk_must_say_so() -> None:
    call = record_call(aten.arange.start, 3, 9)
    rule = registry.rule_for(aten.arange.start)
    assert rule is not None
    assert validated(call).wrong() == []
    spec = rule(call)
    assert spec is not None
    register_rule(aten.arange.start)(lambda call: dataclasses.replace(spec, positional=False))
    (wrong,) = validated(call).wrong()
    assert "interleaved" in wrong


def test_a_difference_says_what_it_is() -> None:
    call = record_call(aten.neg.default, torch.rand(4, 5))
    spec = elementwise_spec(call)
    assert spec is not None
    assert difference(call, spec, "d0", ragged(4)) is None
    doubled = dataclasses.replace(call, outputs=(torch.ones(4, 5),))
    assert "values differ" in str(difference(doubled, spec, "d0", ragged(4)))
    cast = dataclasses.replace(call, outputs=(-call.tensors[0].double(),))
    assert "dtype torch.float32 instead of torch.float64" in str(
        difference(cast, spec, "d0", ragged(4))
    )
