# `make demo` and `make test` work in a fresh clone: each makes .venv first if it is not there.
VENV ?= .venv
PYTHON_IN_VENV := $(VENV)/bin/python
WORKERS ?= 2
PYTEST_ARGS ?=

.PHONY: help venv demo test test-fast lint format bench clean

help:
	@echo "make demo       memory, time and gradient error of four ways to train one small model"
	@echo "make test       all tests (WORKERS=2, PYTEST_ARGS=...)"
	@echo "make test-fast  the tests that compile no model"
	@echo "make lint       ruff and mypy"
	@echo "make format     let ruff rewrite what lint would refuse"
	@echo "make bench      the reference benchmark; results in benchmarks/results"

venv:
	@scripts/setup_venv.sh $(VENV) dev

demo: venv
	@$(VENV)/bin/streambp demo

test: venv
	@$(PYTHON_IN_VENV) -m pytest -q -n $(WORKERS) $(PYTEST_ARGS)

test-fast: venv
	@$(PYTHON_IN_VENV) -m pytest -q -n $(WORKERS) -m "not slow" $(PYTEST_ARGS)

lint: venv
	@$(PYTHON_IN_VENV) -m ruff check .
	@$(PYTHON_IN_VENV) -m ruff format --check .
	@$(PYTHON_IN_VENV) -m mypy

format: venv
	@$(PYTHON_IN_VENV) -m ruff check --fix .
	@$(PYTHON_IN_VENV) -m ruff format .

bench: venv
	@$(PYTHON_IN_VENV) -m benchmarks.reference

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
