# Every target makes its own environment: a fresh clone needs no other step.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
TRAIN_STAMP := $(VENV)/.installed-train
STAMP  := $(VENV)/.installed
SOAK_STAMP := $(VENV)/.installed-soak
DOCS_STAMP := $(VENV)/.installed-docs

# One compute thread a rank: several ranks share a machine in tests and in the demo.
export OMP_NUM_THREADS = 1
# Hundreds of processes are started: without stored bytecode each would compile Phalanx again.
export PYTHONDONTWRITEBYTECODE =

# Pure rooms, where no ranks, clusters or servers are started, and what keeps lists of the rest.
FAST := tests/test_architecture.py tests/cluster tests/config tests/hardware tests/plan \
	tests/simulate/rules tests/simulate/scenario tests/simulate/test_physics.py \
	tests/docs tests/proof tests/cli/test_commands.py tests/security/test_unpickling.py

# Rooms with properties, which a soak tries on examples of its own.
PROPERTIES := tests/cluster tests/config tests/data tests/plan tests/simulate tests/security/test_fuzz_messages.py

.PHONY: demo install test test-fast test-k8s lint style types suite docs docs-version soak proof proof-quick proof-gpu clean postgres chromium slurm mpi prometheus

demo: $(TRAIN_STAMP)
	$(BIN)/phalanx demo

# What trains, and nothing of what only tests need.
install: $(TRAIN_STAMP)
	@echo ". $(BIN)/activate"

test: style postgres chromium slurm
	@$(MAKE) --no-print-directory -j2 types suite
	$(BIN)/python -m proof --quick

suite: $(STAMP)
	$(BIN)/python -m tests.run --soaks --durations=15

# Before every push, in a minute or so.
test-fast: $(STAMP)
	$(BIN)/python -m tests.run $(FAST)

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

# An MPI program is one of those that the soak kills: Debian's Open MPI, where we may install it.
mpi:
	@if command -v mpirun >/dev/null; then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive \
			apt-get install -qq -y --no-install-recommends openmpi-bin >/dev/null; \
	else echo "Open MPI is not installed: its program will not be run"; fi

# What the server tells is read by a real Prometheus in the soak: Debian's, where we may install it.
prometheus:
	@if command -v prometheus >/dev/null; then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive \
			apt-get install -qq -y --no-install-recommends prometheus >/dev/null; \
	else echo "Prometheus is not installed: its client's parser reads instead"; fi

# The Kubernetes backend against a real API server, built once from Debian's source (minutes).
test-k8s: $(STAMP)
	bash tests/k8s/build.sh build/k8s
	$(BIN)/pytest -m k8s tests/k8s -rs --timeout=300

lint: style types

style: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(STAMP)
	$(BIN)/mypy --strict

# What docs/reference and docs/stories repeat of the code (a test fails while it is stale); then the
# site in build/site, in which a dead link is an error.
docs: $(DOCS_STAMP)
	$(BIN)/python -m docs.generator
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "build/site/index.html"

# The same beside the sites of other versions, in build/versions.
docs-version: docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m docs.versions

soak: $(SOAK_STAMP) postgres chromium slurm mpi prometheus
	$(BIN)/python -m pytest -p tests.soak_seconds -m soak --hypothesis-profile=explore --timeout=1800 -rs
	$(BIN)/pytest --hypothesis-profile=explore --timeout=600 $(PROPERTIES)

# Every claim of README and docs, measured again (docs/evidence.md). Wants quiet cores.
proof: $(SOAK_STAMP) postgres chromium slurm
	$(BIN)/python -m proof

# The short ones, which `make test` runs too.
proof-quick: $(STAMP)
	$(BIN)/python -m proof --quick

# Those that need a CUDA device.
proof-gpu: $(STAMP)
	$(BIN)/python -m proof --gpu

$(TRAIN_STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -e '.[train]'
	touch $@

$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -e '.[dev]'
	touch $(TRAIN_STAMP) $@

$(DOCS_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet -e '.[dev,docs]'
	touch $@

# Trackers and other training libraries are heavy, and only the long proof runs them.
$(SOAK_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet -e '.[dev,docs,eval,frameworks,mlflow,peers,ray,wandb]'
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
