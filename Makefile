# Two commands for a fresh machine with Python, a C++ compiler and make:
#
#   make demo                   train and generate with a small decoder, beside eager and Inductor
#   make test                   run the tests
#
# Each makes its own virtual environment. Another torch: make test TORCH=2.15.0

PYTHON ?= python3
TORCH ?= 2.13.0
VENV := .venv-$(TORCH)
BIN := $(VENV)/bin
CONSTRAINTS := constraints/torch-$(TORCH).txt
# A cache for each torch: its kernels stay between runs and disturb nobody else's.
export TORCHINDUCTOR_CACHE_DIR ?= $(CURDIR)/$(VENV)/inductor-cache

.PHONY: demo test test-hostsim test-models test-vendor gpu lint benchmark clean

# Torch works without NumPy, which nothing here needs, and warns.
demo: export PYTHONWARNINGS := ignore:Failed to initialize NumPy:UserWarning
demo: $(VENV)/.installed
	$(BIN)/python examples/demo.py

# The tests on the simulated accelerator run beside the others: a process has one device out of PyTorch's tree.
test: $(VENV)/.installed-test
	$(MAKE) --no-print-directory test-hostsim > $(VENV)/hostsim.log 2>&1 & hostsim=$$!; \
	$(BIN)/python -m pytest $(ARGS); main=$$?; \
	wait $$hostsim; other=$$?; cat $(VENV)/hostsim.log; exit $$((main + other))

test-hostsim test-models test-vendor: export HOSTSIM_CACHE ?= $(CURDIR)/$(VENV)/hostsim
test-hostsim test-models test-vendor: export TORCHINDUCTOR_CACHE_DIR := $(TORCHINDUCTOR_CACHE_DIR)-hostsim

test-hostsim: $(VENV)/.installed-test
	$(BIN)/python -m pytest examples/hostsim/tests
	$(BIN)/python -m pytest --device hostsim

# All ten models on the simulated accelerator, of which test-hostsim runs a sample.
test-models: $(VENV)/.installed-test
	$(BIN)/python -m pytest --device hostsim -m "sweep or not sweep" tests/test_models.py

# As a vendor would: a copy of the simulated accelerator under another name, built and put to the contract.
test-vendor: $(VENV)/.installed-test
	$(BIN)/python -m pytest examples/hostsim/tests -m slow

# What only a GPU can tell. Where torch is installed already, nothing has to be: make gpu BIN=/usr/bin ARGS="--only memory"
# A machine without a GPU is told so in one line, and is no error of make's.
gpu: $(if $(filter $(VENV)/bin,$(BIN)),$(VENV)/.installed-test)
	PYTHONPATH=$(CURDIR) $(BIN)/python3 benchmarks/gpu.py $(ARGS) || test $$? -eq 77

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check fxwrap benchmarks examples tests
	$(BIN)/mypy

benchmark: $(VENV)/.installed
	$(BIN)/python benchmarks/mlp_overhead.py

$(VENV)/bin/python: $(CONSTRAINTS)
	$(PYTHON) -m venv $(VENV)
	touch $@

$(VENV)/.installed: $(VENV)/bin/python pyproject.toml $(CONSTRAINTS) constraints/common.txt
	$(BIN)/pip install --quiet --constraint $(CONSTRAINTS) --editable .
	touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(BIN)/pip install --quiet --constraint $(CONSTRAINTS) --editable ".[test]"
	touch $@

clean:
	rm -rf .venv-* build *.egg-info
