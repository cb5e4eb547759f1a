# SPDX-License-Identifier: Apache-2.0
# Every target sets up what it needs in $(VENV) first; on repeat that takes about a second.

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
# one more than two cores have: engines that start leave some of their time
WORKERS ?= 3

BOOTSTRAP = $(PYTHON) scripts/bootstrap.py --venv $(VENV)
BIN = $(VENV)/bin
# processes that start import what others have compiled; another release's Python comes first
TEST_ENVIRONMENT = PYTHONDONTWRITEBYTECODE= $(if $(VLLM),PYTHONPATH=$(abspath $(VENV))/vllm-overlay/$(VLLM)$(if $(PYTHONPATH),:$(PYTHONPATH)))
CPP_FILES = $$(find csrc benchmarks tests -name '*.cpp' -o -name '*.h')

.DEFAULT_GOAL := help
.PHONY: help setup demo test host-tests example-tests wheel-tests aarch64-tests upstream-tests sanitize docs bench bench-smoke lint format clean

help:  ## list the targets
	@echo "usage: make TARGET [ARGS='...'] [VENV=.venv] [PYTHON=python3]"
	@sed -n 's/^\([a-z-]*\):.*## /  \1\t/p' $(MAKEFILE_LIST) | expand -t 16

setup:  ## a virtual environment with vLLM for the CPU, and the compiled extension
	@$(BOOTSTRAP)

demo: setup  ## stock vLLM against vLLM with relay, then a real model's answers; ARGS go to `vllm-relay demo`
	$(BIN)/vllm-relay demo $(ARGS)

test: setup  ## the tests, in WORKERS processes; ARGS go to pytest; VLLM=0.33.0 for those of a release
ifdef VLLM
	@$(BIN)/python scripts/vllm_overlay.py $(VLLM)
endif
	$(TEST_ENVIRONMENT) $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile \
	  --no-loadscope-reorder $(if $(VLLM),-m "vllm and not soak and not hosts") $(ARGS)

host-tests:  ## Ray Data, Spark (needs Java) and Daft ask a server, in an environment of their own
	test -x $(VENV)-hosts/bin/python || $(PYTHON) -m venv $(VENV)-hosts
	$(VENV)-hosts/bin/python -m pip install --quiet -r tests/tables/hosts/requirements.txt
	PYTHONPATH=$(CURDIR) $(VENV)-hosts/bin/python -m pytest --noconftest -m hosts tests/tables/hosts $(ARGS)

example-tests: setup  ## the scripts of examples/ with a real model (93 MB, once)
	$(BIN)/python -m pip install --quiet faiss-cpu
	$(TEST_ENVIRONMENT) $(BIN)/python -m pytest -m examples tests/examples $(ARGS)

wheel-tests: setup  ## a wheel, built, installed elsewhere and used where there is no compiler
	$(TEST_ENVIRONMENT) $(BIN)/python -m pytest -m packaging tests/packaging $(ARGS)

aarch64-tests: setup  ## kernels of aarch64 CPUs, cross-compiled and run by qemu (Debian packages)
	(command -v aarch64-linux-gnu-g++ && command -v qemu-aarch64-static) > /dev/null || \
	  { apt-get update -qq && apt-get install -y -qq g++-aarch64-linux-gnu qemu-user-static; }
	CXX=aarch64-linux-gnu-g++ $(BIN)/python setup.py build_ext --build-lib build/aarch64
	$(TEST_ENVIRONMENT) $(BIN)/python -m pytest -m aarch64 tests/attention_backends/aarch64 $(ARGS)

upstream-tests: setup  ## vLLM's own tests of its schedulers, with relay's in their place
ifdef VLLM
	@$(BIN)/python scripts/vllm_overlay.py $(VLLM)
endif
	$(TEST_ENVIRONMENT) $(BIN)/python tests/upstream/run.py

sanitize: setup  ## a random workload of the C++ index under address, undefined and thread sanitizers
	$(BIN)/python scripts/sanitize.py $(ARGS)

docs: $(VENV)-docs  ## the pages of docs/ as a site, in build/site; links are checked
	$(VENV)-docs/bin/mkdocs build --strict --quiet

$(VENV)-docs:
	$(PYTHON) -m venv $@
	$@/bin/python -m pip install --quiet mkdocs-material

bench:  ## every benchmark; writes docs/benchmarks.md
	@$(BOOTSTRAP) --extra dev
	$(BIN)/python -m benchmarks.run_all $(ARGS)

bench-smoke: setup  ## every benchmark once, small, to see that it runs
	$(TEST_ENVIRONMENT) $(BIN)/python -m benchmarks.run_all --smoke $(ARGS)

lint:  ## ruff, mypy and clang-format; changes nothing
	@$(BOOTSTRAP) --extra dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(CPP_FILES)

format:  ## rewrite the sources in the house format
	@$(BOOTSTRAP) --extra dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CPP_FILES)

clean:  ## remove what was built; $(VENV) stays
	rm -rf build dist *.egg-info vllm_relay/_C*.so .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
