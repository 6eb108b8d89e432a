"""The backend's options: names, what is accepted, and defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, get_origin

import torch

from ._torch import inductor_config

MODES = ("default", "max-autotune-no-cudagraphs", "max-autotune")
BARRIER_ACTIONS = ("warn", "error", "ignore")
_NO_CUDA_GRAPHS = "CUDA graphs can not hold loops whose length is known at run time"


class OptionError(ValueError):
    """A wrong option name or value; the message says what is accepted."""


@dataclass(frozen=True)
class Options:
    """What ``torch.compile(..., backend="streambp", options={...})`` accepts.

    chunk_size
        Tokens of each row in one chunk of the layers' loops, and of the head's where
        ``head_chunk_size`` is ``None``; ``None`` chooses from the shapes.
    head_chunk_size
        The same for the loop that holds the logits alone; ``None`` takes ``chunk_size``'s.
    accumulation_dtype
        Dtype of sums over chunks of bf16 and fp16 values; ``None`` sums in the values' own dtype.
    on_barrier
        What to do where a part of the graph can not be streamed: ``"warn"``, ``"error"`` or
        ``"ignore"``.
    keep_outputs
        Return logits and caches as ordinary tensors, at their full memory cost.
    compile_bodies
        ``False`` runs loop bodies op by op instead of through Inductor.
    inductor
        Every other option, passed on to Inductor for the bodies.
    """

    chunk_size: int | None = None
    head_chunk_size: int | None = None
    accumulation_dtype: torch.dtype | None = torch.float32
    on_barrier: str = "warn"
    keep_outputs: bool = False
    compile_bodies: bool = True
    inductor: Mapping[str, Any] = field(default_factory=dict)


OWN_NAMES = tuple(name for name in Options.__dataclass_fields__ if name != "inductor")


def parse_options(options: Mapping[str, Any] | None, mode: str | None = None) -> Options:
    """Check and complete the options of one ``torch.compile`` call.

    Raises:
        OptionError: an unknown name, or a value of the wrong type or range.
    """
    own: dict[str, Any] = {}
    inductor: dict[str, Any] = _mode_settings(mode)
    known = inductor_config.get_config_copy()
    for name, value in dict(options or {}).items():
        inductor_name = str(name).replace("-", "_")
        if name in OWN_NAMES:
            own[name] = _checked(name, value)
        elif inductor_name in known:
            inductor[inductor_name] = _checked_by_inductor(inductor_name, value)
        else:
            raise OptionError(
                f"unknown option {name!r} for backend='streambp'; accepted are "
                f"{', '.join(OWN_NAMES)}, and the options of torch._inductor.config"
            )
    return Options(**own, inductor=inductor)


def _mode_settings(mode: str | None) -> dict[str, Any]:
    if mode is None:
        return {}
    if mode not in MODES:
        raise OptionError(
            f"unknown mode {mode!r} for backend='streambp'; accepted are {', '.join(MODES)} "
            f"({_NO_CUDA_GRAPHS})"
        )
    if mode == "default":
        return {}
    settings = dict(torch._inductor.list_mode_options(mode))
    settings.pop("triton.cudagraphs", None)
    return settings


def _checked_by_inductor(name: str, value: Any) -> Any:
    """``value``, where ``torch.compile`` would take it as Inductor's option of that name."""
    if name == "triton.cudagraphs" and value:
        raise OptionError(f"option {name}={value!r}: expected False; {_NO_CUDA_GRAPHS}")
    accepted: Any = inductor_config.get_type(name)  # type: ignore[attr-defined]
    if get_origin(accepted) is None and not isinstance(value, accepted):
        raise OptionError(f"option {name}={value!r}: expected {accepted.__name__}")
    return value


def _checked(name: str, value: Any) -> Any:
    def fail(accepted: str) -> OptionError:
        return OptionError(f"option {name}={value!r}: expected {accepted}")

    if name in ("chunk_size", "head_chunk_size"):
        if value is not None and (
            isinstance(value, bool) or not isinstance(value, int) or value < 1
        ):
            raise fail("a number of tokens of at least 1, or None for the default")
    elif name == "accumulation_dtype":
        if value not in (None, torch.float32, torch.float64):
            raise fail("torch.float32, torch.float64, or None for the values' own dtype")
    elif name == "on_barrier":
        if value not in BARRIER_ACTIONS:
            raise fail(f"one of {', '.join(map(repr, BARRIER_ACTIONS))}")
    elif not isinstance(value, bool):
        raise fail("True or False")
    return value
