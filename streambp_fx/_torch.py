"""The one home of private torch APIs.

Everything that this project uses of torch and that torch does not document as public is imported
here, each with a line that says what for, and from here by the other modules. A release of torch
that moves or changes one of them then fails in this file and in its test, which checks every
name's existence and signature, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

# Importing it fills torch.ops.prims: iota, convert_element_type, and Inductor's own fma.
from torch._inductor import inductor_prims

# What an op overload is, to tell it from other callables.
from torch._ops import OpOverload

# Which device an event of the profiler is of.
from torch.autograd import DeviceType
from torch.profiler import profile

__all__ = ["DeviceType", "OpOverload", "allocations", "inductor_prims"]


def allocations(profiled: profile) -> Iterator[int]:
    """Bytes of each allocation (positive) and free (negative) on the CPU, in the order of time.

    The public ways to the same events add them up by op, which loses the order and with it the
    peak.

    Raises:
        RuntimeError: ``profiled`` has not run, or has not ended.
    """
    results = profiled.profiler.kineto_results if profiled.profiler else None
    if results is None:
        raise RuntimeError("a profiler has events only once its with-block has ended")
    events: list[Any] = results.events()  # torch's stub of the event lacks its memory fields
    memory = [event for event in events if event.name() == "[memory]"]
    for event in sorted(memory, key=lambda event: event.start_ns()):
        if event.device_type() == DeviceType.CPU:
            yield event.nbytes()
