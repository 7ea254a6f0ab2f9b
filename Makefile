# `make train` in a fresh clone sets everything up and trains; `make` alone lists what there is.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: help setup train test check bench drills docs clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## /{printf "  make %-8s %s\n", $$1, $$2}' Makefile

setup: $(VENV)/.dev ## install everything for training and for the checks into .venv

train: $(VENV)/.base ## train the quickstart job on two islands on this machine
	$(BIN)/elastic train jobs/quickstart.yaml --fleet cluster_configs/local.yaml

test: setup ## unit tests, then tests that start Ray
	PATH="$(CURDIR)/$(BIN):$$PATH" scripts/test

check: setup ## lint, types, layers, module sizes, reference pages
	PATH="$(CURDIR)/$(BIN):$$PATH" scripts/check

bench: setup ## benchmarks; they write the tables in docs/
	PATH="$(CURDIR)/$(BIN):$$PATH" scripts/bench

drills: setup ## long runs with faults
	PATH="$(CURDIR)/$(BIN):$$PATH" scripts/drills

docs: setup ## write the generated pages of docs/reference
	$(BIN)/python scripts/reference_docs.py
	$(BIN)/python scripts/events_page.py

clean: ## remove .venv and caches; runs/ stays
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis .import_linter_cache *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.base: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "installing into $(VENV); torch and ray are large, this takes a few minutes"
	$(BIN)/python -m pip install --quiet -c constraints.txt -e .
	touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "installing into $(VENV) with what the checks need; this takes a few minutes"
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev,hf,tiktoken]'
	touch $(VENV)/.base $@
