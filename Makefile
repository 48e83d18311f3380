# One command each. Everything lands in .venv/, build/, target/ and out/; nothing outside but the
# environment that test-sglang makes.
#   make demo        build what is needed and replay a small agent trace
#   make test        everything that needs no GPU; K=norm: only names that contain norm
#   make test-sglang the part of it that needs the real SGLang, which is installed into
#                    ~/.cache/lowlat once (6 GB); skipped with the reason where it cannot be had
#   make test-deep   the same as test, longer, and under sanitizers; its pieces alone are
#                    test-deep-sanitizers, test-deep-amd and test-deep-rust
#   make tidy        format, lints, tests about the tree
#   make gpu-test    on a machine with a GPU: what needs one. Where nothing can be built or fetched:
#                    make gpu-test PROGRAMS=DIR, a folder that make gpu-pack made elsewhere
#   make gpu-pack    what such a machine needs, into out/gpu-pack
#   make gpu-four    on a host with four GPUs: checks, figures and a profile of four ranks;
#                    RANKS=2: of two. Ten minutes at most, of two three; PROGRAMS as above
#   make setup build golden header abi clean
#
# CARGO_TARGET_DIR and pip's own cache are honoured. LOWLAT_CACHE=DIR keeps cargo's results there,
# by lock file and compiler, for machines that build many clones (CI); SGLang's environment and the
# compiler of the AMD code objects too, which is fetched nowhere else.

.DELETE_ON_ERROR:
.PHONY: setup build demo test test-sglang test-deep test-deep-sanitizers test-deep-amd \
  test-deep-rust tidy golden header abi \
  gpu-test gpu-pack gpu-four clean

SHELL := bash
PYTHON ?= python3
BIN := $(CURDIR)/.venv/bin
# Tests and builds find the pinned tools first.
export PATH := $(BIN):$(HOME)/.cargo/bin:$(PATH)
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PYTHONDONTWRITEBYTECODE := 1

ifneq ($(LOWLAT_CACHE),)
  CARGO_TARGET_DIR ?= $(LOWLAT_CACHE)/cargo-$(shell \
    { cat Cargo.lock; rustc -V; } | cksum | tr ' ' '-')
endif
CARGO_TARGET_DIR ?= $(CURDIR)/target
export CARGO_TARGET_DIR

# The compiler of the AMD code objects is fetched where results may be kept; without one the build
# leaves them out, and what needs a library with them is skipped. LOWLAT_HIP_CACHE=DIR: this alone.
LOWLAT_HIP_CACHE ?= $(LOWLAT_CACHE)
ifneq ($(LOWLAT_HIP_CACHE),)
  HIP_CLANG := $(LOWLAT_HIP_CACHE)/$(shell \
    sed -n 's/^PACKAGE = "\(.*\)==\(.*\)".*/\1-\2/p' cpp_kernels/cmake/amd_compile.py)
endif

BUILD := build/py
SOURCES := CMakeLists.txt pyproject.toml Cargo.toml Cargo.lock LICENSE README.md \
  $(shell find cpp_kernels python rust_dispatch -type f -not -name '*.pyc' -not -path '*/target/*')

setup: .venv/setup.done

.venv/setup.done: tests/tools/requirements.txt cpp_kernels/cmake/python_headers.py
	@command -v cargo >/dev/null || { echo "no cargo: install Rust 1.85 or newer"; exit 1; }
	@command -v c++ >/dev/null || { echo "no c++: install g++ 12 or newer"; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q -r tests/tools/requirements.txt
	@$(BIN)/python cpp_kernels/cmake/python_headers.py --fetched .venv/python-dev --fetch >/dev/null
	@touch $@

build: .venv/build.done

.venv/build.done: .venv/setup.done $(SOURCES)
	@[ -z "$(HIP_CLANG)" ] || $(BIN)/python cpp_kernels/cmake/amd_compile.py \
	  --find --fetched "$(HIP_CLANG)" --fetch >/dev/null || true
	$(BIN)/pip install --no-build-isolation --no-deps \
	  --config-settings=build-dir=$(BUILD) \
	  --config-settings=cmake.define.LOWLAT_TESTS=ON \
	  --config-settings=cmake.define.LOWLAT_HIP_FETCHED=$(HIP_CLANG) \
	  --config-settings=cmake.define.LOWLAT_PYTHON_HEADERS=$(CURDIR)/.venv/python-dev \
	  --config-settings=cmake.define.LOWLAT_CARGO_TARGET_DIR=$(CARGO_TARGET_DIR) .
	@touch $@

demo: build
	$(BIN)/lowlat replay examples/traces/small.json --model tiny-v41 --tp 2 --report out/demo

test: build
	@$(BIN)/python tests/tools/run_tests.py --build-dir $(BUILD) --filter "$(K)"

test-sglang: build
	$(BIN)/python tests/tools/run_sglang.py --filter "$(K)"

# Its pieces run alone too, and give way to whatever else the machine does.
test-deep: test test-deep-sanitizers test-deep-amd test-deep-rust

test-deep-sanitizers: setup
	cmake -G Ninja -S . -B build/asan -DCMAKE_BUILD_TYPE=Debug \
	  -DCMAKE_CXX_FLAGS="-O1 -fsanitize=address,undefined -fno-sanitize-recover=all"
	nice -n 19 cmake --build build/asan
	nice -n 19 ctest --test-dir build/asan --output-on-failure --label-exclude rust

test-deep-amd: build
	LOWLAT_AMD_DEEP=1 nice -n 19 $(BIN)/python -m pytest -rs tests/python -k amd

test-deep-rust: setup
	PROPTEST_CASES=5000 LOWLAT_SCHEDULES=100000 LOWLAT_ROUNDS=1000 \
	  nice -n 19 cargo test --workspace --locked --release

tidy: setup
	cargo fmt --all --check
	cargo clippy --workspace --all-targets --locked -- -D warnings
	PYO3_PYTHON=$(BIN)/python PYO3_BUILD_EXTENSION_MODULE=1 \
	  cargo clippy -p lowlat-py --features python --locked -- -D warnings
	RUSTDOCFLAGS="-D warnings" cargo doc -q --no-deps --locked \
	  -p lowlat-core -p lowlat-host -p lowlat-capi
	ruff check .
	ruff format --check .
	find cpp_kernels tests rust_dispatch examples -name '*.[ch]' -o -name '*.[ch]pp' -o -name '*.cu' \
	  -o -name '*.cuh' -o -name '*.hip' | grep -v /target/ \
	  | xargs clang-format --dry-run -Werror
	$(BIN)/python -m pytest tests/tidy

golden: build
	$(BIN)/python tests/tools/make_golden.py

header:
	cargo run -q --locked -p lowlat-capi --example make_header

abi: header
	LOWLAT_WRITE_ABI=1 cargo test -q --locked -p lowlat-capi --test capi_snapshot

RANKS ?= 4
ifeq ($(PROGRAMS),)
gpu-test gpu-four: build
GPU_PYTHON := $(BIN)/python
GPU_PLACE := --build-dir $(BUILD)
else
GPU_PYTHON := $(PYTHON)
GPU_PLACE := --programs $(PROGRAMS)
endif

gpu-test:
	@$(GPU_PYTHON) tests/gpu/run.py $(GPU_PLACE)

gpu-four:
	@$(GPU_PYTHON) tests/gpu/ranks.py $(GPU_PLACE) --ranks $(RANKS)

gpu-pack: build
	@$(BIN)/python tests/gpu/pack.py --build-dir $(BUILD) --to out/gpu-pack

clean:
	rm -rf build target out .venv
