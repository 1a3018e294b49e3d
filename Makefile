# make ppo                                   the default recipe, from nothing
# make ppo RECIPE=smollm2_135m_lora MODEL=/path/to/checkpoint SET="ppo.kl_coef=0.1 seed=1" RUN=my-run
# make ppo RESUME=1                          go on with a run that was stopped, with the arguments that it had
# make ppo SET="ppo.kl_coef=0.4" RUN=more-kl FROM=my-run    another PPO on the sft and reward that a run has finished
# make ppo GPUS=4                            on four GPUs together (docs/processes.md); PROCESSES=2 on a CPU
# make sft | reward                          an earlier stage alone, with the same arguments
# make q RECIPE=doubling_q                   offline Q-learning; make collect: the rated responses that it learns from
# make show | validate RECIPE=name           the recipe as resolved | checked without loading weights (toolkit check)
# make plan RECIPE=name GPU=4090             its memory and time by phase, there or (without GPU) here; GPU=24GB
# make chat | generate | eval RUN=my-run     talk to a trained policy | its answers to held-out prompts | its figures
# make judge RUN="run-a run-b" SET="judge.kind=…"   finished runs by a second reward, on one page (OUTPUT=judged.html)
# make export RUN=my-run OUTPUT=folder       its adapter; MERGE=1 for a whole checkpoint
# make recipes                               the list of recipes
# make test · make check                     the tests · lint, types and tests, as CI runs them
# make test VERSIONS=newest | oldest         the tests with the newest packages that are allowed, or the oldest
# make test CPU=plain | avx2                 the tests as on a CPU without vector instructions, or with AVX2 at most
# make smoke                                 a few tests with the packages of the newest set that differ, as CI runs them
# make test-gpu                              what only a GPU can show: float16, CUDA graphs
# make bench MODEL=/path/to/SmolLM2-135M-Instruct   this loop against stock TRL's, on a CPU (half an hour and more)
# make bench-apart MODEL=/path/to/SmolLM2-135M-Instruct   with prompts that begin with nothing in common
# make bench-slice MODEL=/path/to/SmolLM2-135M-Instruct   on two layers of Llama-3.1-8B's width (15 GB)
# make bench-growth MODEL=/path/to/SmolLM2-135M-Instruct  up to 1,024 new tokens, and 64 rollouts
# make bench-agilerl MODEL=/path/to/SmolLM2-135M-Instruct AGILERL=/path/to/environment   beside AgileRL's LLMPPO
# make bench-gpu                             an 8B-shaped random Llama in NF4 on a GPU; needs no network, no checkpoint
# make docs                                  docs/recipe_reference.md anew from the owners' classes

PYTHON ?= python3
BIN = $(VENV)/bin
constraints = constraints$(VERSIONS:%=-%).txt
limited = RECIPE MODEL SET RUN FROM OVERWRITE RESUME MERGE OUTPUT GPU GPUS PROCESSES CPU AGILERL
## What a shell exports under such a name is another's: an OVERWRITE of 1 would replace runs, and clean delete a VENV.
exported := $(strip $(foreach name,VENV VERSIONS $(filter-out CPU,$(limited)),$(if $(filter environment,$(origin $(name))),$(name))))
$(if $(exported),$(warning make does not read the exported $(exported): give it after make, as make $(firstword $(exported))=...))
$(foreach name,VERSIONS $(limited),$(eval $(name) =))
VENV = .venv$(VERSIONS:%=-%)
RECIPE = doubling
OVERWRITE = 0
RESUME = 0
MERGE = 0

## A mistyped name, or GPU for GPUS, would be passed over, and a recipe run for hours as nobody asked.
stages = sft reward ppo collect q
of_recipes = $(stages) show validate plan
RECIPE_is_for = $(of_recipes) chat generate eval judge export
MODEL_is_for = $(of_recipes) bench bench-apart bench-slice bench-growth bench-agilerl
SET_is_for = $(of_recipes) chat generate eval judge export
RUN_is_for = $(of_recipes) chat generate eval judge export
FROM_is_for = $(stages)
OVERWRITE_is_for = $(stages)
RESUME_is_for = $(stages)
GPUS_is_for = $(stages) generate eval judge
PROCESSES_is_for = $(GPUS_is_for)
GPU_is_for = plan
OUTPUT_is_for = judge export
MERGE_is_for = export
CPU_is_for = test check
AGILERL_is_for = bench-agilerl
known = $(limited) PYTHON VENV VERSIONS
given := $(foreach name,$(.VARIABLES),$(if $(filter command,$(origin $(name))),$(name)))
unknown := $(filter-out $(known),$(given))
ifneq ($(strip $(unknown)),)
$(error make knows no $(strip $(unknown)): the names are $(known). Keys of a recipe stand in SET, as SET="ppo.kl_coef=0.1")
endif
goals = $(or $(MAKECMDGOALS),help)
$(foreach name,$(filter $(limited),$(given)),$(if $(filter $($(name)_is_for),$(goals)),,\
  $(error make $(goals) does not read $(name), which is for make $($(name)_is_for))))
$(foreach name,OVERWRITE RESUME MERGE,$(if $(filter-out 0 1,$($(name))),$(error $(name) is 1, or not given)))
$(foreach name,VENV GPUS PROCESSES,$(if $(word 2,$($(name))),$(error $(name) is one word, without spaces, and "$($(name))" is given)))
$(if $(and $(GPUS),$(PROCESSES)),$(error GPUS and PROCESSES are two names of one number: give one of them))
ifneq ($(filter-out newest oldest,$(VERSIONS)),)
$(error VERSIONS is newest or oldest, or not given for the set of constraints.txt)
endif
ifneq ($(filter-out plain avx2,$(CPU)),)
$(error CPU is plain or avx2, or not given for what this machine has)
endif
$(foreach name,RECIPE MODEL RUN FROM OUTPUT GPU,$(foreach sign,$$ ` ",$(if $(findstring $(sign),$(value $(name))),\
  $(error $(name) has a $(sign) in it, which make or the shell would take for its own: call toolkit))))
ifneq ($(findstring $${,$(value SET)),)
$(error SET has a $${...} in it, which make and the shell take for a name of theirs: write it in a recipe file, or call toolkit)
endif
version_of = $(shell $(1) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
ifneq ($(and $(findstring command,$(origin PYTHON)),$(wildcard $(BIN)/python)),)
ifneq ($(call version_of,$(BIN)/python),$(call version_of,$(PYTHON)))
$(error $(VENV) has Python $(call version_of,$(BIN)/python) and $(PYTHON) is $(call version_of,$(PYTHON)): add VENV=folder, or make clean before)
endif
endif
as_on_plain = ATEN_CPU_CAPABILITY=default
as_on_avx2 = ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2

recipe = "$(RECIPE)" $(if $(MODEL),"base.model=$(MODEL)") $(if $(RUN),--run "$(RUN)")
## SET stands last: it is written as in a shell, where a # of it would take away all that follows.
arguments = $(recipe) $(if $(filter-out 0,$(OVERWRITE)),--overwrite) $(if $(filter-out 0,$(RESUME)),--resume) \
            $(if $(FROM),--from-run "$(FROM)") $(divided) $(SET)
divided = $(addprefix --processes ,$(or $(GPUS),$(PROCESSES)))
space := $(subst ,, )
## notdir takes a path with spaces for several.
as_a_space = :space:
of_recipe = $(subst $(as_a_space),$(space),$(patsubst %.yml,%,$(patsubst %.yaml,%,$(notdir $(subst $(space),$(as_a_space),$(RECIPE))))))
run = "$(or $(RUN),$(of_recipe))"

.PHONY: help env sft reward ppo collect q show validate plan chat generate eval judge export recipes test smoke test-gpu lint types check format docs wheel \
        bench bench-apart bench-slice bench-growth bench-agilerl bench-gpu clean

help:
	@sed -n 's/^# //p' Makefile

$(BIN)/.installed: pyproject.toml $(constraints)
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed, and $(PYTHON) is older: make … PYTHON=python3.12" if sys.version_info < (3, 11) else 0)'
	$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint $(constraints) --editable ".[dev]"
	@touch $@

env: $(BIN)/.installed

sft reward ppo collect q: $(BIN)/.installed
	@$(BIN)/toolkit $@ $(arguments)

show: $(BIN)/.installed
	@$(BIN)/toolkit show $(recipe) $(SET)

validate: $(BIN)/.installed
	@$(BIN)/toolkit check $(recipe) $(SET)

chat: $(BIN)/.installed
	@$(BIN)/toolkit chat $(run) $(SET)

generate: $(BIN)/.installed
	@$(BIN)/toolkit generate $(run) $(divided) $(SET)

eval: $(BIN)/.installed
	@$(BIN)/toolkit eval $(run) $(divided) $(SET)

judge: $(BIN)/.installed
	@$(BIN)/toolkit judge $(or $(RUN),"$(of_recipe)") $(if $(OUTPUT),--output "$(OUTPUT)") $(divided) $(SET)

export: $(BIN)/.installed
	@$(BIN)/toolkit export $(run) "$(or $(OUTPUT),$(error make export needs a new folder: add OUTPUT=folder))" $(if $(filter-out 0,$(MERGE)),--merge) $(SET)

plan: $(BIN)/.installed
	@$(BIN)/toolkit plan $(recipe) $(if $(GPU),--gpu "$(GPU)") $(SET)

recipes: $(BIN)/.installed
	@$(BIN)/toolkit recipes

test: $(BIN)/.installed
	$(as_on_$(CPU)) $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

## Only what differs from the installed set, before it on the path.
newer = $(shell grep -vxFf constraints.txt constraints-newest.txt | grep ==)

smoke: $(BIN)/.installed
	rm -rf $(VENV)/newer
	$(BIN)/python -m pip install --quiet --no-deps --target $(VENV)/newer $(newer)
	PYTHONPATH="$(abspath $(VENV)/newer)" $(BIN)/python -m pytest -m smoke

## Those files alone: others are imported to be looked through, and ask for what a machine that is lent may lack.
of_a_card = tests/runs/test_llama3.py tests/trainers/test_float16.py tests/models/test_graphs.py tests/models/test_packed.py
test-gpu: $(BIN)/.installed
	TOOLKIT_TESTS_ON_GPU=1 $(BIN)/python -m pytest -m card $(of_a_card)

lint: $(BIN)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(BIN)/.installed
	$(BIN)/mypy toolkit benchmarks docs/make_reference.py

check: lint types test

format: $(BIN)/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(BIN)/.installed
	$(BIN)/python -m docs.make_reference docs/recipe_reference.md

agilerl = $(if $(filter bench-agilerl,$@),--agilerl "$(or $(AGILERL),$(error make $@ needs an environment that has AgileRL: add AGILERL=/path/to/environment))")

## Without the card: its processes run on the CPU, and the precision is chosen before they start.
bench bench-apart bench-slice bench-growth bench-agilerl: $(BIN)/.installed
	CUDA_VISIBLE_DEVICES= $(BIN)/python -m benchmarks.run $(subst bench,cpu,$(@:bench-%=%)) --model "$(or $(MODEL),$(error make $@ needs a checkpoint: add MODEL=/path/to/SmolLM2-135M-Instruct))" $(agilerl)
	$(BIN)/python -m benchmarks.table

bench-gpu: $(BIN)/.installed
	$(BIN)/python -m benchmarks.gpu
	$(BIN)/python -m benchmarks.table

wheel: $(BIN)/.installed
	$(BIN)/python -m build --wheel

clean:
	rm -rf $(VENV) dist build .pytest_cache .mypy_cache .ruff_cache
