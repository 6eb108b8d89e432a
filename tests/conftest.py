"""What all tests share: one thread each, and how long the property tests search."""

from __future__ import annotations

import gc

import pytest
import torch
from hypothesis import HealthCheck, settings

# The default search is the same on every run, so that a red test is the change's fault; --long
# searches anew each time and prints how to reproduce what it finds.
settings.register_profile(
    "default",
    derandomize=True,
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile(
    "long",
    max_examples=10_000,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--long",
        action="store_true",
        help="search 10,000 random examples in each property test that sets no number of its own",
    )


def pytest_configure(config: pytest.Config) -> None:
    settings.load_profile("long" if config.getoption("--long") else "default")
    # Workers that each start a thread per core are slower than workers of one thread, and sums
    # that are split over threads differently differ in their last bits.
    torch.set_num_threads(1)


def pytest_collection_finish() -> None:
    # Tracing makes many objects, and each full collection would walk all that was imported.
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()
