"""The peers' and the head's benchmarks, with tiny sizes: what they measure, keep and draw."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from torch.autograd import DeviceType
from typer.testing import CliRunner

from benchmarks import head_worker, peer_environment, peers, published, reference, saved, worker
from benchmarks.head_worker import HeadJob
from benchmarks.objectives import OBJECTIVES, batch_of
from benchmarks.peer_plot import peaks_by_length, save_plot, time_and_peak
from benchmarks.peer_table import table
from benchmarks.peers import PEERS, Part, Sweep, jobs, peer_of
from benchmarks.processes import Ended
from benchmarks.saved import Saved
from benchmarks.ways import Way
from benchmarks.worker import Job

MACHINE = {"processor": "one", "versions": {"torch": "2"}}


@pytest.fixture(autouse=True)
def _fresh_compilations() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.fixture
def results(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(saved, "RESULTS", tmp_path)
    return tmp_path


# --- the results file ---------------------------------------------------------------------------


def test_a_run_goes_on_where_it_was_stopped(results: Path) -> None:
    first = Saved.open("some", MACHINE)
    first.add({"a": 1}, {"peak": 5}, None)
    first.add({"a": 2}, None, "killed")
    again = Saved.open("some", MACHINE)
    assert again.has({"a": 1}) and not again.has({"a": 2}) and not again.has({"a": 3})
    assert again.failed([{"a": 1}, {"a": 2}, {"a": 3}]) == 2
    again.add({"a": 2}, {"peak": 7}, None)
    assert len(Saved.open("some", MACHINE).measurements) == 2
    assert Saved.open("some", MACHINE).failed([{"a": 1}, {"a": 2}]) == 0


def test_results_of_another_machine_are_not_mixed_in(results: Path) -> None:
    Saved.open("some", MACHINE).add({"a": 1}, {"peak": 5}, None)
    with pytest.raises(ValueError, match="another machine"):
        Saved.open("some", {**MACHINE, "processor": "two"})


# --- what is planned ----------------------------------------------------------------------------


def test_every_peer_is_measured_at_every_length_and_nothing_twice() -> None:
    planned = list(jobs(list(Sweep), list(Part), list(PEERS), peers.LENGTHS, 9, "cpu"))
    assert len(planned) == len(set(planned))
    memory = [job for job in planned if job.part == "memory" and job.layers == 4]
    for name, (way, objective) in PEERS.items():
        lengths = {job.tokens for job in memory if (job.mode, job.objective) == (way, objective)}
        assert lengths >= set(peers.LENGTHS), name
    objectives = {(job.objective, job.mode) for job in planned if job.rows == 2}
    assert objectives == {(o, way) for o in ("dpo", "grpo") for way in ("gc", "streambp")}
    for job in planned:
        Way.parse(job.mode)
        assert json.loads(json.dumps(asdict(job))) == asdict(job)


def test_the_sweep_of_lengths_takes_those_that_are_asked_for() -> None:
    planned = jobs([Sweep.tokens], [Part.time], ["gc", "streambp"], [512], 3, "cpu")
    assert [(job.mode, job.tokens, job.rounds) for job in planned] == [
        ("gc", 512, 3),
        ("streambp", 512, 3),
    ]


def test_a_peer_has_the_name_that_it_was_asked_by() -> None:
    for name, (way, objective) in PEERS.items():
        assert peer_of(Job("memory", way, 8, objective=objective)) == name
    assert peer_of(Job("memory", "gc", 8, objective="dpo")) == "gc"
    assert peer_of(Job("memory", "streambp:chunk_size=7", 8)) == "streambp:chunk_size=7"


def test_a_failure_is_kept_and_the_published_package_gets_its_own_folder(
    monkeypatch: pytest.MonkeyPatch, results: Path
) -> None:
    paths: dict[str, str | None] = {}

    def measure(job: Job, seconds: float, path: str | None) -> reference.Measurement:
        paths[job.mode] = path
        return reference.Measurement(
            job,
            result={"peak": 2**20} if job.mode == "gc" else None,
            failure=None if job.mode == "gc" else "killed",
        )

    monkeypatch.setattr(peers, "measure", measure)
    monkeypatch.setattr(peers, "folder_of_published", lambda: "there")
    result = CliRunner().invoke(
        _app(), ["--sweep", "tokens", "--part", "memory", "--peer", "gc", "--peer", "streambp==1.0"]
    )
    assert result.exit_code == 1, result.output
    assert paths == {"gc": None, "published": "there"}
    assert "4 measured, 4 failed" in " ".join(result.output.split())
    measurements = json.loads((results / "peers.json").read_text())["measurements"]
    assert [m["failure"] for m in measurements] == [None] * 4 + ["killed"] * 4
    assert (results / "peers.png").stat().st_size > 0


def test_a_peer_that_can_not_be_installed_does_not_end_the_run(
    monkeypatch: pytest.MonkeyPatch, results: Path
) -> None:
    def offline() -> str:
        raise peer_environment.PeerError("pip install streambp==1.0: offline")

    def measure(job: Job, seconds: float, path: str | None) -> reference.Measurement:
        return reference.Measurement(job, result={"peak": 2**20})

    monkeypatch.setattr(peers, "folder_of_published", offline)
    monkeypatch.setattr(peers, "measure", measure)
    chosen = ["--peer", "streambp==1.0", "--peer", "gc", "--tokens", "64"]
    result = CliRunner().invoke(_app(), ["--sweep", "tokens", "--part", "memory", *chosen])
    assert result.exit_code == 1, result.output
    measurements = json.loads((results / "peers.json").read_text())["measurements"]
    assert [m["failure"] for m in measurements] == ["pip install streambp==1.0: offline", None]


def test_results_of_another_machine_are_a_bad_option(results: Path) -> None:
    Saved.open("peers", MACHINE).add({"a": 1}, {"peak": 5}, None)
    result = CliRunner().invoke(_app(), ["--sweep", "tokens"])
    assert result.exit_code == 2
    assert "another machine" in result.output


def test_a_peers_folder_is_made_anew_once_other_packages_are_asked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder, installs = tmp_path / "peer", []

    def install(command: list[str], **_: Any) -> Any:
        assert not folder.exists()
        folder.mkdir()
        installs.append(command)
        return SimpleNamespace(returncode=0, stderr="")

    monkeypatch.setattr(peer_environment, "FOLDER", folder)
    monkeypatch.setattr(peer_environment.subprocess, "run", install)
    for requirements in (("a==1",), ("a==1",), ("a==2",)):
        monkeypatch.setattr(peer_environment, "REQUIREMENTS", requirements)
        assert peer_environment.folder_of_published() == str(folder)
    assert [command[-1] for command in installs] == ["a==1", "a==2"]


def _app() -> Any:
    import typer

    app = typer.Typer()
    app.command()(peers.main)
    return app


def test_an_unknown_peer_is_refused() -> None:
    assert CliRunner().invoke(_app(), ["--peer", "other"]).exit_code == 2


# --- table and plot -----------------------------------------------------------------------------


def rows() -> list[dict[str, Any]]:
    found = []
    for peer, base in (("gc", 100), ("streambp", 20)):
        for tokens in (1024, 512):
            peak = {"peak": base * tokens * 1024}
            ratio = {"ratio": {"median": base / 100, "lower": 0.1, "upper": 2.0}}
            for part, result in (("memory", peak), ("time", ratio)):
                job = asdict(Job(part, peer, tokens))
                found.append({"job": job, "result": result, "failure": None, "peer": peer})
    job = asdict(Job("memory", "gc", 2048))
    found.append({"job": job, "result": None, "failure": "killed", "peer": "gc"})
    other = asdict(Job("memory", "gc", 64, layers=9))
    found.append({"job": other, "result": {"peak": 1}, "failure": None, "peer": "gc"})
    return found


def test_lines_are_of_one_model_and_in_order() -> None:
    assert peaks_by_length(rows()) == {
        "gc": [(512, 50.0), (1024, 100.0)],
        "streambp": [(512, 10.0), (1024, 20.0)],
    }
    assert time_and_peak(rows()) == {"gc": (100.0, 1.0), "streambp": (20.0, 0.2)}


def test_the_table_has_a_row_for_each_peer_and_configuration() -> None:
    console = Console(width=200, record=True, file=open("/dev/null", "w"))
    console.print(table(rows()))
    lines = console.export_text().splitlines()
    (streamed,) = (line for line in lines if "streambp" in line and "1024" in line)
    assert [cell.strip() for cell in streamed.split("│")[1:-1]] == [
        "4", "32000", "sft", "1024", "streambp", "20.0", "0.20 (0.10 to 2.00)", "-",
    ]  # fmt: skip
    assert sum("gc" in line and "failed" in line for line in lines) == 1


def test_the_plot_is_a_picture(tmp_path: Path) -> None:
    save_plot(rows(), tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


# --- what is measured ---------------------------------------------------------------------------


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("WIDTH", 64), ("INTERMEDIATE", 96), ("HEADS", 4)):
        monkeypatch.setattr(worker, name, value)


def job(part: str, mode: str, **changed: Any) -> Job:
    return Job(part, mode, **{"tokens": 37, "layers": 1, "vocabulary": 64, "rounds": 2, **changed})


@pytest.mark.parametrize("mode", ["gc", "streambp:compile_bodies=False,chunk_size=16"])
def test_gradients_are_held_against_fp64(small: None, mode: str) -> None:
    result = worker.PARTS["exactness"](job("exactness", mode))
    assert 0 < result["error"] < 1e-5
    assert result["loss"] == pytest.approx(result["fp64_loss"], rel=1e-5)


@pytest.mark.parametrize("mode", ["gc", "streambp:compile_bodies=False,chunk_size=16"])
def test_gradients_that_an_optimizer_has_used_are_freed(small: None, mode: str) -> None:
    result = worker.PARTS["optimizer"](job("optimizer", mode, layers=4))
    assert result["largest"] < result["gradients"] / 4
    assert result["peak"] > 0


def test_a_loss_that_is_off_shows_in_its_gradients(
    small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As that of the published package is, by (T - 1) / T."""

    def scaled(model: Any) -> Any:
        def call(**inputs: Any) -> Any:
            output = model(**inputs)
            output.loss = output.loss * (36 / 37)
            return output

        return call

    monkeypatch.setattr("benchmarks.ways.published_step", scaled)
    result = worker.PARTS["exactness"](job("exactness", "published"))
    assert result["error"] == pytest.approx(1 / 37, rel=1e-3)
    assert result["loss"] / result["fp64_loss"] == pytest.approx(36 / 37, rel=1e-5)


def test_without_the_published_package_its_step_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(published.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"streambp==1\.0"):
        published.published_step(torch.nn.Linear(1, 1))


def test_linear_cross_entropy_is_the_models_own_loss(small: None) -> None:
    if not hasattr(torch.nn.functional, "linear_cross_entropy"):
        pytest.skip("this torch has no linear_cross_entropy")
    ready = worker.prepared(job("memory", "eager"))
    batch = batch_of("linear_cross_entropy", ready.ids)
    loss, _ = OBJECTIVES["linear_cross_entropy"][0](ready.model, batch)
    want = ready.model(input_ids=ready.ids, labels=ready.ids).loss
    torch.testing.assert_close(loss, want)


def test_pairs_are_of_this_way_and_of_gradient_checkpointing(small: None) -> None:
    result = worker.PARTS["time"](job("time", "eager"))
    assert set(result["times"]) == {"gc", "eager"} and len(result["times"]["gc"]) == 2
    assert set(worker.PARTS["time"](job("time", "gc"))["times"]) == {"gc"}
    other = worker.PARTS["time"](job("time", "gc", objective="sft"))
    assert set(other["times"]) == {"gc"} and other["ratio"]["median"] == 1.0


def test_objectives_have_a_peak(small: None) -> None:
    for objective in ("dpo", "grpo"):
        result = worker.PARTS["memory"](job("memory", "gc", rows=2, objective=objective))
        assert result["peak"] > 4 * 2 * 37 * 64


def event(
    key: str, device: DeviceType, seconds: float, *, is_span: bool = False
) -> SimpleNamespace:
    micros = seconds * 1e6
    return SimpleNamespace(
        key=key,
        device_type=device,
        cpu_time_total=micros,
        self_cpu_time_total=micros,
        self_device_time_total=micros,
        is_user_annotation=is_span,
    )


def test_a_kernel_of_a_gpu_counts_once() -> None:
    """Not again with the op that launched it, nor with a span that it ran in."""
    gpu = DeviceType.CUDA
    averages = [
        event("aten::mm", DeviceType.CPU, 3.0),
        event("phase:forward", DeviceType.CPU, 5.0, is_span=True),
        event("phase:forward", gpu, 4.0, is_span=True),
        # Inductor launches a kernel within a span of the kernel's name.
        event("triton_poi_fused_mul_0", DeviceType.CPU, 0.1, is_span=True),
        event("triton_poi_fused_mul_0", gpu, 0.5),
        event("nvjet_tst_128x256", gpu, 3.0),
        event("flash_bwd_kernel", gpu, 2.0),
        event("Memcpy DtoD", gpu, 1.0),
    ]
    found = worker.add_up(averages, on_gpu=True)
    assert found["phases"] == {"forward": 5.0}
    assert found["kinds"] == {
        "matrix products": 3.0,
        "attention": 2.0,
        "copies": 1.0,
        "compiled kernels": 0.5,
    }
    assert list(found["top"]) == [
        "nvjet_tst_128x256",
        "flash_bwd_kernel",
        "Memcpy DtoD",
        "triton_poi_fused_mul_0",
    ]


@pytest.mark.parametrize("way", ["eager", "streambp:compile_bodies=False,head_chunk_size=24"])
def test_the_heads_gradients_are_right(way: str) -> None:
    small_head = HeadJob(way, vocabulary=320, dtype="fp32", tokens=100, width=8)
    result = head_worker.measure(small_head)
    assert 0 < result["error"] < 1e-5 and result["peak"] > 0
    if way != "eager":
        assert result["problems"] == []
        assert result["peak"] < 4 * 100 * 320


def test_the_ops_head_is_right_too() -> None:
    if not hasattr(torch.nn, "LinearCrossEntropyOptions"):
        pytest.skip("this torch has no linear_cross_entropy")
    way = "linear_cross_entropy:acc_policy=accurate,chunking_method=aspect_ratio:2"
    result = head_worker.measure(HeadJob(way, 320, "fp32", tokens=100, width=8))
    assert 0 < result["error"] < 1e-5


def test_a_process_without_a_result_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "run_module", lambda *args, **kwargs: Ended(1, "no memory"))
    assert reference.measure(job("memory", "gc")).failure == "no memory"
