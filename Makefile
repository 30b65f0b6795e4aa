# Two commands for a fresh machine with Python, a C++ compiler and make:
#
#   make demo                   train and generate with a small decoder, beside eager and Inductor
#   make test                   run the tests
#
# make quick runs the tests that compile nothing (packing, passes, pipeline, plan, options): a minute, without a compiler.
# make wheel builds a wheel in dist/ and runs it in an environment that has torch and no checkout.
# make test-cuda runs torch's CUDA build without a GPU: on the device in hostcuda/, whose memory is the host's.
#
# Each makes its own virtual environment. Another torch: make test TORCH=2.15.0

PYTHON ?= python3
TORCH ?= 2.13.0
VENV := .venv-$(TORCH)
BIN := $(VENV)/bin
CONSTRAINTS := constraints/torch-$(TORCH).txt
# Kernels that were compiled once, for each torch, outside of the checkout: all runs of the tests find them, CI's too.
# tests/kernel_cache.py names the same folder. `make clean` removes it.
CACHES := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/fxwrap-tests
export TORCHINDUCTOR_CACHE_DIR ?= $(CACHES)/torch-$(TORCH)
export HOSTSIM_CACHE ?= $(CACHES)/hostsim
export HOSTCUDA_CACHE ?= $(CACHES)/hostcuda
export MINIMAL_CACHE ?= $(CACHES)/minimal
# How many processes run tests/ on the CPU at a time, and as many on the simulated accelerator; `make test` has up to two
# more, for examples/. Each compiles in itself, and with one thread.
WORKERS ?= 2
# The longest first; two at a time.
CUDA_TESTS := cuda-graphs cuda-rest cuda-checks cuda-fuzz cuda-fuzz-lazy cuda-own
TESTS := quick test test-main test-hostsim test-device test-device-rest test-own test-minimal test-models test-vendor \
	test-trainers $(CUDA_TESTS)
$(TESTS): export TORCHINDUCTOR_COMPILE_THREADS ?= 1
$(TESTS): export OMP_NUM_THREADS ?= 1
# Reading libtorch's symbols takes the usual linker longer than a kernel takes to compile: another one, if there is one.
LINKER := $(firstword $(foreach name,mold ld.lld ld.gold,$(shell command -v $(name))))
$(TESTS): export COMPILER_PATH ?= $(if $(LINKER),$(CURDIR)/$(VENV)/linker)

.PHONY: demo quick wheel hostsim gpu rehearsal lint benchmark sanitize sanitize-threads clean test-cuda cuda cuda-torch $(TESTS)

# Torch works without NumPy, which nothing here needs, and warns.
demo: export PYTHONWARNINGS := ignore:Failed to initialize NumPy:UserWarning
demo: $(VENV)/.installed
	$(BIN)/python examples/demo.py

# All at once: no core is idle until the last worker has nothing left to do.
test: $(VENV)/.installed-test hostsim
	$(MAKE) --no-print-directory --jobs 3 test-main test-device test-own test-minimal

# A test that compiles has the mark `compiler`. With this CXX one without it fails: no cache has what `false` has built.
QUICK := tests/packing tests/passes tests/features tests/graphs/test_flat.py tests/graphs/test_live_outputs.py tests/test_docs.py \
	tests/test_options.py tests/test_package.py tests/test_pipeline.py tests/test_plan_json.py tests/test_rules_table.py
quick: export CXX := false
quick: $(VENV)/.installed-test
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal -m "not compiler and not sweep" $(QUICK) $(ARGS)

test-main:
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal --no-simulated $(ARGS)

# Built once, by as many compilers as there are cores, before tests that would wait for it. Older torch has no graphs to
# offer for it, and its tests are skipped.
hostsim: $(VENV)/.installed-test
	cd examples/hostsim && ../../$(BIN)/python -W ignore -c \
		"import torch; hasattr(torch.accelerator, 'Graph') and __import__('hostsim')"

test-hostsim: $(VENV)/.installed-test hostsim
	$(MAKE) --no-print-directory --jobs 3 test-device test-device-rest test-own

# Where it is the device that decides. test-hostsim runs the other tests on it, too.
ON_DEVICE := tests/graphs tests/passes tests/features/bill tests/features/checked tests/features/suspend
ON_HOSTSIM = --device hostsim --numprocesses $(WORKERS) --dist worksteal
# A process has one device out of PyTorch's tree: these run apart from each other and from all others, and tell in the end.
test-device: chosen = $(ON_HOSTSIM) $(ON_DEVICE)
test-device-rest: chosen = $(ON_HOSTSIM) tests $(ON_DEVICE:%=--ignore %)
test-own: chosen := examples/hostsim/tests
test-minimal: chosen := examples/minimal
test-device test-device-rest test-own test-minimal:
	@$(BIN)/python -m pytest $(chosen) > $(VENV)/$@.log 2>&1; code=$$?; cat $(VENV)/$@.log; exit $$code

# All ten models on the simulated accelerator, of which test-hostsim runs a sample.
test-models: $(VENV)/.installed-test
	$(BIN)/python -m pytest --device hostsim -m "sweep or not sweep" tests/test_models.py

# Steps in transformers' Trainer and in Lightning. Once these are installed here, `make test` runs this file, too.
test-trainers: $(VENV)/.installed-test
	$(BIN)/pip install --quiet --constraint $(CONSTRAINTS) --editable ".[test,trainers]"
	$(BIN)/python -m pytest tests/features/train_step/test_trainers.py

# As a vendor would: a copy of the simulated accelerator under another name, built and put to the contract.
test-vendor: $(VENV)/.installed-test
	$(BIN)/python -m pytest examples/hostsim/tests -m slow

# torch's CUDA build, the newest that the device was made for, in an environment of its own. No wheel, no test.
CUDA_TORCH := 2.14.1
CUDA_MAKE := $(MAKE) --no-print-directory TORCH=$(CUDA_TORCH) TORCHINDUCTOR_CACHE_DIR=$(CACHES)/torch-$(CUDA_TORCH)
CUDA_LOG := $(CACHES)/test-cuda.log
test-cuda:
	@mkdir -p $(CACHES)
	@if $(CUDA_MAKE) cuda-torch > $(CUDA_LOG) 2>&1; then $(CUDA_MAKE) --jobs 2 --keep-going cuda; \
	elif grep -qE "No matching distribution found for torch==|is one without CUDA|No space left on device" $(CUDA_LOG); then \
		echo "test-cuda: skipped, torch $(CUDA_TORCH) is not to be had here as it is built for CUDA"; \
	else cat $(CUDA_LOG); exit 1; fi

# torch first and by itself: where there is no wheel, pip says that, and not that requirements are in conflict.
cuda-torch: $(VENV)/bin/python
	test -e $(VENV)/.installed-test || $(BIN)/pip install --quiet --no-deps torch==$(CUDA_TORCH)
	$(MAKE) --no-print-directory $(VENV)/.installed-test
	$(BIN)/python -m hostcuda --build

# make test-cuda CUDA_LANE="cuda-own cuda-graphs" runs these two.
CUDA_LANE := $(CUDA_TESTS)
cuda: $(CUDA_LANE)
# The limits end what hangs; beside other work a check takes several times as long.
CUDA_PYTEST = -m pytest -p hostcuda.plugin --timeout 900 -o cache_dir=$(VENV)/pytest-$@
# Triton tunes some kernels by time. What fails beside other work runs once more by itself; both are told.
cuda-own cuda-graphs cuda-rest: again = $(CUDA_PYTEST) --last-failed --last-failed-no-failures none
FUZZ := tests/fuzz/sweep.py --device gpu --sequences 100000 --minutes 2
cuda-own: chosen = $(CUDA_PYTEST) hostcuda/tests
cuda-graphs: chosen = $(CUDA_PYTEST) -m "gpu and not sweep" tests/graphs
cuda-rest: chosen = $(CUDA_PYTEST) -m "gpu and not sweep" tests --ignore tests/graphs
cuda-checks: chosen := -m hostcuda benchmarks/gpu.py --small --limit 900
cuda-fuzz cuda-fuzz-lazy: chosen := -m hostcuda $(FUZZ)
cuda-fuzz-lazy: export HOSTCUDA_LAZY := 1
cuda-fuzz-lazy: export HOSTCUDA_POISON := 1
cuda-fuzz-lazy: export HOSTCUDA_ORDER := lifo
# Each tells in the end, as it would with the terminal to itself.
$(CUDA_TESTS): $(VENV)/.installed-test
	@begin=$$(date +%s); $(BIN)/python $(chosen) > $(VENV)/$@.log 2>&1; code=$$?; \
		if test $$code = 1 && test -n '$(again)'; then \
			$(BIN)/python $(again) >> $(VENV)/$@.log 2>&1; code=$$?; fi; \
		echo "$@: $$(( $$(date +%s) - begin )) s"; cat $(VENV)/$@.log; exit $$code

# Native replay with the helper library under sanitizers, which end the process at the first error. What they say goes
# to stderr, past pytest. Python's own allocator would hide what is wrong in it, and ends with objects that it keeps.
sanitize: sanitizers := -fsanitize=address,undefined -fno-sanitize-recover=all
sanitize: export FXWRAP_NATIVE_FLAGS := -O1 -g1 -fno-omit-frame-pointer $(sanitizers)
sanitize: export TORCHINDUCTOR_COMPILE_THREADS ?= 1
sanitize: export OMP_NUM_THREADS ?= 1
sanitize: export PYTHONMALLOC := malloc
sanitize: export ASAN_OPTIONS := detect_leaks=0:halt_on_error=1
sanitize: export UBSAN_OPTIONS := halt_on_error=1:print_stacktrace=1
sanitize: $(VENV)/.installed-test
	LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libubsan.so)" $(BIN)/python \
		-m pytest --capture=sys tests/graphs/test_unit*.py tests/graphs/test_products.py \
		tests/graphs/test_partitions_end_to_end.py $(ARGS)

# Lanes under the thread sanitizer, which sees the helper library alone. It wants addresses as they always are.
sanitize-threads: export FXWRAP_NATIVE_FLAGS := -O1 -g1 -fno-inline -fno-omit-frame-pointer -fsanitize=thread
sanitize-threads: export TSAN_OPTIONS := halt_on_error=1:report_signal_unsafe=0:suppressions=$(CURDIR)/tests/openmp.tsan
sanitize-threads: $(VENV)/.installed-test
	LD_PRELOAD="$$($(CXX) -print-file-name=libtsan.so)" setarch -R $(BIN)/python -m pytest --capture=sys \
		tests/graphs/test_threads_in_lanes.py --deselect tests/graphs/test_threads_in_lanes.py::test_a_forked_child_calls $(ARGS)

# What only a GPU can tell. Where Python has a torch already, that is taken as it is, with the checkout alone: nothing is
# installed, as a machine that is lent may have no network. With TORCH=2.14.1 there is an environment for that one.
# A machine without a GPU is told so in one line, and is no error of make's.
ifeq ($(filter gpu,$(MAKECMDGOALS))$(origin TORCH),gpufile)
HAS_TORCH := $(shell $(PYTHON) -c \
	"import importlib.util as u, os, sys; u.find_spec('torch') and print(os.path.dirname(sys.executable))" 2> /dev/null)
endif
ifneq ($(HAS_TORCH),)
gpu: BIN := $(HAS_TORCH)
else
gpu: $(if $(filter $(VENV)/bin,$(BIN)),$(VENV)/.installed-test)
endif
gpu:
	PYTHONPATH=$(CURDIR) $(BIN)/python3 $(GPU_ON) benchmarks/gpu.py $(ARGS) || test $$? -eq 77

# The first minutes of `make gpu` on a bare machine, on the device in hostcuda/: a copy of the checkout, a Python with
# torch (and NumPy, which the device needs), no network, no caches, nothing of this environment. It is cut short as a
# loan ends; what it came to until then stands in build/rehearsal/results, and it has failed if nothing does, or a check did.
#   make rehearsal PYTHON=python3.12 TORCH=2.11.0 MINUTES=5
BARE := .venv-bare-$(TORCH)
MINUTES ?= 5
REHEARSAL := $(CURDIR)/build/rehearsal
OFFLINE = $(shell unshare --map-root-user --net true 2> /dev/null && echo unshare --map-root-user --net)
rehearsal: $(BARE)/.installed
	rm -rf $(REHEARSAL) && mkdir -p $(REHEARSAL)/home $(REHEARSAL)/checkout
	git ls-files -z --cached --others --exclude-standard --exclude '.venv-*' | tar -c --null -T - | tar -x -C $(REHEARSAL)/checkout
	@test -n "$(OFFLINE)" || echo "rehearsal: no network namespace here, so the network is there"
	cd $(REHEARSAL)/checkout && timeout -k 10 $(MINUTES)m $(OFFLINE) env -i PATH=$(CURDIR)/$(BARE)/bin:/usr/bin:/bin \
		HOME=$(REHEARSAL)/home TMPDIR=$(REHEARSAL)/home HOSTCUDA_CACHE=$(HOSTCUDA_CACHE) \
		make gpu GPU_ON="-m hostcuda" ARGS="--small --limit 3600 --results ../results $(ARGS)" || test $$? -eq 124
	grep '"verdict": "passed"' $(REHEARSAL)/results > /dev/null && ! grep '"verdict": "failed"' $(REHEARSAL)/results

$(BARE)/.installed: $(CONSTRAINTS)
	$(PYTHON) -m venv $(BARE)
	$(BARE)/bin/pip install --quiet --constraint $(CONSTRAINTS) torch numpy
	PYTHONPATH=$(CURDIR) $(BARE)/bin/python -m hostcuda --build
	touch $@

# Nothing that an earlier build has left in build/ gets into it.
wheel: $(VENV)/.installed-test
	rm -rf build
	$(BIN)/pip wheel --quiet --no-deps --wheel-dir dist .
	$(BIN)/python -m pytest tests/test_wheel.py

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check fxwrap benchmarks examples hostcuda tests
	$(BIN)/mypy

benchmark: $(VENV)/.installed-test
	$(BIN)/python benchmarks/speed.py $(ARGS)

$(VENV)/bin/python: $(CONSTRAINTS)
	$(PYTHON) -m venv $(VENV)
	touch $@

$(VENV)/.installed: $(VENV)/bin/python pyproject.toml $(CONSTRAINTS) constraints/common.txt
	$(BIN)/pip install --quiet --constraint $(CONSTRAINTS) --editable .
	touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(BIN)/pip install --quiet --constraint $(CONSTRAINTS) --editable ".[test]"
	mkdir -p $(VENV)/linker && if test -n "$(LINKER)"; then ln -sf "$(LINKER)" $(VENV)/linker/ld; fi
	touch $@

clean:
	rm -rf .venv-* build *.egg-info $(CACHES)
