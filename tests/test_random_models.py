"""Random small transformers agree with eager; see `tests.random_models`.

A failure prints a script that repeats it.
"""

from __future__ import annotations

import pytest
from hypothesis import given, note, seed, settings

from tests.random_models import Config, check, configs, script

SHARDS = 6
EXAMPLES = 300
LONG_EXAMPLES = 10_000

# One of each choice at least once, through Inductor.
COMPILED = [
    Config(),
    Config(norm="rms", activation="swiglu", positions="rotary", groups=2, heads_per_group=2),
    Config(attention="written_out", place="post", activation="relu", batch=3),
    Config(attention="bool_mask", place="sandwich", activation="silu", layers=2, length=17),
    Config(positions="alibi", groups=3, loss="sum", chunk=3),
    Config(positions="alibi", attention="written_out", groups=2, chunk=50),
    Config(positions="none", loss="label_smoothing", shift="outside", batch=2, length=9),
    Config(parallel=True, loss="z_loss", shift="pad_labels", length=23, chunk=5),
    Config(parallel=True, place="sandwich", loss="class_weights", bias=False),
    Config(loss="token_weights", tied=True, batch=2, length=31, chunk=7),
    Config(layers=3, norm="rms", tied=True, ignored=0.7, length=40, chunk=16, batch=2),
    Config(heads_per_group=2, positions="rotary", shift="outside", length=2, chunk=1),
    Config(dtype="float32", layers=2, length=33, chunk=8),
    Config(dtype="float32", norm="rms", attention="written_out", tied=True, batch=3, length=13),
    Config(parallel=True, place="post", positions="rotary", attention="bool_mask", chunk=1),
]


@pytest.mark.parametrize("shard", range(SHARDS))
def test_random_model_matches_eager(shard: int, pytestconfig: pytest.Config) -> None:
    long = pytestconfig.getoption("--long")

    @settings(max_examples=(LONG_EXAMPLES if long else EXAMPLES) // SHARDS)
    @given(configs())
    def search(config: Config) -> None:
        note(script(config))
        check(config)

    # Shards of the default run differ from each other and stay the same from run to run.
    (search if long else seed(shard)(search))()


@pytest.mark.parametrize("config", COMPILED, ids=range(len(COMPILED)))
def test_random_model_through_inductor_matches_eager(config: Config) -> None:
    check(config, compile_bodies=True)
