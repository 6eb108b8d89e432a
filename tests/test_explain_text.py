"""The report in a terminal and in a notebook: what each body is given, and nothing cut."""

from __future__ import annotations

import dataclasses
import html
import re

import pytest
import torch
from torch import Tensor, nn

import streambp_fx
from streambp_fx.explaining.explanation import Explanation
from streambp_fx.explaining.text import to_notebook, to_text
from streambp_fx.explaining.units import first_few, places_text
from tests.own_models import NanoGPT


class Turned(nn.Module):
    """Mixes tokens twice, and adds positions that the program computes."""

    def __init__(self) -> None:
        super().__init__()
        self.model = NanoGPT(layers=2)

    def forward(self, ids: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1]).unsqueeze(1)
        mixed = self.model.token(ids).flip(1).flip(1) + positions
        return self.model(ids, ids) + (mixed**2).mean()


def explain(model: nn.Module, *args: Tensor) -> Explanation:
    options = {"chunk_size": 16, "compile_bodies": False}
    return streambp_fx.explain(model, *args, options=options, peers=())


IDS = torch.zeros(2, 50, dtype=torch.int64)


@pytest.fixture(scope="module")
def turned() -> Explanation:
    return explain(Turned(), IDS)


@pytest.fixture(scope="module")
def text() -> str:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("COLUMNS", "100")
        return to_text(explain(NanoGPT(layers=2), IDS, IDS))


def rows_of(text: str, loop: str) -> dict[str, str]:
    """What the text says that a loop is given, by how."""
    part = text.split("its source lines\n", 1)[1].split("\n\n")[0]
    lines = part.splitlines()[1:]
    start = next(index for index, line in enumerate(lines) if line.startswith(loop + " "))
    rows: dict[str, str] = {}
    for line in lines[start:]:
        name, given, rest = re.match(r"(\S*) +(\d+ \w+|from)? +(.*)", line).groups()
        if name not in ("", loop):
            break
        key = given or list(rows)[-1]
        rows[key] = f"{rows.get(key, '')} {rest}".strip()
    return rows


def test_each_body_says_what_it_is_given_and_from_which_lines(text: str) -> None:
    given = rows_of(text, "segment1")
    assert given["1 chunk"] == "x" and given["2 past"] == "keys and values (x2)"
    (weights,) = [names for how, names in given.items() if how.endswith("whole")]
    assert "blocks.0.norm_1.weight" in weights and re.search(r"and \d+ more$", weights)
    assert re.match(r"own_models\.py:\d+", given["from"])
    assert any("gradient of blocks.0" in names for names in rows_of(text, "stage1_1").values())


def test_the_heads_backward_is_said_to_be_in_its_forward(text: str, turned: Explanation) -> None:
    assert "The head's backward runs in the loop of its forward, segment3." in text
    graphs = [dataclasses.replace(graph, head_fused=False) for graph in turned.graphs]
    (capture,) = turned.captures
    capture = dataclasses.replace(capture, segments=tuple(graphs))
    apart = dataclasses.replace(turned, captures=(capture,))
    assert "The head's backward" not in to_text(apart)


def test_barriers_are_told_by_line_and_direction(
    turned: Explanation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    part = to_text(turned).split("Barriers: what runs on the whole sequence\n")[1].split("\n\n")[0]
    line, *rows = part.splitlines()
    assert line.startswith("test_explain_text.py:") and "flip(1)" in line
    assert [row.split()[:3] for row in rows] == [
        ["prims.rev.default", "(x2)", "forward"],
        ["prims.rev.default", "(x2)", "backward"],
    ]


def test_a_value_of_the_program_has_the_name_of_its_variable(turned: Explanation) -> None:
    operands = {
        o.name for graph in turned.graphs for region in graph.regions for o in region.operands
    }
    assert "positions" in operands


def test_no_word_is_broken(turned: Explanation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    words = set(to_text(turned).split())
    assert "F.scaled_dot_product_attention(q," in words


def test_a_notebook_is_narrower_than_its_cell(turned: Explanation) -> None:
    shown = to_notebook(turned)
    tables = html.unescape(re.sub(r"<[^>]+>", "", shown.split("</pre>")[0]))
    assert max(map(len, tables.splitlines())) <= 100
    # Else a browser takes 16 pixels, and 100 columns are wider than most cells.
    assert shown.count("<pre") == shown.count("font:13px")


def test_lists_are_short() -> None:
    assert first_few(["a", "b", "c", "d"]) == "a, b, c, d"
    assert first_few(["a", "b", "c", "d", "e"]) == "a, b, c and 2 more"
    frames = [f'File "/x/{name}.py", line {line}, in f: y' for name, line in (
        *(("m", 9), ("m", 7), ("n", 1), ("m", 8), ("m", 30)),
    )]  # fmt: skip
    assert places_text([*frames, "source line unknown"]) == (
        "m.py:7-9, 30; n.py:1; source line unknown"
    )
