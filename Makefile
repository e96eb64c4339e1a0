# Every target makes its own environment: a fresh clone needs no other step.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
SOAK_STAMP := $(VENV)/.installed-soak

# One compute thread a rank: several ranks share a machine in tests and in the demo.
export OMP_NUM_THREADS = 1

# Rooms with properties, which a soak tries on examples of its own.
PROPERTIES := tests/cluster tests/config tests/data tests/plan tests/simulate

.PHONY: demo test test-k8s lint soak bench clean postgres chromium slurm

demo: $(STAMP)
	$(BIN)/phalanx demo

test: lint postgres chromium slurm
	$(BIN)/pytest

# Tests of a pair of servers need a real PostgreSQL: Debian's package, where we may install it.
# Elsewhere those tests are skipped and say so.
postgres:
	@if ls /usr/lib/postgresql/*/bin/initdb >/dev/null 2>&1; then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive \
			apt-get install -qq -y --no-install-recommends postgresql >/dev/null; \
	else echo "PostgreSQL is not installed: tests of a standby will be skipped"; fi

# The page is tested in a real browser: Debian's Chromium, where we may install it.
chromium:
	@if command -v chromium >/dev/null || command -v chromium-browser >/dev/null; then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive \
			apt-get install -qq -y --no-install-recommends chromium >/dev/null; \
	else echo "Chromium is not installed: tests of the page will be skipped"; fi

# Tests of the Slurm backend run a private Slurm of real daemons on loopback.
slurm:
	@if PATH="$$PATH:/usr/sbin"; command -v slurmctld >/dev/null && command -v munged >/dev/null; then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive \
			apt-get install -qq -y --no-install-recommends slurm-wlm munge >/dev/null; \
	else echo "Slurm is not installed: tests of its backend will be skipped"; fi

# The Kubernetes backend against a real API server, built once from Debian's source (minutes).
test-k8s: $(STAMP)
	bash tests/k8s/build.sh build/k8s
	$(BIN)/pytest -m k8s tests/k8s -rs --timeout=300

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy --strict

soak: $(SOAK_STAMP) postgres chromium slurm
	$(BIN)/pytest -m soak --hypothesis-profile=explore --timeout=1800 -rs
	$(BIN)/pytest --hypothesis-profile=explore --timeout=600 $(PROPERTIES)

# What each one measures: benchmarks/README.md.
bench: $(STAMP)
	$(BIN)/python -m benchmarks.first_step
	$(BIN)/python -m benchmarks.overlap
	$(BIN)/python -m benchmarks.data
	$(BIN)/python -m benchmarks.data_store
	$(BIN)/python -m benchmarks.tokenizing
	$(BIN)/python -m benchmarks.cluster
	$(BIN)/python -m benchmarks.detection --days 1 --trials 1
	$(BIN)/python -m benchmarks.checkpoint
	$(BIN)/python -m benchmarks.checkpoint_scale
	$(BIN)/python -m benchmarks.checkpoint_size
	$(BIN)/python -m benchmarks.placement
	$(BIN)/python -m benchmarks.queue_decisions
	$(BIN)/python -m benchmarks.simulate
	$(BIN)/python -m benchmarks.page
	@if $(BIN)/python -c "import sys, torch; sys.exit(not torch.cuda.is_available())"; then \
		$(BIN)/python benchmarks/speed.py; \
	else \
		echo "skipped: benchmarks/speed.py needs a CUDA device"; \
	fi

$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -e '.[dev]'
	touch $@

# The trackers are heavy, and only the long proof runs them.
$(SOAK_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet -e '.[dev,mlflow,ray,wandb]'
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
