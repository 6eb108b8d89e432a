"""The ways to run a training step that the benchmarks compare.

A way is written as a name and options, ``streambp:chunk_size=1024,head_chunk_size=256``:

=============== ===================================================================
``eager``       op by op
``gc``          Hugging Face gradient checkpointing, not reentrant
``compile``     ``torch.compile``
``compile+gc``  ``torch.compile`` of a model with gradient checkpointing
``streambp``    ``torch.compile`` with this package's backend
``published``   the streambp package on PyPI, see `benchmarks.published`
=============== ===================================================================

Options are those of the backend. ``compile`` takes ``activation_memory_budget``, a setting of the
process, beside Inductor's own, such as ``auto_chunker.enable``.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch._functorch.config as functorch_config
from torch import nn

from streambp_fx.backend import streambp
from streambp_fx.demo import prepare

from .published import published_step

NAMES = ("eager", "gc", "compile", "compile+gc", "streambp", "published")

BUDGET = "activation_memory_budget"


@dataclass(frozen=True)
class Way:
    """A name of `NAMES` and the options of its compilation."""

    name: str
    options: dict[str, Any]

    @classmethod
    def parse(cls, text: str) -> Way:
        """The way that ``text`` describes.

        Raises:
            ValueError: no such name, an option without a value, or options of a way without any.
        """
        name = text.partition(":")[0]
        if name not in NAMES:
            raise ValueError(f"unknown way {name!r}; there are {', '.join(NAMES)}")
        options = options_of(text)
        if options and name in ("eager", "gc"):
            raise ValueError(f"{text!r}: {name} has no options")
        return cls(name, options)

    @property
    def compiled(self) -> bool:
        """Whether its first call compiles."""
        return self.name in ("compile", "compile+gc", "streambp")

    def prepare(
        self,
        model: nn.Module,
        function: Callable[..., Any] | None = None,
        dynamic: bool | None = None,
    ) -> Callable[..., Any]:
        """``function`` (else ``model`` itself) as this way runs it.

        Checkpointing is switched on in ``model``, a transformers model. The backend is passed as a
        function, so that it is found where the package is used from its folder, not installed.

        Raises:
            ValueError: ``"published"`` of a ``function``.
            ImportError: ``"published"`` is not installed.
        """
        if self.name == "published":
            if function is not None:
                raise ValueError("the published package runs the model's own loss only")
            return published_step(model, **self.options)
        if self.name.endswith("gc"):
            prepare(model, "gc")  # type: ignore[arg-type]
        target: Callable[..., Any] = model if function is None else function
        if not self.compiled:
            return target
        options = dict(self.options)
        if self.name == "streambp":
            return torch.compile(target, backend=streambp, dynamic=dynamic, options=options)
        # No option of torch.compile: read when the joint graph is partitioned, at the first call.
        functorch_config.activation_memory_budget = options.pop(BUDGET, 1.0)
        return torch.compile(target, dynamic=dynamic, options=options or None)


def options_of(text: str) -> dict[str, Any]:
    """The options in ``text``, ``name:option=value,option=value``.

    Raises:
        ValueError: an option without a value.
    """
    options: dict[str, Any] = {}
    for item in filter(None, text.partition(":")[2].split(",")):
        option, equals, value = item.partition("=")
        if not equals:
            raise ValueError(f"{text!r}: option {option!r} has no value")
        options[option] = _value(value)
    return options


def _value(text: str) -> Any:
    """A number, a truth value or ``None`` as Python writes it, any other text as it is."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
