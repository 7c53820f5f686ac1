# make setup | demo | test | lint | kill-loop ; each installs what it needs into .venv first.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: setup demo test lint check clean kill-loop

setup: $(STAMP)

# The stamp is newer than the two files that decide what is installed: nothing changed, nothing to do.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "oelm needs Python 3.11 or newer: make PYTHON=python3.11 $(MAKECMDGOALS)"; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(STAMP)
	@$(BIN)/oelm demo

test: $(STAMP)
	@$(BIN)/python -m pytest -n 2 --dist worksteal

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

check: test lint

# Long reliability programme: kill -9 and SIGTERM at random times, then compare the bits.
kill-loop: $(STAMP)
	@$(BIN)/python -m tests.programmes.kill_resume --kills 40 --terms 20

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache
