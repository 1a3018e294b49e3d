# make ppo                                   the default recipe, from nothing
# make ppo RECIPE=smollm2_135m_lora MODEL=/path/to/checkpoint SET="ppo.kl_coef=0.1 seed=1" RUN=my-run
# make test · make check                     the tests · lint, types and tests, as CI runs them

PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
RECIPE ?= doubling
OVERWRITE ?= 0

arguments = "$(RECIPE)" $(if $(MODEL),"base.model=$(MODEL)") $(SET) \
            $(if $(RUN),--run "$(RUN)") $(if $(filter-out 0,$(OVERWRITE)),--overwrite)

.PHONY: help env sft reward ppo recipes test lint types check format wheel clean

help:
	@sed -n 's/^# //p' Makefile

$(BIN)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	@touch $@

env: $(BIN)/.installed

sft reward ppo: $(BIN)/.installed
	@$(BIN)/toolkit $@ $(arguments)

recipes: $(BIN)/.installed
	@$(BIN)/toolkit recipes

test: $(BIN)/.installed
	$(BIN)/python -m pytest

lint: $(BIN)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(BIN)/.installed
	$(BIN)/mypy toolkit

check: lint types test

format: $(BIN)/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

wheel: $(BIN)/.installed
	$(BIN)/python -m build --wheel

clean:
	rm -rf $(VENV) dist build .pytest_cache .mypy_cache .ruff_cache
