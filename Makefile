# `make demo` and `make test` work in a fresh clone: each makes .venv first if it is not there.
VENV ?= .venv
PYTHON_IN_VENV := $(VENV)/bin/python
WORKERS ?= 2
PYTEST_ARGS ?=
# One thread a worker: two workers with a thread per core each are slower than one.
PYTEST = OMP_NUM_THREADS=1 $(PYTHON_IN_VENV) -m pytest -q -n $(WORKERS) --dist worksteal $(PYTEST_ARGS)

.PHONY: help venv demo test test-all lint format bench clean

help:
	@echo "make demo       memory, time and gradient error of four ways to train one small model"
	@echo "make test       the default tests (WORKERS=2, PYTEST_ARGS=...)"
	@echo "make test-all   those, and the slow ones: every model in every way, wheels, examples"
	@echo "make lint       ruff and mypy"
	@echo "make format     let ruff rewrite what lint would refuse"
	@echo "make bench      against peers: all step by step, then the head alone; hours. Goes on if stopped"

venv:
	@scripts/setup_venv.sh $(VENV) dev

demo: venv
	@$(VENV)/bin/streambp demo

test: venv
	@$(PYTEST)

test-all: venv
	@$(PYTEST) -m ""

lint: venv
	@$(PYTHON_IN_VENV) -m ruff check .
	@$(PYTHON_IN_VENV) -m ruff format --check .
	@$(PYTHON_IN_VENV) -m mypy

format: venv
	@$(PYTHON_IN_VENV) -m ruff check --fix .
	@$(PYTHON_IN_VENV) -m ruff format .

bench: venv
	@$(PYTHON_IN_VENV) -m benchmarks.peers
	@$(PYTHON_IN_VENV) -m benchmarks.head

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
