# Two commands: `make demo` and `make test`. Both do all their own set-up.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Processes that tests are dealt out to, a file to one: one of them has the Spark tests, which leave a processor idle at times.
LANES ?= 3
PYTEST := $(BIN)/python -m pytest -n $(LANES) --dist loadscope
# All but the rules, which have a run of their own that measures their coverage.
REST := --ignore=tests/rules --ignore=src/thinwire/rules
QUICK := tests/unit tests/contracts tests/golden tests/conformance tests/simulated src/thinwire

# Pinned packages with their hashes, for the Pythons that all of them run on; others, and `make LOCK=`, resolve ranges.
LOCK ?= requirements.lock
LOCKED := test -n "$(LOCK)" && $(PYTHON) -c 'import sys; sys.exit(not (3, 11, 5) <= sys.version_info < (3, 12) or sys.platform != "linux")'

# What `make fuzz` runs: one target or all, with so many inputs each.
TARGET ?=
INPUTS ?= 1000000

.PHONY: demo quick test test-all checks lint types layers rules browser docs fuzz matrix spark35 release-check format clean lock audit
.PHONY: durations coverage mutations compatibility machines

demo: $(STAMP)
	$(BIN)/python examples/spark_digits.py

# For each save: what starts no process and takes two minutes.
quick: checks
	$(PYTEST) -m "not long and not processes" $(REST) $(QUICK)

# What a change needs.
test: checks browser
	$(PYTEST) -m "not long" $(REST)

# All there is: for a release, and for whoever changed what the long tests cover.
test-all: checks browser
	$(PYTEST) $(REST)

# `make test-all` again, and what each file costs in .ci/durations.json, by which tests are dealt out to lanes.
durations: checks browser
	rm -f .durations.json.*
	PYTHONPATH=.ci DURATIONS=.durations.json $(PYTEST) -p durations $(REST)
	$(BIN)/python .ci/durations.py .ci/durations.json .durations.json.*

# Lines and branches of the rooms that hold the protocol, as far as `make test` runs them, in every process it starts.
coverage: $(STAMP) browser
	$(PYTEST) -m "not long" $(REST) --cov --cov-config=.ci/coveragerc --cov-report=term --cov-report=json:.coverage.json

# Plants each of the twenty mistakes in a copy of the tree; the tests named for it must fail.
mutations: $(STAMP)
	$(BIN)/python -m tests.mutations

# docs/reference/what-works-with-what.md anew: each of its cells is a run in virtual time.
compatibility: $(STAMP)
	$(BIN)/python -m tests.compatibility

# docs/explanation/machines.md anew, from the tables of the state machines.
machines: $(STAMP)
	$(BIN)/python -m tests.machines

# Side by side: mypy takes one processor, the others one after the other less than that.
checks: $(STAMP)
	@$(MAKE) --no-print-directory --jobs 2 --output-sync=target types lint layers rules

# Known holes in what the lock pins; skipped, with the reason, where no service of them can be reached.
test-all: audit
audit: $(STAMP)
	$(BIN)/python .ci/audit.py

# The lock anew, from what is installed.
lock: $(STAMP)
	$(BIN)/python .ci/lock.py

rules: $(STAMP)
	$(BIN)/python -m pytest tests/rules src/thinwire/rules --cov=thinwire.rules --cov-fail-under=100 --cov-report=term-missing:skip-covered

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

layers: $(STAMP)
	$(BIN)/lint-imports --no-cache

# Tests of the dashboard drive a real Chromium; who may install it and has none gets it, the others skip those tests.
browser:
	@command -v chromium chromium-browser google-chrome >/dev/null || test "$$(id -u)" != 0 || ! command -v apt-get >/dev/null || \
		(apt-get install -y -qq --no-install-recommends chromium || (apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium)) >/dev/null 2>&1 || true

docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build -d site

# A slice of the tests under every Python (PYTHONS) and PySpark (SPARKS) that can be had here.
matrix: $(STAMP)
	$(BIN)/python .ci/matrix.py benchmarks/results/matrix.json

# The same against the oldest PySpark supported, with this Python alone.
spark35: $(STAMP)
	PYTHONS=$(BIN)/python SPARKS=3.5 $(BIN)/python .ci/matrix.py

# Wheels and sdists as a release has them, and the wheels in an environment that holds nothing else: thinwire first without
# its laboratory, then with it; see docs/how-to/release.md.
release-check: $(STAMP)
	rm -rf dist .release
	$(BIN)/python -m build
	$(BIN)/python -m build --outdir dist lab
	$(PYTHON) -m venv .release
	.release/bin/pip install --quiet --upgrade pip -c constraints.txt
	.release/bin/pip install --quiet -c constraints.txt "$$(ls dist/thinwire-*.whl)[spark]" pytest pytest-timeout hypothesis
	.release/bin/python .ci/installed.py "$$(mktemp -d)"
	.release/bin/pip install --quiet --no-deps dist/thinwire_lab-*.whl
	.release/bin/python .ci/installed.py --lab "$$(mktemp -d)"

# Coverage-guided, by atheris; appends to benchmarks/results/fuzz.json.
fuzz: $(STAMP)
	$(BIN)/python -c 'import atheris' 2>/dev/null || $(BIN)/pip install --quiet -c constraints.txt -e '.[fuzz]'
	$(BIN)/python -m tests.fuzz.run $(TARGET) --inputs $(INPUTS) --record

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(STAMP): pyproject.toml lab/pyproject.toml constraints.txt $(wildcard requirements.lock)
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "thinwire needs Python 3.10 or newer, this is " + sys.version)'
	$(PYTHON) -m venv $(VENV)
	if $(LOCKED); then \
		$(BIN)/python -m pip install --quiet --require-hashes --no-deps -r $(LOCK) && \
		$(BIN)/python -m pip install --quiet -c constraints.txt torch && \
		$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation -e . -e ./lab; \
	else \
		$(BIN)/python -m pip install --quiet --upgrade pip -c constraints.txt && \
		$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]' -e ./lab; \
	fi
	touch $(STAMP)

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .matrix .release .audit dist build
