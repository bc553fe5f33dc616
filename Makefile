# Targets for contributors. `./make TARGET` does the same on a machine without make.

export PATH := $(PATH):$(or $(CARGO_HOME),$(HOME)/.cargo)/bin

CARGO ?= cargo
# The Python with torch: .venv if `make venv` has made one.
PYTHON ?= $(or $(wildcard .venv/bin/python),python3)
STEPS ?= 60
BUDGET ?= 50%
PAPERS ?= docs/papers.md

example := examples/gpt2
python := frontends/python

.DEFAULT_GOAL := help
.PHONY: help setup build demo test lint bench papers accuracy native wheel wheel-kernels test-python venv export

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1\t\2/p' Makefile | expand -t 14

setup: ## install what a build needs and this machine lacks
	@sh scripts/setup.sh

build: setup ## build the lighterage command and its kernel generator
	$(CARGO) build --release --locked -p lighterage-cli -p lighterage-mlir

demo: build ## train a small GPT-2 on the CPU in half its memory; STEPS=60 BUDGET=50%
	target/release/lighterage train $(example)/gpt2.pt2 --optimizer adamw --lr 1e-3 --device cpu --budget $(BUDGET) \
		--batches $(example)/batches.safetensors --steps $(STEPS) --init normal:0.02 --seed 0

test: setup ## run every test of the workspace
	$(CARGO) test --workspace --locked
	$(CARGO) build --locked -p lighterage-alloc
	@if command -v $(PYTHON) >/dev/null; then \
		$(PYTHON) runtime/allocator/tests/abi.py target/debug/liblighterage_alloc.so; \
	else \
		echo 'test: abi.py skipped, there is no $(PYTHON)'; \
	fi

lint: ## formatting, clippy, documentation, crate dependencies and structure, warnings as errors
	@sh scripts/setup.sh lint
	sh scripts/check_arrows.sh
	$(CARGO) run --quiet --locked -p lighterage-structure
	$(CARGO) fmt --all --check
	$(CARGO) clippy --workspace --all-targets --locked -- -D warnings
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --workspace --no-deps --locked
	@if $(CARGO) deny --version >/dev/null 2>&1; then \
		$(CARGO) deny --locked check; \
	else \
		echo 'lint: licences and advisories are not checked; `cargo install --locked cargo-deny` installs what does'; \
	fi

bench: build ## compare step times with PyTorch's on this machine; needs `make venv`
	$(PYTHON) benches/step_time.py

papers: setup ## write docs/papers.md: figures and tables of five papers, theirs beside ours; ONLY=SECTION prints one
	$(if $(ONLY),$(CARGO) bench -q --locked -p lighterage-tests --bench papers -- $(ONLY), \
		$(CARGO) bench -q --locked -p lighterage-tests --bench papers > $(PAPERS).new && mv $(PAPERS).new $(PAPERS))

accuracy: build ## compare predicted with measured peaks and step times; needs `make venv`
	$(PYTHON) benches/accuracy.py

native: setup ## build the native module of the Python package, and what its tests use in the place of a GPU
	$(CARGO) build --locked -p lighterage-python -p lighterage-standin -p lighterage-mlir
	install target/debug/lib_lighterage.so $(python)/python/lighterage/_lighterage.abi3.so

# With zig, whose linker knows the symbols of every glibc, the wheel runs on each Linux of the last ten years.
zig = $(shell $(PYTHON) -c 'import ziglang' 2>/dev/null && echo --zig --compatibility manylinux2014)

wheel: ## build the Python package as a wheel into target/wheels; needs `make venv`, and no libpython
	CARGO_ZIGBUILD_PYTHON_PATH=$(PYTHON) \
		$(PYTHON) -m maturin build --locked --manifest-path $(python)/Cargo.toml --out target/wheels $(zig)

# No manylinux has libzstd, so it is linked into the program; the linker takes the first file that it finds.
wheel-kernels: setup ## build the kernel generator as a wheel, lighterage-kernels, for systems as new as this one
	mkdir -p target/static
	ln -sf $$(cc -print-file-name=libzstd.a) $$(cc -print-file-name=libz.a) target/static/
	RUSTFLAGS="-L native=$(CURDIR)/target/static" $(PYTHON) -m maturin build --locked \
		--manifest-path codegen/mlir/Cargo.toml --out target/wheels

test-python: ## test the Python package; skipped where torch is not installed
	@if $(PYTHON) -c 'import mypy, pytest, ruff, torch' 2>/dev/null; then \
		set -ex; \
		$(MAKE) native; \
		$(PYTHON) -m ruff check --config $(python)/pyproject.toml $(python) examples benches; \
		$(PYTHON) -m ruff format --check --config $(python)/pyproject.toml $(python) examples benches; \
		MYPYPATH=$(python)/python:$(python)/tests:$(example) \
			$(PYTHON) -m mypy --config-file $(python)/pyproject.toml $(python)/python $(python)/tests $(example) benches; \
		PYTHONPATH=$(python)/python $(PYTHON) -m mypy.stubtest lighterage._lighterage; \
		$(PYTHON) -m pytest $(python); \
	else \
		echo 'test-python: skipped, $(PYTHON) lacks torch or the tools; `make venv` installs them'; \
	fi

venv: ## install the packages that the Python package and its tests need into .venv
	python3 -m venv .venv
	.venv/bin/pip install --quiet -r $(python)/requirements-dev.txt

export: export PYTHONPATH := $(python)/python:$(example)
export: ## write the example's graph and batches and the dropout fixture again; needs `make venv`
	$(PYTHON) $(example)/data.py
	$(PYTHON) $(example)/export.py
	$(PYTHON) $(python)/tests/fixtures.py
