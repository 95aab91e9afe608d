# Everything is done inside .venv; a bare machine needs Python 3.11, pip, make and git.
PYTHON ?= python3
BIN := .venv/bin

.DEFAULT_GOAL := help
RUN ?= demo

.PHONY: help setup demo browser test test-here lint bench bench-solve bench-latency bench-importance fuzz zoo clean

help:  ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 15

setup: .venv/installed  ## make .venv and install the pinned set

# torch first and pinned: an unpinned one pulls in gigabytes of CUDA on machines that have no GPU.
.venv/installed: requirements.txt pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet $$(grep '^torch==' requirements.txt)
	$(BIN)/python -m pip install --quiet -r requirements.txt
	$(BIN)/python -m pip install --quiet --no-deps -e .
	touch $@

demo: setup  ## see it work: a small network, compressed for this machine (4 minutes; RUN=folder)
	$(BIN)/depthfold demo --run "$(RUN)"

lint: setup  ## ruff, mypy, import-linter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The report is tested in a real browser: Debian's own, from the same place as the rest of the system.
browser:  ## Debian's chromium, which the test of the report needs
	@command -v chromium >/dev/null && exit 0; \
	command -v apt-get >/dev/null || { echo "The test of the report needs chromium on the PATH: install it." >&2; exit 1; }; \
	if [ "$$(id -u)" = 0 ]; then sudo=; elif command -v sudo >/dev/null; then sudo=sudo; \
	else echo "The test of the report needs chromium. As root: apt-get install -y chromium" >&2; exit 1; fi; \
	$$sudo apt-get update -qq && $$sudo env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq chromium >/dev/null

test: lint browser  ## lint, then the test suite
	$(BIN)/python -m pytest -q -n 2

test-here:  ## the test suite with this machine's own Python (PYTHON=..., WITHOUT="ray plotly": what it lacks)
	PYTHONPATH="$(CURDIR)/src" $(PYTHON) -m pytest -q -n auto $(addprefix --without ,$(WITHOUT))

fuzz: setup  ## the property suite in its long form (1,000 cases and more each)
	HYPOTHESIS_PROFILE=long $(BIN)/python -m pytest -q -n 2 tests/properties

bench: setup  ## what is measured: trace, rewrite and merge
	$(BIN)/python benchmarks/fold.py

bench-solve: setup  ## what is measured: the solver, its time and memory as L grows
	PYTHONPATH=tests $(BIN)/python benchmarks/solve.py

bench-latency: setup  ## what is measured: predicted against measured latency on three runtimes (10 minutes, alone)
	$(BIN)/python benchmarks/latency.py

bench-importance: setup  ## what is measured: importances beyond their trainings, and two workers against one
	$(BIN)/python benchmarks/importance.py

# Without dependencies: these packages would pull in another torch, and much that no network needs.
.venv/zoo-installed: .venv/installed benchmarks/requirements-zoo.txt
	$(BIN)/python -m pip install --quiet --no-deps -r benchmarks/requirements-zoo.txt
	touch $@

zoo: .venv/zoo-installed  ## every CNN of torchvision, many of timm, some of others; writes docs/zoo.md (NETWORKS: these alone)
	$(BIN)/python benchmarks/zoo.py $(NETWORKS)

clean:  ## remove .venv and caches
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
