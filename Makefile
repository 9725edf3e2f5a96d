# Each target sets up what it needs in .venv by itself; the first one takes a minute or two.

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

# Tests run side by side, each process with one thread: two ways to share the cores would fight over them.
WORKERS ?= auto

.DEFAULT_GOAL := help
.PHONY: help demo quick test check docs clean federation soak fuzz

help: ## show this
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(READY) ## compare four methods on embedded data, in under two minutes
	@$(BIN)/python -m coterie.cli.demo

# tests/conftest.py says which they are.
quick: $(READY) ## run the tests that find most mistakes soonest, in under a minute
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --quick --quiet --numprocesses $(WORKERS) --maxprocesses 8

test: $(READY) ## run the tests, but for those of `make federation`; the slowest are named at the end
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses $(WORKERS) --maxprocesses 8 -m "not processes" --durations=25

check: $(READY) ## lint, format, types, docstrings, dependency directions, house rules
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/pydoclint --quiet src/coterie
	$(BIN)/lint-imports
	$(BIN)/python -m pytest --quiet tests/project/test_house.py

# Material announces a MkDocs 2.0 that it will not work with; MkDocs is pinned, so that there is nothing to do about it.
docs: $(READY) ## build the documentation into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "site/index.html"

# They start many processes, each for a while, and would slow down the others.
federation: $(READY) ## run the tests of federations between processes, a few minutes
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m processes tests/federation

# How many of each; `make soak SCHEDULES=20` plays fewer.
SCHEDULES ?= 200
FLOWER_SCHEDULES ?= 10
MESSAGES ?= 100000
CONFIGURATIONS ?= 10000

soak: $(READY) ## play schedules of kills, cuts, full disks and garbage in federations, half an hour or more
	OMP_NUM_THREADS=1 COTERIE_SOAK=$(SCHEDULES) $(BIN)/python -m pytest --numprocesses $(WORKERS) tests/federation/test_soak.py
	OMP_NUM_THREADS=1 COTERIE_SOAK_FLOWER=$(FLOWER_SCHEDULES) $(BIN)/python -m pytest -m processes tests/federation/test_soak_flower.py

fuzz: $(READY) ## send mutated messages and read mutated configurations, ten minutes
	OMP_NUM_THREADS=1 COTERIE_FUZZ_MESSAGES=$(MESSAGES) COTERIE_FUZZ_CONFIGURATIONS=$(CONFIGURATIONS) \
		$(BIN)/python -m pytest tests/federation/test_fuzz.py

clean: ## remove caches and what the demo and the builds left; keeps .venv and runs/
	rm -rf dist site demo-runs .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find src tests benchmarks docs -name __pycache__ -type d -prune -exec rm -rf {} +

# The build backend is installed first and used as it is: pip would otherwise fetch an unpinned one for the build.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Coterie needs Python 3.11 or newer: make PYTHON=/path/to/python3.11" >&2; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "setting up .venv ..."
	@$(PIP) hatchling editables
	@$(PIP) --no-build-isolation --editable '.[data-hub,dev,federation,hf,kernels,onnx,privacy]'
	@touch $@
