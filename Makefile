# `make help` lists the targets. Everything runs in .venv, which is rebuilt when the lock or pyproject.toml changes.
PYTHON ?= python3.11
TORCH ?= auto
ENV := .venv
RUFF := --config lib/pyproject.toml lib notebooks tests
STAMP := $(ENV)/.complete
# Relative, so that a path with spaces works.
export PATH := $(CURDIR)/$(ENV)/bin:$(PATH)
export DVC_NO_ANALYTICS := 1

.DEFAULT_GOAL := help
.PHONY: help study test lab measure vintage site env notebooks clean-notebooks benchmarks

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 18

study: env ## measure this machine, fit the models, build data/reports/index.html
	dvc repro
	@echo "report: data/reports/index.html"

test: env ## lint, types, unit, notebook, pipeline and browser tests
	ruff check $(RUFF)
	ruff format --check $(RUFF)
	cd lib && mypy
	pytest --numprocesses 2 --no-loadscope-reorder tests

lab: env ## open JupyterLab on the notebooks
	jupyter lab --LabApp.default_url=/lab/tree/notebooks

measure: env ## measure this machine again, whatever was measured before
	dvc repro machine
	dvc repro --force --single-item measure

vintage: env ## make the old frameworks' environments, all that can be made here, and measure with them
	-steptime env create --all
	steptime env list
	dvc repro
	@echo "report: data/reports/index.html"

site: env ## build the report's pages, and README's figure and table, from what is there
	dvc repro --single-item site

env: $(STAMP) ## build .venv from the lock (TORCH=auto|cpu|cuda|/path/to/wheel)

$(STAMP): lib/locks/cpu.txt lib/locks/install.py lib/pyproject.toml
	@rm -f $(STAMP)
	@$(ENV)/bin/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(ENV)
	$(ENV)/bin/python lib/locks/install.py $(TORCH)
	@touch $(STAMP)

notebooks: env ## make each notebook's .ipynb and its text equal
	steptime notebooks sync

clean-notebooks: env ## take the outputs out of the .ipynb
	steptime notebooks strip

benchmarks: env ## what the harness itself costs, and how often it calls equal cases different
	steptime benchmarks harness
	steptime benchmarks a-a
