# One environment, made from the locks in requirements/, serves everything below.
IS_3_11 := import sys; sys.exit(sys.version_info[:2] != (3, 11))
PYTHON ?= $(or $(shell for p in python3.11 python3; do $$p -c '$(IS_3_11)' 2>/dev/null && echo $$p && break; done),python3)
VENV := .venv
RUN := $(VENV)/bin/python
# Of several Pythons the fastest, unless PYTHON says which.
BOOT := $(PYTHON) deploy/local/bootstrap.py $(if $(filter file,$(origin PYTHON)),--fastest)
FUZZED ?= 2000
CHECKED := pdproxy connector deploy tests

.DEFAULT_GOAL := help
.PHONY: help env demo images test lint unit tooling unit-connector unit-proxy soak e2e test-long test-python test-upstream test-differential fuzz bench bench-engines bench-plan record generate docs release lock clean

help: ## show this
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{ printf "  make %-13s %s\n", $$1, $$2 }'

env: ## make or mend .venv (everything else does this by itself)
	@$(BOOT)

demo: env ## start two engines and the proxy, ask a question, stay up (ONCE=1: end after the answer; NODES=1: one engine that does both)
	@exec $(RUN) -m deploy.local.demo $(if $(filter 1,$(ONCE)),--once) $(if $(NODES),--nodes $(NODES))

images: env ## build the proxy's and the CPU node's image (docker or podman), try them and compose's cpu profile (OPTIONS=--help)
	@exec $(RUN) -m deploy.images $(OPTIONS)

test: lint unit tooling soak e2e ## everything that must pass

lint: env ## format, style, types, import contracts, workflows
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy --num-workers 2
	$(VENV)/bin/lint-imports
	$(VENV)/bin/actionlint -shellcheck $(VENV)/bin/shellcheck

# What measures how long others wait, or what something costs, or works whole processes hard, needs cores of its own: it
# runs after the soak, one after another.
MEASURED := tests/app/test_held_bodies.py tests/app/test_memory.py tests/bench/test_blocked.py tests/bench/test_stalls.py tests/bench/test_sweep.py \
	tests/connector/test_low_cpu_agent.py tests/connector/test_side_channel_attacks.py tests/legs/test_blocked.py \
	tests/orchestration/test_flood.py tests/planning/test_plan_cost.py
# What imports vLLM runs apart: loading it takes eight seconds of CPU. Of the connector's tests those that need no vLLM
# are in the other half; a new file is taken to need it.
NEED_NO_VLLM := $(wildcard $(patsubst %,tests/connector/test_%.py,adapters checkpoint config counters fingerprint \
	hand_overs journal keep_orders leases liveness messages metadata_requests model_settings notifs peer_engines peers \
	prompt_digest resolver resume_order side_channel ticket transfer_params verifier zmtp))
WITH_VLLM := $(filter-out $(NEED_NO_VLLM) $(MEASURED),$(wildcard tests/connector/test_*.py)) tests/connector/tiers tests/vllm_compat \
	tests/seeds tests/upstream tests/events/test_vllm_publisher.py
# Neither the proxy nor the connector: who works on those two need not wait for it.
TOOLING := tests/helm tests/deploy tests/bench tests/test_forked_workers.py
NOT_UNIT := tests/soak tests/watch tests/e2e $(TOOLING) $(MEASURED)
# Bytecode is kept whatever the environment says: to compile the tests takes three seconds. One thread of torch, for a
# second one that spins beside it takes two more.
UNIT = env PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(RUN) -m pytest -m "not e2e and not long"
# Workers that share what was imported; more of them than cores, for many tests wait. Those that wait longest go first.
WORKERS = -p tests.forked_workers --workers
WAIT_LONGEST := tests/server tests/app
WITHOUT_VLLM = $(filter-out $(WAIT_LONGEST) $(WITH_VLLM) $(NOT_UNIT) tests/__pycache__,$(patsubst %/,%,$(wildcard tests/*/)) $(wildcard tests/test_*.py))

unit: env ## tests of proxy and connector without engines (a minute on two cores, more where others use them)
	@$(MAKE) --no-print-directory -j2 unit-connector unit-proxy

unit-proxy:
	@nice -n 5 $(UNIT) $(WORKERS) 5 $(addprefix --ignore=,$(WITH_VLLM) $(MEASURED)) $(WAIT_LONGEST) $(WITHOUT_VLLM)

unit-connector:
	@$(UNIT) $(WORKERS) 3 $(WITH_VLLM)

tooling: env ## tests of chart, compose, images, launcher, bench (half a minute)
	@$(UNIT) $(WORKERS) 3 $(addprefix --ignore=,$(MEASURED)) $(TOOLING)

# What an operator sees takes little CPU and waits long, so it goes beside the soak that measures nothing.
soak: env ## mixed load on fake nodes under random kills, and with KV events that are wrong; attacks, what an operator sees (three minutes; 15 in test-long)
	SOAK_SECONDS=120 $(RUN) -m pytest $(WORKERS) 2 tests/soak/test_soak.py tests/watch
	$(RUN) -m pytest tests/soak/test_hostile_soak.py $(MEASURED)

# Those outside tests/e2e are found by their mark: to list all others too takes eight seconds.
E2E = tests/e2e $(shell grep -rlF mark.e2e tests --include='test_*.py')
# Bytecode is kept, as by the unit tests: otherwise every engine compiles the connector anew.
e2e: env ## tests with real engines (ten minutes)
	env PYTHONDONTWRITEBYTECODE= $(RUN) -m pytest -m "e2e and not long" --durations=20 $(E2E)

test-long: env ## the tests that take minutes each
	$(RUN) -m pytest -m long
	FUZZED=500 $(RUN) -m pytest -m "hypothesis and not e2e and not long"

test-python: env ## the proxy's own tests with another Python (PYTHONS=PATH), such as its image's
	$(RUN) -m tests.other_python $(PYTHONS)

test-upstream: env ## vLLM's own connector tests with our classes in the place of vLLM's (five minutes)
	$(RUN) -m tests.upstream

test-differential: env ## the same answers as vLLM alone: odd values in every field, vLLM's own entrypoint tests (15 minutes)
	$(RUN) -m pytest -s -m "e2e" tests/e2e/test_differential.py
	$(RUN) -m tests.upstream.entrypoints

fuzz: env ## property tests with FUZZED examples each (default 2000)
	FUZZED=$(FUZZED) $(RUN) -m pytest -m "hypothesis and not e2e and not long" --durations=5

bench: env ## measure the proxy beside vllm-router and smg (ten minutes; PYTHONS="PATH …": the interpreters that run it)
	$(RUN) -m deploy.bench $(addprefix --python ,$(PYTHONS))

bench-engines: env ## real engines asked by guidellm: alone, behind pdproxy, behind another router (15 minutes; ROUNDS=3: 10); WRITE=1: into docs
	$(RUN) -m deploy.bench.engines $(if $(ROUNDS),--rounds $(ROUNDS)) $(if $(filter 1,$(WRITE)),--docs docs)

bench-plan: env ## what the policies make of traces, simulated; LARGE=1: 64 + 64 nodes; RIVALS=1: beside other routers; ROLES=1: nodes of both roles beside fixed splits; WRITE=1: into docs
	$(RUN) -m $(if $(filter 1,$(ROLES)),deploy.bench.roles $(if $(filter 1,$(WRITE)),--write docs/decisions/roles-figures.md),\
		deploy.bench.plan $(if $(filter 1,$(WRITE)),--write) $(if $(filter 1,$(RIVALS)),--rivals) $(if $(filter 1,$(LARGE)),--large) \
		$(if $(TRACES),--traces $(TRACES)) $(if $(ONLY),--only $(ONLY)))

# The results name tests by version of vLLM; tables are made of them. An hour for each version.
record: env ## run the tests behind docs/tested.md on each tested vLLM, and note in docs/tested.json what passes
	$(RUN) -m pytest -p tests.recorded --record -m e2e tests/e2e/test_families.py
	$(RUN) -m pytest -p tests.recorded --record --features -m e2e tests/e2e
	for v in 0.33.0; do PYTHONPATH=$$($(RUN) -m tests.vllm_compat.overlay $$v) $(RUN) -m pytest -p tests.recorded --record --features -m e2e tests/e2e; done
	@$(MAKE) --no-print-directory generate

generate: env ## write what is made of something else: the pages of settings, commands and paths, the dashboard, the chart's copies
	$(RUN) -m deploy.generate

docs: env ## build the documentation as a site, without a warning, into .run/site
	@$(RUN) -m deploy.site

release: ## write VERSION=1.2.0 into all places and the changelog, commit, and tag; pushing the tag publishes
	$(RUN) -m deploy.release prepare $(VERSION)

# To renew: make a new environment with
#   pip install 'torch==2.13.0+cpu' -e '.[dev,kubernetes,otel]' -e './connector[cpu]'   (torch from PyTorch's CPU index)
#   pip uninstall -y torchvision torchaudio torchcodec     (CUDA builds; a text model needs none of them)
# run `make test` in it, and then:
lock: ## write requirements/*.txt from what is installed in .venv
	$(RUN) -m deploy.local.lock

clean: ## remove the environment, caches and logs
	rm -rf $(VENV) .run .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
