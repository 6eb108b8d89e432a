"""``sdpa_kernel`` around or within the program is found, and said not to be honoured."""

from __future__ import annotations

from unittest import TestCase

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.backend import last_report, needs_report, streamed

pytestmark = needs_report

QKV = torch.ones(2, 2, 6, 4)


def attend(x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x, x, x, is_causal=True)


def attend_by_math(x: Tensor) -> Tensor:
    with sdpa_kernel([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION]):
        return F.scaled_dot_product_attention(x, x, x, is_causal=True)


def test_within_the_program() -> None:
    with TestCase().assertLogs("streambp_fx", "WARNING") as logged:
        streamed(attend_by_math)(QKV)
    (note,) = last_report().notes
    assert note.startswith("sdpa_kernel([MATH, FLASH_ATTENTION]) is not honoured")
    assert __file__ in note
    assert note in logged.output[0]


def test_around_the_program() -> None:
    with sdpa_kernel(SDPBackend.MATH):
        streamed(attend)(QKV)
    (note,) = last_report().notes
    assert note.startswith("sdpa_kernel([MATH]) is not honoured")


def test_nothing_is_said_without_it() -> None:
    streamed(attend)(QKV)
    assert last_report().notes == ()


def test_nothing_is_said_without_attention() -> None:
    with sdpa_kernel(SDPBackend.MATH):
        streamed(lambda x: x * 2)(QKV)
    assert last_report().notes == ()
