# Every target makes its own environment: a fresh clone needs no other step.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

# One compute thread a rank: several ranks share a machine in tests and in the demo.
export OMP_NUM_THREADS = 1

.PHONY: demo test lint soak bench clean

demo: $(STAMP)
	$(BIN)/phalanx demo

test: lint
	$(BIN)/pytest

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy --strict

soak: $(STAMP)
	$(BIN)/pytest -m soak --timeout=1800

# The benchmarks that need no GPU; the others are described in docs/performance.md.
bench: $(STAMP)
	$(BIN)/python -m benchmarks.first_step
	$(BIN)/python -m benchmarks.overlap

$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
