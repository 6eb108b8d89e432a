"""The page of a report: one file, which a browser draws offline and a reader clicks through."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import streambp_fx
from streambp_fx.explaining.explanation import Explanation
from tests.browser import Page, find_browser, open_browser
from tests.own_models import NanoGPT

BROWSER = find_browser()
needs_browser = pytest.mark.skipif(BROWSER is None, reason="there is no Chromium to open it in")


class WithBarrier(nn.Module):
    """A model of six equal layers, with an op that mixes tokens behind the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.model = NanoGPT(layers=6)

    def forward(self, ids: Tensor) -> Tensor:
        mixed = self.model.token(ids).flip(1).cumsum(1)
        return self.model(ids, ids) + 1e-3 * (mixed**2).mean()


@pytest.fixture(scope="module")
def explained() -> Explanation:
    ids = torch.zeros(2, 50, dtype=torch.int64)
    return streambp_fx.explain(
        WithBarrier(), ids, options={"chunk_size": 16, "compile_bodies": False}, peers=("eager",)
    )


@pytest.fixture(scope="module")
def path(explained: Explanation, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return explained.to_html(tmp_path_factory.mktemp("page") / "report.html")


def test_the_page_refers_to_nothing_outside_of_itself(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    # The namespace of SVG is a name, which no browser fetches.
    addresses = set(re.findall(r"https?://[^\"'\s]+", text))
    assert addresses == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"<(link|img|iframe)\b|<script[^>]+\bsrc=|@import|url\(", text)


def test_what_the_user_wrote_can_not_end_the_script(explained: Explanation, tmp_path: Path) -> None:
    name = "f</script><script>alert(1)</script><!--"
    page = dataclasses.replace(explained, program=name).to_html(tmp_path / "page.html")
    text = page.read_text(encoding="utf-8")
    assert text.count("</script>") == 2
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert data is not None
    assert json.loads(data[1].replace("<\\!--", "<!--"))["program"] == name


@pytest.fixture(scope="module")
def page(path: Path, tmp_path_factory: pytest.TempPathFactory) -> Page:
    assert BROWSER is not None
    with open_browser(BROWSER, tmp_path_factory.mktemp("profile")) as opened:
        opened.open(path)
        yield opened


def count(page: Page, selector: str) -> int:
    return page.value(f"document.querySelectorAll({json.dumps(selector)}).length")


@needs_browser
def test_each_loop_is_drawn_as_a_loop(page: Page, explained: Explanation) -> None:
    assert page.problems == []
    regions = [region for graph in explained.graphs for region in graph.regions]
    assert count(page, "details.loop") == len(regions) > 8
    assert count(page, "details.loop svg.arrow") == len(regions)
    descending = sum(region.order == "descending" for region in regions)
    labels = page.value("[...document.querySelectorAll('svg.arrow')].map((a) => a.textContent)")
    assert sum("last to first" in label for label in labels) == descending > 0
    assert all("4 chunks" in label for label in labels)


@needs_browser
def test_a_loop_opens_and_shows_its_body(page: Page, explained: Explanation) -> None:
    regions = [region for graph in explained.graphs for region in graph.regions]
    loop = "#loop-" + next(region.name for region in regions if region.order == "descending")
    assert count(page, f"{loop} .inside") == 0
    page.click(f"{loop} > summary")
    wait_for(page, f"document.querySelector('{loop} .inside') !== null")
    page.click(f"{loop} .ops > summary")
    wait_for(page, f"document.querySelector('{loop} .ops').open")
    shown = page.value(f"document.querySelector('{loop} .inside').innerText")
    assert "Why this order is valid" in shown
    assert re.search(r"v0 = aten\.\w+", shown) and "[2, c, " in shown
    assert nothing_is_cut(page, f"{loop} *")
    page.click(f"{loop} > summary")
    wait_for(page, f"!document.querySelector('{loop}').open")


def nothing_is_cut(page: Page, selector: str) -> bool:
    """Whether all that is in the elements is seen without scrolling them."""
    cut = "(e) => e.scrollWidth > e.clientWidth + 1 && getComputedStyle(e).display !== 'inline'"
    return page.value(f"![...document.querySelectorAll({json.dumps(selector)})].some({cut})")


@needs_browser
@pytest.mark.parametrize("width", [420, 1000])
def test_the_page_is_as_wide_as_its_window(page: Page, width: int) -> None:
    page.resize(width)
    assert page.value("document.documentElement.scrollWidth") <= width
    page.resize(None)


@needs_browser
def test_an_axis_has_round_steps_of_one_unit(page: Page) -> None:
    plots = "[...document.querySelectorAll('.plot')]"
    label = "t.getAttribute('text-anchor') === 'end'"
    for labels in page.value(
        f"{plots}.map((p) => [...p.querySelectorAll('text')].filter((t) => {label})"
        ".map((t) => t.textContent))"
    ):
        first, *others = labels
        assert first == "0" and len(others) >= 2
        assert len({text.split()[1] for text in others}) == 1
        sizes = [float(text.split()[0]) for text in others]
        assert f"{sizes[0]:e}"[:5] in ("1.000", "2.000", "5.000")
        assert sizes == pytest.approx([sizes[0] * number for number in range(1, len(sizes) + 1)])


@needs_browser
def test_equal_segments_share_a_row(page: Page) -> None:
    names = page.value("[...document.querySelectorAll('.layer-name')].map((e) => e.textContent)")
    assert names == ["segment 0", "segment 1", "segments 2 to 6", "segment 7, head"]


@needs_browser
def test_equal_segments_of_one_graph_are_folded_until_asked_for(
    page: Page, tmp_path: Path, path: Path
) -> None:
    ids = torch.zeros(2, 50, dtype=torch.int64)
    options = {"chunk_size": 16, "compile_bodies": False}
    with torch.no_grad():  # a step without gradients is one graph
        whole = streambp_fx.explain(NanoGPT(layers=5), ids, ids, options=options, peers=())
    page.open(whole.to_html(tmp_path / "whole.html"))
    hidden = "[...document.querySelectorAll('.layers > .cell')].filter((c) => c.hidden).length"
    assert page.value(hidden) > 0
    page.click("button.unfold")
    wait_for(page, f"{hidden} === 0")
    page.open(path)


@needs_browser
def test_barriers_are_red_and_at_their_place(page: Page, explained: Explanation) -> None:
    forward = sum(not barrier.backward for barrier in explained.barriers)
    assert forward == 2 and len(explained.barriers) == 6
    assert count(page, ".cell.forward .barrier") == forward
    assert count(page, ".cell.backward .barrier") == 4
    assert count(page, ".barrier") == len(explained.barriers)  # each is told once
    # They stand with the embedding that they read, in both directions.
    assert count(page, "#loop-segment0 ~ .barrier") == forward
    assert count(page, "#loop-stage0 ~ .barrier") == 4
    told = page.value("document.getElementById('known').innerText")
    assert "2 in forward and 4 in backward" in told
    color = "getComputedStyle(document.querySelector('.layers .barrier')).color"
    assert page.value(color) == "rgb(179, 38, 30)"
    shown = page.value("document.querySelector('.layers .barrier').innerText")
    assert "test_explain_page.py" in shown and "mixes tokens" in shown


@needs_browser
def test_the_timeline_tells_what_is_pointed_at(page: Page, tmp_path: Path) -> None:
    assert count(page, "#after svg polygon") >= 5 and count(page, "#before svg polyline") == 2
    told = "document.getElementById('told').innerText"
    at_peak = page.value(told)
    page.value("document.getElementById('after').scrollIntoView({block: 'center'})")
    x, y, width = page.value(
        "(r => [r.x, r.y + r.height / 2, r.width])"
        "(document.querySelector('#after svg').getBoundingClientRect())"
    )
    page.point_at(x + 0.3 * width, y)
    wait_for(page, f"{told} !== {json.dumps(at_peak)}")
    highest = "[...document.querySelectorAll('#after svg text')].map((t) => t.textContent).join()"
    before = page.value(highest)
    page.click("#one-scale")
    wait_for(page, f"{highest} !== {json.dumps(before)}")
    picture = tmp_path / "page.png"
    page.screenshot(picture)
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and picture.stat().st_size > 20_000


@needs_browser
def test_the_step_ends_with_what_it_began_with(page: Page) -> None:
    ends = page.value("data.courses.map((course) => course.bytes.at(-1) / data.peak.bytes)")
    assert len(ends) == 2 and all(end < 0.05 for end in ends)


@needs_browser
def test_a_legend_has_what_is_in_the_picture(page: Page) -> None:
    shown = page.value("document.querySelectorAll('#after svg polygon').length")
    assert page.value("document.querySelectorAll('.panel .legend')[0].childElementCount") == shown
    most = page.value(
        "Object.keys(data.colors).map((term) => Math.max(...data.timeline.map("
        "(moment) => moment.terms[term] || 0)) / data.peak.bytes)"
    )
    assert min(most) > 1 / 300


@needs_browser
def test_nothing_is_fetched(page: Page) -> None:
    assert page.requests and all(url.startswith("file:") for url in page.requests)
    assert page.problems == []


@needs_browser
def test_a_fused_head_says_where_its_backward_is(page: Page, tmp_path: Path) -> None:
    ids = torch.zeros(2, 50, dtype=torch.int64)
    options = {"chunk_size": 16, "compile_bodies": False}
    fused = streambp_fx.explain(NanoGPT(layers=1), ids, ids, options=options, peers=())
    assert fused.graphs[-1].head_fused
    page.open(fused.to_html(tmp_path / "fused.html"))
    (head,) = [region.name for region in fused.graphs[-1].regions if region.head]
    note = page.value("document.querySelector('.cell.backward .note').innerText")
    assert f"Runs in the loop of its forward, {head}" in note
    assert page.problems == []


def wait_for(page: Page, condition: str) -> None:
    """Until the condition holds: what a click causes may come a moment later."""
    page.call(
        "Runtime.evaluate",
        expression="new Promise((done) => { let left = 200; const look = () => "
        f"({condition}) || left-- <= 0 ? done() : setTimeout(look, 25); look(); }})",
        awaitPromise=True,
    )
    assert page.value(condition), condition
