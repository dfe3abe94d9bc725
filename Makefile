# Every target works on a fresh checkout: .venv is made and filled when it is missing or out of date.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PYTEST := OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python -m pytest

.PHONY: demo test test-slow test-triples test-lowest check format bench wheel clean

demo: $(VENV)/.installed  ## fine-tune SmolLM2-135M on the quickstart task
	$(BIN)/lowmem fetch smollm2
	$(BIN)/lowmem train recipes/quickstart.yaml

test: $(VENV)/.dev  ## the tests, under 20 minutes on 2 cores
	$(PYTEST) -n 2 --dist worksteal -m "not slow and not triples"

test-slow: $(VENV)/.dev  ## the tests that need the real weights or more minutes
	$(BIN)/lowmem fetch smollm2
	$(PYTEST) -m slow

test-triples: $(VENV)/.dev  ## every allowed triple of strategies
	$(PYTEST) -n 2 -m triples

test-lowest:  ## the tests with the lowest versions that pyproject.toml promises
	$(PYTHON) -m venv .venv-lowest
	.venv-lowest/bin/pip install -q -e '.[dev]' -c constraints-lowest.txt
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 .venv-lowest/bin/python -m pytest -n 2 -m "not slow and not triples"

check: $(VENV)/.dev  ## format, lint, spelling, types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/codespell
	$(BIN)/mypy

format: $(VENV)/.dev  ## put everything in shape
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/.dev  ## the benchmarks against a plain loop and against TRL (an otherwise idle machine, about an hour)
	$(BIN)/pip install -q -e '.[benchmark]' -c constraints.txt
	$(BIN)/python benchmarks/loop_overhead.py
	$(BIN)/python benchmarks/versus_trl.py

wheel: $(VENV)/.dev  ## dist/lowmem-*.whl
	$(BIN)/pip wheel -q --no-deps -w dist .

clean:
	rm -rf $(VENV) .venv-lowest dist build

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "lowmem needs Python 3.11 or newer: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -e . -c constraints.txt
	touch $@

$(VENV)/.dev: $(VENV)/.installed
	$(BIN)/pip install -q -e '.[dev]' -c constraints.txt
	touch $@
