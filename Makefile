# `make help` lists the commands.

PYTHON ?= python3
ENGINE ?= vllm
ENVIRONMENTS = $(PYTHON) deploy/local/environments.py
DEV = .quartet/envs/dev/bin
FAST = lint protos common reward reward-model client deploy docs hostile chaos attacks resume upgrade hosts mutations

.DEFAULT_GOAL := help
.PHONY: help demo check test mutations flakes lint format bench learn chaos resume fuzz soak hostile agreement folders
.PHONY: families gpu release clean

help:
	@echo 'make demo [ENGINE=transformers]   train a small model with all four services on this machine'
	@echo 'make check                        lint, types and the tests that start no engine, in a minute'
	@echo 'make test [SUITES="broker ..."]   all tests, or some suites; tests/run.py --list names them'
	@echo 'make test T=path::name            one test, in its environment'
	@echo 'make mutations [M="broker/*"]     mutation tests: do the tests catch each patch of tests/mutations?'
	@echo 'make flakes [RUNS=20]             repeat the faster suites, with two other processes that load the CPU'
	@echo 'make lint                         ruff, import-linter, mypy, buf lint, buf breaking'
	@echo 'make format                       format with ruff and buf, regenerate docs'
	@echo 'make bench [BENCHMARKS=broker]    benchmarks within an hour, each against a named peer or limit; --all: more'
	@echo 'make learn [LEARN="ppo grpo"]     learning curves of every algorithm, 3 seeds each (docs/learning.md)'
	@echo 'make chaos [CHAOS="--seed 7"]     kill every process, lose no group (docs/chaos.md); CHAOS=--help lists options'
	@echo 'make resume [RESUME="--seed 7"]   kill the trainer 20 times in 40 steps: the weights equal those of a run without kills'
	@echo 'make fuzz [CASES=20000 MINUTES=10] random messages, 50,000 steps of the broker model, attacks on a running system'
	@echo 'make soak [ITEMS=100000]          mixed verifications, 10% hostile: does the reward service leak?'
	@echo 'make hostile                      programs, cheats and answers that attack the sandbox (docs/sandbox.md)'
	@echo 'make agreement DATA=folder        verifiers against reference answers (docs/math.md)'
	@echo 'make folders                      train and export models saved by three versions of transformers; read them with each'
	@echo 'make families                     every model family with every engine and plugin (docs/models.md)'
	@echo 'make gpu [GPU=--cpu]              check a GPU host, part by part (docs/gpu.md)'
	@echo 'make release [TO=dist]            packages, SBOMs and checksums of a release (docs/packages.md)'
	@echo 'make clean                        remove the environments and the runs'

demo:
	@began=$$(date +%s) && $(ENVIRONMENTS) broker reward rollout trainer client && \
	QUARTET_DEMO_BEGAN=$$began .quartet/envs/client/bin/python examples/arithmetic/demo.py --engine $(ENGINE)

test:
	@needed=$$($(PYTHON) tests/suites.py $(SUITES) $(if $(T),'$(T)')) && $(ENVIRONMENTS) --with-tests $$needed
	@$(DEV)/python tests/run.py $(SUITES) $(if $(T),'$(T)')

check:
	@needed=$$($(PYTHON) tests/suites.py --quick) && $(ENVIRONMENTS) --with-tests $$needed
	@$(DEV)/python tests/run.py --quick

flakes:
	@$(ENVIRONMENTS) --with-tests
	@$(DEV)/python tests/run.py --repeat $(or $(RUNS),20) --busy 2 $(or $(SUITES),$(FAST))

mutations:
	@$(ENVIRONMENTS) dev
	@$(DEV)/python tests/mutations/run.py $(foreach name,$(M),'$(name)')

lint:
	@$(ENVIRONMENTS) dev
	@$(DEV)/python tests/run.py lint protos

format:
	@$(ENVIRONMENTS) dev
	@$(DEV)/ruff check --fix --quiet . ; $(DEV)/ruff format . && $(DEV)/buf format --write protos && $(DEV)/python docs/tools/write.py

bench:
	@$(ENVIRONMENTS)
	@$(DEV)/python benchmarks/run.py $(BENCHMARKS)

chaos:
	@$(ENVIRONMENTS) broker reward dev $(if $(filter --signals --hangs --agents,$(CHAOS)),environment rollout trainer client)
	@$(DEV)/python tests/chaos/run.py $(CHAOS)

resume:
	@$(ENVIRONMENTS) broker trainer dev
	@$(DEV)/python tests/resume/run.py $(RESUME)

fuzz:
	@$(ENVIRONMENTS) --with-tests broker reward rollout trainer client dev
	@FUZZ_CASES=$(or $(CASES),20000) $(DEV)/python -m pytest -c pyproject.toml -s tests/contract/test_bad_input.py
	@MODEL_STEPS=50000 .quartet/envs/broker/bin/python -m pytest -c pyproject.toml services/broker/tests/test_model.py
	@$(DEV)/python tests/attacks/run.py --minutes $(or $(MINUTES),10)

agreement:
	@test -n '$(DATA)' || { echo 'DATA=folder is missing: the folder of the evaluation data (docs/math.md)' >&2; exit 2; }
	@$(ENVIRONMENTS) reward
	@.quartet/envs/reward/bin/python -m tests.agreement.run '$(DATA)'

folders:
	@$(ENVIRONMENTS) --with-tests trainer dev
	@$(DEV)/python tests/folders/run.py

families:
	@$(ENVIRONMENTS) --with-tests rollout trainer dev
	@FAMILIES='$(or $(F),all)' $(DEV)/python -m pytest -c pyproject.toml -v tests/families && $(DEV)/python docs/tools/write.py

soak:
	@$(ENVIRONMENTS) reward dev
	@.quartet/envs/dev/bin/python tests/soak/reward.py --items $(or $(ITEMS),100000)

hostile:
	@$(ENVIRONMENTS) --with-tests reward dev
	@$(DEV)/python tests/run.py hostile

learn:
	@$(ENVIRONMENTS) broker reward rollout trainer client
	@.quartet/envs/client/bin/python tests/learning/curves.py $(LEARN)

gpu:
	@$(ENVIRONMENTS) broker reward rollout trainer client
	@.quartet/envs/client/bin/python tests/gpu/prove.py $(GPU)

release:
	@$(ENVIRONMENTS) dev
	@$(DEV)/python deploy/release.py $(TO)

clean:
	rm -rf .quartet/envs runs
