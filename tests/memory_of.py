"""Memory of one training step of a demo model, predicted or measured: run as a module.

    python -m tests.memory_of predict '[{"tokens": 700, ...}, ...]'

prints a JSON list with, for each case, the peak in bytes and, if predicted, its terms. Predicting
runs no model and measuring predicts nothing, so that neither can lean on the other.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

from streambp_fx.demo import allocate_gradients, build_model, training_step
from streambp_fx.explaining.explanation import explain
from streambp_fx.measure import memory_use

HEAD_DIM = 64


def predict(case: dict[str, Any]) -> dict[str, Any]:
    """The peak by `explain`, of a model that has no weights."""
    with torch.device("meta"):
        model = _model(case)
        ids = torch.zeros(case["batch"], case["tokens"], dtype=torch.int64)
    found = explain(model, input_ids=ids, labels=ids, options=_options(case), peers=())
    return found.to_dict()["peak"]


def measure(case: dict[str, Any]) -> dict[str, Any]:
    """The peak of the third step, counted by the allocator."""
    model = _model(case)
    allocate_gradients(model)
    ids = torch.randint(0, case["vocabulary"], (case["batch"], case["tokens"]))
    torch.compiler.reset()
    call = torch.compile(model, backend="streambp", options=_options(case))
    step = training_step(model, call, ids)
    step()
    step()
    return {"bytes": memory_use(step).peak}


def _model(case: dict[str, Any]) -> Any:
    return build_model(
        layers=case["layers"],
        width=case["width"],
        vocabulary=case["vocabulary"],
        intermediate=3 * case["width"],
        heads=case["width"] // HEAD_DIM,
    )


def _options(case: dict[str, Any]) -> dict[str, Any]:
    return {"chunk_size": case["chunk"], "compile_bodies": case["compile_bodies"]}


if __name__ == "__main__":
    run = {"predict": predict, "measure": measure}[sys.argv[1]]
    outcomes = [run(case) for case in json.loads(sys.argv[2])]
    sys.stdout.write(json.dumps(outcomes))
