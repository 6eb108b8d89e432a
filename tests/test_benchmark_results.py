"""What results files say of where they come from, and that a run of a part leaves them alone."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from benchmarks import machine, memory_by_chunks, paper_lengths, saved
from benchmarks.memory_by_chunks import Exactness, Row
from benchmarks.saved import Saved
from streambp_fx.measure import Quartiles


@pytest.fixture
def checkout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A repository with one commit of one file."""
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    monkeypatch.setattr(machine, "ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    (tmp_path / "file").write_text("one")
    who = ("-c", "user.name=n", "-c", "user.email=e@example.org", "-c", "commit.gpgsign=false")
    for arguments in (("init", "-q"), ("add", "file"), (*who, "commit", "-q", "-m", "one")):
        subprocess.run(["git", *arguments], cwd=tmp_path, check=True)
    return tmp_path


def test_the_commit_is_told_and_a_changed_file_but_not_a_new_result(checkout: Path) -> None:
    clean = machine.commit()
    assert clean is not None and clean.isalnum()
    (checkout / "benchmarks" / "results").mkdir(parents=True)
    (checkout / "benchmarks" / "results" / "new.json").write_text("{}")
    assert machine.commit() == clean
    (checkout / "file").write_text("two")
    assert machine.commit() == f"{clean}+"


def test_outside_a_repository_and_without_git_there_is_no_commit(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    assert machine.commit() is None
    monkeypatch.undo()
    monkeypatch.setattr(machine, "ROOT", checkout)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(checkout.parent))
    shutil.rmtree(checkout / ".git")
    assert machine.commit() is None


def test_each_measurement_has_the_commit_at_which_it_began_and_older_ones_stay_valid(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(saved, "RESULTS", tmp_path)
    commits = iter(["a", "b", "c"])
    old = {"job": {"n": 0}, "result": {"peak": 1}, "failure": None}
    (tmp_path / "some.json").write_text(json.dumps({"machine": {}, "measurements": [old]}))
    file = Saved(tmp_path / "some.json", {}, Saved.open("some", {}).measurements, next(commits))
    monkeypatch.setattr(saved, "commit", lambda: next(commits))
    file.add({"n": 1}, {"peak": 2}, None)
    file.add({"n": 2}, None, "killed")
    written = json.loads((tmp_path / "some.json").read_text())["measurements"]
    assert written[0] == old and file.has({"n": 0})
    assert [measured["commit"] for measured in written[1:]] == ["a", "b"]


def test_a_line_of_the_papers_table_says_what_it_was_planned_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    way = SimpleNamespace(way="eager", longest=7, terms={"weights": 3})
    monkeypatch.setattr(paper_lengths, "plan", lambda *args, **kwargs: SimpleNamespace(ways=[way]))
    monkeypatch.setattr(paper_lengths, "commit", lambda: "abc")
    found = paper_lengths.planned(paper_lengths.lines()[0], Console(quiet=True))
    assert found["commit"] == "abc" and "torch" in found["machine"]["versions"]
    assert found["ways"] == {"eager": {"longest": 7, "terms": {"weights": 3}}}


class Measured:
    """Stands for `memory_by_chunks.Benchmark`, and measures nothing."""

    def __init__(self, tokens: int, compile_bodies: bool) -> None:
        self.exact = Exactness(1e-6, 1e-6)

    def row(self, chunks: int) -> Row:
        return Row(chunks, 8, {}, 1, 1, self.exact, self.exact)

    def reordered(self, parts: int) -> Exactness:
        return self.exact

    def orders(self) -> dict[str, Quartiles]:
        return {"error": Quartiles.of([1e-6])}


@pytest.mark.parametrize(
    ("options", "written"),
    [
        ({}, ["memory_by_chunks.json"]),
        ({"chunks": [1]}, []),
        ({"tokens": 64}, []),
        ({"compile_bodies": False}, []),
        ({"chunks": [1], "name": "other"}, ["other.json"]),
    ],
)
def test_a_run_of_a_part_writes_only_where_it_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, options: dict[str, Any], written: list[str]
) -> None:
    monkeypatch.setattr(memory_by_chunks, "RESULTS", tmp_path)
    monkeypatch.setattr(memory_by_chunks, "Benchmark", Measured)
    monkeypatch.setattr(memory_by_chunks, "commit", lambda: "abc")
    memory_by_chunks.main(**options)
    assert [path.name for path in tmp_path.iterdir()] == written
    for path in tmp_path.iterdir():
        assert json.loads(path.read_text())["commit"] == "abc"
