# Two commands matter: `make demo` and `make test`. Each sets up what it needs in .venv and asks for nothing else.
PYTHON ?= python3
BIN := .venv/bin
# One torch thread per test process: on a busy machine more threads make everything several times slower.
TEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest

.PHONY: setup demo test test-fast lint clean

setup: .venv/.ready

.venv/.ready: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 10) else "RL Swarm needs Python 3.10 or newer: make PYTHON=python3.11 ...")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "Setting up .venv: a few minutes the first time."
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: setup
	$(BIN)/rl-swarm demo

test: setup lint
	$(TEST) -n 2

test-fast: setup
	$(TEST) -n 2 -m "not torch and not slow"

lint: setup
	$(BIN)/ruff check --quiet .
	$(BIN)/ruff format --check --quiet .
	$(BIN)/mypy

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
