# Everything is installed in .venv. The machine needs Python 3.11, pip, make and git.
PYTHON ?= python3
BIN := .venv/bin

# If this is set, every process that a test starts compiles the modules of PyTorch again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
RUN ?= demo

.PHONY: help setup demo browser test pytest test-here lint bench bench-solve bench-latency bench-importance bench-int8 fuzz zoo results \
	docs clean

help:  ## show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 15

setup: .venv/installed  ## create .venv and install the pinned requirements

# Modules are compiled on first import, because compiling all of them takes a minute.
# torch first and pinned, because an unpinned one installs gigabytes of CUDA on machines without a GPU. Then two halves of
# the rest at the same time, because pip uses one core. Other systems than Linux need a few packages more.
.venv/installed: requirements.txt pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --no-compile -c requirements.txt $$(grep '^torch==' requirements.txt)
	awk '{ print > (".venv/part" NR % 2 ".txt") }' requirements.txt
	$(BIN)/python -m pip install --quiet --no-compile --no-deps -r .venv/part0.txt & part0=$$!; \
	$(BIN)/python -m pip install --quiet --no-compile --no-deps -r .venv/part1.txt && wait $$part0
	$(BIN)/python -m pip install --quiet --no-deps -e .
	$(BIN)/python -m pip check || $(BIN)/python -m pip install --quiet --no-compile -r requirements.txt
	touch $@

demo: setup  ## compress a small network for this machine (5 minutes; RUN=folder)
	$(BIN)/depthfold demo --run "$(RUN)"

lint: setup  ## run ruff, mypy and import-linter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The report is tested in a real browser.
browser:  ## install Debian's chromium, which the tests of the report need
	@command -v chromium >/dev/null && exit 0; \
	command -v apt-get >/dev/null || { echo "The tests of the report need chromium on the PATH. Install it." >&2; exit 1; }; \
	if [ "$$(id -u)" = 0 ]; then sudo=; elif command -v sudo >/dev/null; then sudo=sudo; \
	else echo "The tests of the report need chromium. As root, run: apt-get install -y chromium" >&2; exit 1; fi; \
	$$sudo apt-get update -qq && $$sudo env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq chromium >/dev/null

test: lint docs pytest  ## lint, build the documentation, run all tests (QUICK=1 leaves out the slow ones)

pytest: setup browser
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 3 --dist loadfile --no-loadscope-reorder $(if $(QUICK),-m "not slow")  # many tests wait for other processes, which have one thread each

test-here:  ## run all tests with another Python (PYTHON=..., WITHOUT="ray openvino" skips the tests that need them)
	PYTHONPATH="$(CURDIR)/src" $(PYTHON) -m pytest -q -n auto $(addprefix --without ,$(WITHOUT))

fuzz: setup  ## run the property tests with 1,500 examples each
	HYPOTHESIS_PROFILE=long $(BIN)/python -m pytest -q -n 2 tests/properties

bench: setup  ## measure trace, rewrite and merge
	$(BIN)/python benchmarks/fold.py

bench-solve: setup  ## measure time and memory of the solver as L grows
	PYTHONPATH=tests $(BIN)/python benchmarks/solve.py

bench-latency: setup  ## compare predicted and measured latency on three runtimes (10 minutes on an idle machine)
	$(BIN)/python benchmarks/latency.py

bench-importance: setup  ## compare the methods of importance, and measure the overhead of workers (10 minutes on an idle machine)
	$(BIN)/python benchmarks/importance.py

bench-int8: setup  ## compare the demo in float32 and INT8 (compresses it first: 5 minutes)
	$(BIN)/python benchmarks/int8.py

# Without dependencies, because these packages would install another torch.
.venv/zoo-installed: .venv/installed benchmarks/requirements-zoo.txt
	$(BIN)/python -m pip install --quiet --no-deps -r benchmarks/requirements-zoo.txt
	touch $@

results: setup  ## write docs/results.md from the results in experiments/
	$(BIN)/python -m experiments.equal_latency.page.write

zoo: .venv/zoo-installed  ## test all CNNs of torchvision and many others, and write docs/zoo.md (NETWORKS=... selects some)
	$(BIN)/python benchmarks/zoo.py $(NETWORKS)

# The pages keep their folders, so that links between them and to other files are the same in the repository and on the site.
PAGES := README.md ARCHITECTURE.md CONTRIBUTING.md CHANGELOG.md LICENSE CITATION.cff docs examples experiments/README.md experiments/*/README.md

docs: setup  ## write the documentation with the API reference to build/site, and check its links
	rm -rf build/pages && mkdir -p build/pages
	tar -cf - --exclude=__pycache__ $(PAGES) | tar -xf - -C build/pages
	NO_MKDOCS_2_WARNING=1 PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m mkdocs build --strict

clean:  ## remove .venv and caches
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
