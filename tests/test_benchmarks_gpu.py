"""The GPU script on a CPU, with tiny sizes: what it measures, and what it makes of failures."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu, gpu_exactness, gpu_plan, gpu_steps, processes
from benchmarks.gpu_plan import FULL, TINY, Job, Part
from benchmarks.gpu_worker import measure_all
from benchmarks.processes import Ended, run_module
from benchmarks.shapes import Shape
from benchmarks.ways import Way

STREAMED = "streambp:compile_bodies=False"


@pytest.fixture(autouse=True)
def _fresh_compilations() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


# --- ways ---------------------------------------------------------------------------------------


def test_a_way_has_a_name_and_options() -> None:
    way = Way.parse("streambp:chunk_size=16,on_barrier=error,compile_bodies=False")
    assert way.name == "streambp" and way.compiled
    assert way.options == {"chunk_size": 16, "on_barrier": "error", "compile_bodies": False}
    assert Way.parse("gc") == Way("gc", {})


@pytest.mark.parametrize("text", ["streambq", "gc:chunk_size=3", "streambp:chunk_size"])
def test_a_wrong_way_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=text.split(":")[0]):
        Way.parse(text)


def test_a_budget_is_set_for_the_process_and_no_option_of_inductor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import torch._functorch.config as config

    given: list[dict[str, Any]] = []
    monkeypatch.setattr(torch, "compile", lambda model, **settings: given.append(settings))
    with config.patch(activation_memory_budget=1.0):
        Way.parse("compile:activation_memory_budget=0.4,auto_chunker.enable=True").prepare(
            torch.nn.Linear(1, 1)
        )
        assert config.activation_memory_budget == 0.4
    assert given == [{"dynamic": None, "options": {"auto_chunker.enable": True}}]


# --- the search for the longest length ----------------------------------------------------------


@pytest.mark.parametrize(
    ("longest", "most", "bisections", "reached"),
    [
        (100, 1024, 10, 100),
        (100, 1024, 1, 96),
        (100, 1024, 0, 64),
        (5, 64, 3, 5),
        (999, 128, 3, 128),
    ],
)
def test_the_search_doubles_and_bisects(
    longest: int, most: int, bisections: int, reached: int
) -> None:
    tried: list[int] = []

    def fits(tokens: int) -> bool:
        tried.append(tokens)
        return tokens <= longest

    attempts = list(gpu_steps.search(fits, 8, most, bisections))
    assert [attempt.tokens for attempt in attempts] == tried
    assert max((a.tokens for a in attempts if a.fits), default=0) == reached
    assert max(tried) <= most


# --- processes ----------------------------------------------------------------------------------


def run_worker(*actions: tuple[str, Any], seconds: float = 60.0) -> tuple[Ended, list[Any]]:
    lines: list[Any] = []
    ended = run_module("tests.benchmark_worker", {"do": actions}, seconds, lines.append)
    return ended, lines


def test_results_before_an_error_are_kept_with_its_last_words() -> None:
    ended, lines = run_worker(("add", {"a": 1}), ("add", {"a": 2}), ("raise", "device lost"))
    assert lines == [{"a": 1}, {"a": 2}]
    assert ended.status == 1 and ended.failure == "RuntimeError: device lost"
    assert "Traceback" in ended.log


def test_a_killed_process_is_a_failure() -> None:
    ended, lines = run_worker(("add", {"a": 1}), ("kill", None))
    assert lines == [{"a": 1}] and ended.failure == "killed by SIGKILL"


def test_a_process_over_its_limit_ends_with_all_that_it_started() -> None:
    begun = time.monotonic()
    ended, lines = run_worker(("start", 600), ("sleep", 600), seconds=8.0)
    assert ended.status is None and ended.failure == "ran into its time limit"
    assert time.monotonic() - begun < 120
    (started,) = lines
    assert ends_within(started["started"], seconds=60)


def test_processes_of_other_threads_can_be_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_stopped", threading.Event())
    begun = time.monotonic()
    with ThreadPoolExecutor(1) as pool:
        started = pool.submit(run_worker, ("sleep", 600), seconds=600.0)
        queued = pool.submit(run_worker, ("sleep", 600), seconds=600.0)
        while not processes._running:
            time.sleep(0.05)
        processes.stop_modules()
    assert started.result()[0].failure == "killed by SIGKILL"
    assert queued.result()[0].failure == "killed by SIGTERM: stopped"
    assert time.monotonic() - begun < 120 and not processes._running


def ends_within(process: int, seconds: float) -> bool:
    """Whether the process is gone, or only waits to be asked how it ended, after that time."""
    state = Path(f"/proc/{process}/stat")
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if state.read_text().rpartition(") ")[2].startswith(("Z", "X")):
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.05)
    return False


# --- what the script does with failures ---------------------------------------------------------

CASES: tuple[dict[str, Any], ...] = tuple({"way": "gc", "tokens": n} for n in (8, 16, 32))


def run_job(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    behave: Callable[[list[dict[str, Any]], Callable[[Any], None]], Ended],
    seconds: float = 60.0,
) -> list[dict[str, Any]]:
    """The records in the file after a job of `CASES`, whose processes do as ``behave`` says."""

    def run(module: str, job: Any, limit: float, on_line: Any) -> Ended:
        assert 0 < limit <= seconds
        return behave(job["cases"], on_line)

    monkeypatch.setattr(gpu, "run_module", run)
    records = gpu.Records(folder, 2, "steps", {"gpu": "none"})
    part = Part("steps", 100, (Job("steps", CASES, seconds),))
    gpu.run_part(part, records, "cpu", time.monotonic() + 100)
    written: list[dict[str, Any]] = json.loads((folder / "2_steps.json").read_text())["records"]
    return written


def result(case: dict[str, Any]) -> dict[str, Any]:
    return {"case": case, "result": {"right": True}}


def test_a_crash_costs_one_case_and_a_new_process_takes_the_rest(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    processes: list[int] = []

    def behave(cases: list[dict[str, Any]], on_line: Callable[[Any], None]) -> Ended:
        processes.append(len(cases))
        for case in cases:
            if case["tokens"] == 16:
                return Ended(-6, "an illegal memory access was encountered")
            on_line(result(case))
        return Ended(0, "")

    records = run_job(monkeypatch, tmp_path, behave)
    assert processes == [3, 1]
    assert [record["state"] for record in records] == ["measured", "failed", "measured"]
    assert records[1]["failure"].startswith("killed by SIGABRT: an illegal memory access")


def test_a_case_that_fails_is_recorded_and_the_process_goes_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def behave(cases: list[dict[str, Any]], on_line: Callable[[Any], None]) -> Ended:
        on_line({"case": cases[0], "failure": "OutOfMemoryError: CUDA", "out_of_memory": True})
        for case in cases[1:]:
            on_line(result(case))
        return Ended(0, "")

    records = run_job(monkeypatch, tmp_path, behave)
    assert [record["state"] for record in records] == ["failed", "measured", "measured"]
    assert records[0]["out_of_memory"] is True


def test_what_was_known_when_time_ran_out_is_in_the_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def behave(cases: list[dict[str, Any]], on_line: Callable[[Any], None]) -> Ended:
        on_line({"case": cases[0], "so_far": {"reached": 64}})
        on_line({"case": cases[0], "so_far": {"reached": 128}})
        written = json.loads((tmp_path / "2_steps.json").read_text())["records"]
        assert written[0]["so_far"] == [{"reached": 64}, {"reached": 128}]
        time.sleep(1.1)
        return Ended(None, "")

    monkeypatch.setattr(gpu, "LEAST_SECONDS", 59.0)
    records = run_job(monkeypatch, tmp_path, behave)
    assert [record["state"] for record in records] == ["failed", "not run", "not run"]
    assert records[0]["failure"] == "ran into its time limit"
    assert records[0]["so_far"][-1] == {"reached": 128}
    assert records[2]["failure"] == "no time was left"


# --- what is measured ---------------------------------------------------------------------------


def measured(kind: str, *cases: dict[str, Any], shape: Shape | None = None) -> list[dict[str, Any]]:
    """The lines of one process, run in this one."""
    lines: list[dict[str, Any]] = []
    job = Job(kind, cases, 60, shape or TINY.deep, "fp32")
    measure_all(job.message(list(cases), "cpu"), lines.append)
    return lines


def attention_case(**changed: Any) -> dict[str, Any]:
    return {"dtype": "bf16", "padded": False, **TINY.attention, **changed}


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_attention_in_chunks_is_right(dtype: str, padded: bool) -> None:
    (line,) = measured("attention", attention_case(dtype=dtype, padded=padded))
    assert line["result"]["right"] is True
    assert list(line["result"]["errors"]) == list(gpu_exactness.RESULTS)
    assert all(0 < row["error"] < 1e-2 for row in line["result"]["errors"].values())
    assert any("attention" in kernel for kernel in line["result"]["kernels"])


@pytest.mark.parametrize("damage", [lambda out: 1.1 * out, lambda out: out * math.nan])
def test_wrong_attention_is_found(monkeypatch: pytest.MonkeyPatch, damage: Any) -> None:
    chunked = gpu_exactness._chunked

    def wrong(*arguments: Any) -> Any:
        out, *gradients = chunked(*arguments)
        return damage(out), *gradients

    monkeypatch.setattr(gpu_exactness, "_chunked", wrong)
    (line,) = measured("attention", attention_case())
    assert line["result"]["right"] is False
    assert [row["right"] for row in line["result"]["errors"].values()] == [False, True, True, True]


def gradients_case(way: str) -> dict[str, Any]:
    shape = asdict(replace(TINY.exact, layers=1))
    return {"way": way, "dtype": "fp32", "rows": 2, "tokens": 37, "shape": shape}


def test_gradients_are_right_and_the_report_is_kept() -> None:
    (line,) = measured("gradients", gradients_case(f"{STREAMED},chunk_size=16"))
    got = line["result"]
    assert got["right"] is True and 0 < got["error"] < 1e-5
    assert got["loss"]["way"] == pytest.approx(got["loss"]["fp64"], rel=1e-5)
    assert got["problems"] == [] and "all streamed" in got["streamed"]


def test_wrong_gradients_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    one_step = gpu_exactness._one_step

    calls: list[Any] = []

    def wrong(model: Any, call: Any, ids: Any) -> Any:
        calls.append(call)
        loss, gradients = one_step(model, call, ids)
        if len(calls) == 3:
            next(iter(gradients.values())).add_(1e-3)
        return loss, gradients

    monkeypatch.setattr(gpu_exactness, "_one_step", wrong)
    (line,) = measured("gradients", gradients_case("gc"))
    assert line["result"]["right"] is False


def test_a_step_holds_its_gradients_and_streaming_takes_less_for_the_rest() -> None:
    case = {"way": "gc", "tokens": 200, "rounds": 2}
    wide = replace(TINY.deep, layers=1, vocabulary=2048)
    plain, streamed = measured(
        "steps", case, {**case, "way": f"{STREAMED},chunk_size=32,head_chunk_size=32"}, shape=wide
    )
    gradients = 4 * 2048 * 32
    for line in (plain, streamed):
        assert line["result"]["peak_bytes"] > gradients
        assert line["result"]["seconds"]["median"] > 0
    assert streamed["result"]["peak_bytes"] < plain["result"]["peak_bytes"] / 2
    assert streamed["result"]["problems"] == []


def test_each_objective_runs_and_needs_what_it_needs() -> None:
    pair = {"tokens": 24, "rows": 2, "rounds": 1, "way": "gc"}
    *lines, odd = measured(
        "steps",
        {**pair, "objective": "grpo"},
        {**pair, "objective": "dpo", "rows": 3},
    )
    assert all(line["result"]["peak_bytes"] > 0 for line in lines)
    assert "even number of rows" in odd["failure"] and odd["out_of_memory"] is False
    assert any("batch_of" in line for line in odd["traceback"])


def test_the_longest_length_is_told_as_it_grows() -> None:
    *attempts, line = measured("longest", {"way": "gc", **TINY.search})
    reached, too_long = line["result"]["reached"], line["result"]["too_long"]
    assert 0 < reached < too_long
    assert [a["so_far"]["last_attempt"]["tokens"] for a in attempts][:2] == [16, 32]
    assert attempts[-1]["so_far"]["reached"] == reached


def test_time_is_told_apart_by_kind() -> None:
    (line,) = measured("kernels", {"way": "gc", "tokens": 40})
    got = line["result"]
    assert got["kinds"]["matrix products"] > 0 and got["kinds"]["attention"] > 0
    assert set(got["phases"]) == {"forward", "backward"}
    assert sum(got["kinds"].values()) >= sum(got["top"].values()) > 0


# --- the plan -----------------------------------------------------------------------------------


def test_the_plan_fits_in_ten_minutes_and_begins_with_exactness() -> None:
    parts = gpu_plan.parts(FULL)
    assert sum(part.seconds for part in parts) <= gpu.SECONDS < 600
    assert [part.name for part in parts[:3]] == ["exactness", "peak_and_time", "longest"]
    assert len(parts) + 1 <= 8
    assert {case["tokens"] for job in parts[1].jobs for case in job.cases} == {8192, 16384, 32768}


def test_every_planned_case_can_be_measured() -> None:
    for size in (FULL, TINY):
        for part in gpu_plan.parts(size):
            for job in part.jobs:
                for case in job.cases:
                    Way.parse(case.get("way", "eager"))
                json.dumps(job.message(list(job.cases), "cuda"))


def test_the_script_needs_no_package_beside_torch_and_transformers() -> None:
    program = (
        "import sys\n"
        "for name in ('rich', 'typer', 'matplotlib'): sys.modules[name] = None\n"
        "import benchmarks.gpu, benchmarks.gpu_worker\n"
        "from benchmarks.ways import Way\n"
        "import torch\n"
        "model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU())\n"
        "way = Way.parse('streambp:compile_bodies=False,chunk_size=16')\n"
        "way.prepare(model)(torch.rand(2, 50, 8)).sum().backward()\n"
        "import streambp_fx\n"
        "assert streambp_fx.last_report().loops\n"
    )
    root = Path(gpu.__file__).parent.parent
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_script_runs_from_another_folder(tmp_path: Path) -> None:
    script = Path(gpu.__file__).with_name("gpu.sh")
    done = subprocess.run(
        ["bash", str(script), str(tmp_path / "out"), "--size", "tiny", "--seconds", "3000"],
        cwd=tmp_path,
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "out/summary.json").read_text())
    assert list(summary["parts"]) == [part.name for part in gpu_plan.parts(TINY)]
    assert all(states["measured"] > 0 for states in summary["parts"].values())
