"""`explain`: its report says what the program and the passes are known to have."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import streambp_fx
from streambp_fx.explaining.explanation import (
    Explanation,
    NothingCapturedError,
)
from streambp_fx.explaining.regions import Region
from streambp_fx.explaining.text import to_notebook, to_text
from streambp_fx.explaining.units import bytes_text, share_text, short_source
from streambp_fx.options import OptionError
from tests.backend import streamed
from tests.own_models import NanoGPT

LAYERS = 3
BATCH, TOKENS, CHUNK = 2, 50, 16
CHUNKS = 4
IDS = torch.arange(BATCH * TOKENS).reshape(BATCH, TOKENS) % 131


def explain(program: Any, *args: Any, **kwargs: Any) -> Explanation:
    kwargs.setdefault("peers", ())
    options = {"chunk_size": CHUNK, "compile_bodies": False}
    return streambp_fx.explain(program, *args, options=options, **kwargs)


def all_regions(explained: Explanation) -> list[Region]:
    return [region for graph in explained.graphs for region in graph.regions]


class Mixing(nn.Module):
    """A model with an op that mixes tokens, on whole ``[batch, tokens, hidden]``."""

    def __init__(self) -> None:
        super().__init__()
        self.model = NanoGPT(layers=1)

    def forward(self, ids: Tensor) -> Tensor:
        mixed = self.model.token(ids).flip(1).cumsum(1)  # the line that barriers name
        return self.model(ids, ids) + (mixed**2).mean()


@pytest.fixture(scope="module")
def gpt() -> Explanation:
    return explain(NanoGPT(layers=LAYERS), IDS, IDS, peers=("eager", "gradient checkpointing"))


@pytest.fixture(scope="module")
def mixing() -> Explanation:
    return explain(Mixing(), IDS)


def test_regions_are_the_loops_of_forward_and_backward(gpt: Explanation) -> None:
    regions = all_regions(gpt)
    assert {region.chunks for region in regions} == {CHUNKS}
    assert {region.chunk_size for region in regions} == {CHUNK}
    assert [graph.segments for graph in gpt.graphs] == [(0,), (1, 2, 3), (LAYERS + 1,)]
    assert [region.name for region in gpt.graphs[1].regions] == ["segment1", "stage1_0", "stage1_1"]
    assert [region.layer for region in regions if region.head] == [LAYERS + 1]
    for graph in gpt.graphs:
        assert graph.bodies.keys() == {region.body for region in graph.regions}


def test_operands_say_how_they_are_passed_and_what_the_program_calls_them(gpt: Explanation) -> None:
    (region,) = [region for region in gpt.graphs[1].regions if region.name == "stage1_1"]
    passed = {operand.name: operand.how for operand in region.operands}
    assert passed["blocks.0.norm_1.weight"] == "whole"
    assert passed["gradient of blocks.0.up.weight"] == "sum"
    assert passed["stage1_0[0]"] == passed["gradients of keys and values"] == "past"
    assert passed["x"] == passed["tangents_1"] == "chunk"
    sums = [result for result in region.results if result.startswith("sum")]
    assert "sum 128x32, gradient of blocks.0.up.weight" in sums
    assert any("own_models.py" in source for source in region.sources)


def test_the_order_of_a_loop_has_a_reason(gpt: Explanation) -> None:
    by_name = {region.name: region for region in all_regions(gpt)}
    assert by_name["stage1_1"].order == "descending"
    assert "every later chunk has added its share" in by_name["stage1_1"].reason
    assert by_name["segment1"].order == "ascending"
    assert "written before it or a later chunk reads them" in by_name["segment1"].reason


def test_attention_has_a_proof(gpt: Explanation) -> None:
    (proof,) = [proof for graph in gpt.graphs for proof in graph.attentions]  # layers share it
    assert proof.causal and "the call says so" in proof.structure
    assert "scaled_dot_product_attention" in proof.source


def masked(q: Tensor, bias: Tensor | None, kind: str) -> Tensor:
    rows = torch.arange(q.shape[-2])
    allowed = rows[None, :] <= rows[:, None]
    if kind == "window":
        allowed = allowed & (rows[None, :] > rows[:, None] - 7)
    mask = allowed if bias is None else bias
    return F.scaled_dot_product_attention(q, q, q, attn_mask=mask).square().mean()


@pytest.mark.parametrize(
    "kind, causal, words, window",
    [
        ("causal", True, "proven equal to k <= q", None),
        ("window", True, "every allowed key is proven k <= q", 7),
        ("data", False, "not proven causal", None),
    ],
)
def test_proofs_are_of_the_mask_that_the_program_builds(
    kind: str, causal: bool, words: str, window: int | None
) -> None:
    q = torch.rand(1, 2, TOKENS, 8, requires_grad=True)
    bias = torch.rand(TOKENS, TOKENS) if kind == "data" else None
    (proof,) = explain(masked, q, bias, kind).graphs[0].attentions
    assert proof.causal is causal and words in proof.structure
    assert window is None or proof.window == window


def test_barriers_name_op_line_reason_and_bytes(mixing: Explanation) -> None:
    assert not mixing.streams_everything
    barriers = {barrier.op: barrier for barrier in mixing.barriers}
    barrier = barriers["aten.cumsum.default"]
    assert "mixes tokens" in barrier.reason and "mixed = self.model" in barrier.source
    assert barrier.bytes == BATCH * TOKENS * 32 * 4


def test_a_program_that_streams_whole_has_no_barrier(gpt: Explanation) -> None:
    assert gpt.barriers == () and gpt.streams_everything


def test_the_peak_is_the_sum_of_its_terms(gpt: Explanation) -> None:
    assert gpt.peak.nbytes == sum(gpt.peak.terms().values()) > 0
    assert gpt.peak.nbytes == max(m.nbytes for m in gpt.memory.moments)


def test_peers_are_found_or_have_a_reason(gpt: Explanation) -> None:
    eager = gpt.peers["eager"]
    assert isinstance(eager, int) and eager == max(gpt.peer_courses["eager"])
    # Logits, and what eager keeps of each layer, are more than a chunk of either.
    assert eager > BATCH * TOKENS * 131 * 4 and eager > gpt.peak.nbytes
    assert gpt.peers["gradient checkpointing"] == "the program has no gradient checkpointing"


def test_the_text_has_every_part(
    gpt: Explanation, mixing: Explanation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    text = to_text(gpt)
    for words in ("1 to 3 ", "Why the order", "causal: the call says so"):
        assert words in text
    assert "Barriers: none" in text and "parameter gradients" in text and "eager" in text
    assert str(gpt) == text
    assert "aten.cumsum.default" in to_text(mixing) and "Barriers: none" not in to_text(mixing)


def test_a_notebook_shows_tables_and_unfolds_operands(gpt: Explanation) -> None:
    shown = gpt._repr_html_()
    assert shown == to_notebook(gpt)
    assert shown.count("<details>") == sum(len(graph.bodies) for graph in gpt.graphs)
    assert "gradient of blocks.0.up.weight" in shown


def test_all_of_it_but_graphs_is_json(mixing: Explanation) -> None:
    data = json.loads(json.dumps(mixing.to_dict()))
    assert data["peak"]["bytes"] == mixing.peak.nbytes and data["streams_everything"] is False
    for written, graph in zip(data["graphs"], mixing.graphs, strict=True):
        assert [loop["name"] for loop in written["loops"]] == [one.name for one in graph.regions]
    barriers = [barrier for graph in data["graphs"] for barrier in graph["barriers"]]
    assert barriers and barriers[0]["bytes"] > 0


def test_each_pass_left_its_graph(gpt: Explanation) -> None:
    (capture,) = gpt.captures
    names = list(capture.graphs)
    assert (names[0], names[-1]) == ("captured", "chain")
    captured = capture.print_readable("captured", print_output=False)
    assert "scaled_dot_product_attention(" in captured and "streambp.attention" not in captured
    chain = capture.print_readable("chain", print_output=False)
    assert "streambp.attention" in chain and "self.submod_2(" in chain
    layer, head = gpt.graphs[1], gpt.graphs[-1]
    names = list(head.graphs)
    assert names.index("captured") < names.index("normalize") < names.index("fuse_head")
    assert names.index("fuse_head") < names.index("rewritten") < names.index("backward")
    rewritten = layer.print_readable("rewritten", print_output=False)
    assert "streambp_loop(body_segment1, 50" in rewritten
    assert "streambp.attention.default(" not in rewritten
    with pytest.raises(KeyError):
        layer.python("unknown")


def test_a_normal_compile_keeps_no_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    from streambp_fx.passes.pipeline import History

    kept: list[str] = []
    keep = History.keep

    def noted(self: History, name: str, graph_module: torch.fx.GraphModule) -> None:
        keep(self, name, graph_module)
        kept.append(name)
        assert name not in self.graphs

    monkeypatch.setattr(History, "keep", noted)
    streamed(NanoGPT(layers=1), chunk_size=CHUNK)(IDS, IDS)
    assert {"captured", "normalize"} <= set(kept)


def test_neither_weights_nor_values_are_needed() -> None:
    with torch.device("meta"):
        model, ids = NanoGPT(layers=LAYERS), torch.zeros(BATCH, TOKENS, dtype=torch.int64)
    on_meta = explain(model, ids, ids)
    assert on_meta.peak.terms() == explain(NanoGPT(layers=LAYERS), IDS, IDS).peak.terms()
    assert all(parameter.is_meta for parameter in model.parameters())


def test_without_gradients_forward_alone_is_explained() -> None:
    with torch.no_grad():
        found = explain(NanoGPT(layers=LAYERS), IDS, IDS, peers=("eager",))
    regions = all_regions(found)
    assert regions and not any(region.backward for region in regions)
    assert "blocks.0.norm_1.weight" in {operand.name for operand in regions[1].operands}
    assert isinstance(found.peers["eager"], int)


class Convolving(nn.Module):
    """Mixes tokens by a causal convolution along the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.mix = nn.Conv1d(16, 16, 3, padding=2)
        self.head = nn.Linear(16, 50)

    def forward(self, ids: Tensor) -> Tensor:
        mixed = self.mix(self.embed(ids).transpose(1, 2))[..., : ids.shape[1]]
        logits = self.head(nn.functional.silu(mixed).transpose(1, 2))
        return nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())


def test_a_convolution_is_a_barrier_and_its_memory_is_known() -> None:
    found = explain(Convolving(), torch.zeros(2, 64, dtype=torch.int64), peers=("torch.compile",))
    assert [barrier for barrier in found.barriers if "convolution" in str(barrier)]
    assert isinstance(found.peers["torch.compile"], int), found.peers


class Broken(nn.Module):
    """Breaks the graph after the model."""

    def __init__(self) -> None:
        super().__init__()
        self.model = NanoGPT(layers=1)

    def forward(self, ids: Tensor) -> Tensor:
        loss = self.model(ids, ids)
        torch._dynamo.graph_break()
        return loss * 2


def test_memory_is_that_of_the_step_after_a_graph_break_too(gpt: Explanation) -> None:
    found = explain(Broken(), IDS, peers=())
    assert len(found.captures) > 1 and "graph 1 of " in to_text(found)
    assert len(gpt.captures) == 1 and "graph 0 of " not in to_text(gpt)
    whole = explain(NanoGPT(layers=1), IDS, IDS)
    assert abs(found.peak.nbytes - whole.peak.nbytes) <= 64  # scalars


def test_what_is_not_streamed_says_why() -> None:
    found = explain(lambda x: (x * 2).sum(), torch.ones(6, 257, requires_grad=True))
    assert found.graphs[0].unstreamed and not found.streams_everything
    assert "Nothing is streamed" in to_text(found)


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown peer 'magic'"):
        explain(NanoGPT(layers=1), IDS, IDS, peers=("magic",))
    with pytest.raises(OptionError, match="chunk_size"):
        streambp_fx.explain(NanoGPT(layers=1), IDS, IDS, options={"chunk_size": 0})
    with pytest.raises(NothingCapturedError):
        explain(lambda x: x, 3)


def test_progress_is_told_or_drawn_on_terminals_alone(capfd: pytest.CaptureFixture[str]) -> None:
    said: list[str] = []
    explain(NanoGPT(layers=1), IDS, IDS, peers=("eager",), on_progress=said.append)
    assert said == ["tracing", "the passes have run", "predicting memory", "memory of eager"]
    explain(NanoGPT(layers=1), IDS, IDS)
    assert capfd.readouterr().err == ""


def test_the_plot_stacks_terms_up_to_the_peak(gpt: Explanation, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    figure = gpt.plot_memory()
    terms, ways = figure.axes
    highest = max(path.vertices[:, 1].max() for c in terms.collections for path in c.get_paths())
    assert 2**10 < gpt.peak.nbytes < 2**19 and terms.get_ylabel().startswith("KiB ")
    assert highest == pytest.approx(gpt.peak.nbytes / 2**10)
    assert "unstreamed values" not in [text.get_text() for text in terms.get_legend().get_texts()]
    labels = [text.get_text() for text in ways.get_legend().get_texts()]
    assert [label.split(":")[0] for label in labels] == ["eager", 'backend="streambp"']
    figure.savefig(tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 10_000


@contextmanager
def logged(level: int) -> Iterator[list[logging.LogRecord]]:
    """What the package's logger emits from ``level`` on."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logger = logging.getLogger("streambp_fx")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(level)
    try:
        yield records
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_compile_logs_one_line_at_info(dynamic: bool) -> None:
    model = NanoGPT(layers=1)
    with logged(logging.INFO) as records:
        streamed(model, dynamic=dynamic, chunk_size=CHUNK)(IDS, IDS)
    (line,) = [record.getMessage() for record in records]
    assert line.startswith(f"streamed {TOKENS} tokens in ") and f"chunks of {CHUNK}" in line
    assert "all streamed" in line and "\n" not in line
    options = {"chunk_size": CHUNK, "compile_bodies": False}
    explained = streambp_fx.explain(model, IDS, IDS, options=options, peers=())
    peak = explained.to_dict()["peak"]["bytes"]
    assert line.endswith(f"; predicted peak {bytes_text(peak)}")


def test_a_compile_logs_details_at_debug() -> None:
    with logged(logging.DEBUG) as records:
        streamed(Mixing(), chunk_size=CHUNK, on_barrier="ignore")(IDS)
    texts = [record.getMessage() for record in records]
    assert "ops left unstreamed" in texts[0]
    assert any(text.startswith("loop segment1: ") for text in texts)
    assert any(text.startswith("unstreamed: aten.cumsum") for text in texts)
    assert any(text.startswith("pass rewrite: ") for text in texts)


def test_units() -> None:
    assert [bytes_text(n) for n in (0, 999, 1536, 2**20, 5 * 2**29)] == [
        *("0 B", "1.0 KiB", "1.5 KiB", "1.0 MiB", "2.5 GiB")
    ]
    assert share_text(1, 3) == "33 %" and share_text(0, 0) == "0 %"
    frame = 'File "/a/b/model.py", line 7, in forward: x = y'
    assert short_source(frame) == "model.py:7 in forward: x = y"
    assert short_source(frame, code=False) == "model.py:7 in forward"
    assert short_source("source line unknown") == "source line unknown"
