PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
DEVICE ?= cpu
# By file, since some files set up for minutes what their tests share. One worker more than there are cores gained nothing on
# two quiet cores (310 s, with two workers 299), and made each file take a third longer.
IN_PARALLEL := -n $(shell nproc) --dist loadfile
KERNEL_TESTS := tests/backends/test_ops.py $(addprefix tests/core/test_,definition.py layouts.py eight_bit.py masters.py \
	mixed_precision.py decay_kinds.py first_moment.py element_numbers.py reproducibility.py)
SOURCES := pyproject.toml setup.py constraints.txt $(wildcard csrc/*.h csrc/cpu/*)

.PHONY: demo test test-all test-gpu gpu-report test-virtual-gpu test-kernels test-arm lint bench bench-sharded frameworks paper wheel compat docs clean

demo: $(VENV)/.with-demo
	$(BIN)/python -m benchmarks.demo

# `make test` has what a change to the package can break. `make test-all` adds what is marked slow, see tests/selection.py.
test test-all: lint
	SWD_FUSED_KEEP_SECONDS=$@ $(BIN)/python -m pytest $(IN_PARALLEL) $(if $(filter test,$@),-m "not slow")
	SWD_FUSED_KEEP_SECONDS=$@-compiled TRITON_INTERPRET=0 $(BIN)/python -m pytest $(IN_PARALLEL) $(if $(filter test,$@),-m "not slow") tests/gpu_code

# On a machine with a CUDA or ROCm GPU, and a torch for it.
test-gpu: $(VENV)/.with-demo,bench,test
	SWD_FUSED_TEST_DEVICE=cuda $(BIN)/python -m pytest

# One Markdown file about a GPU, for an issue: some ten minutes, and a few more for each section that hangs.
gpu-report: $(VENV)/.with-bench
	$(BIN)/python -m benchmarks.gpu_report $(if $(QUICK),--quick)

# The tests without a GPU, see tests/virtual_gpu/README.md: 5 GB in ~/.cache/swd-virtual-gpu, nothing in $(VENV).
test-virtual-gpu:
	tests/virtual_gpu/run python -m pytest $(IN_PARALLEL)
	tests/virtual_gpu/run --devices 2 python -m pytest tests/backends/test_gpu.py -k device

# The C++ kernels alone, in all that they can do. For other machines than x86-64.
test-kernels: $(VENV)/.with-test
	$(BIN)/python -m swd_fused
	SWD_FUSED_TEST_BACKENDS=cpu $(BIN)/python -m pytest $(KERNEL_TESTS)

# The same for aarch64 in emulation, see tests/arm/README.md, and whether its results are those of this machine: 1.3 GB
# in ~/.cache/swd-arm. One test is left out, since it starts a program that it has built, and there that would be this machine's.
test-arm: $(VENV)/.with-test
	tests/arm/run python -m swd_fused
	tests/arm/run python -m pytest -v $(KERNEL_TESTS) -k "not all_patterns_of_masters"
	mkdir -p build
	$(BIN)/python -m tests.arm.results write build/results-here.pt
	tests/arm/run python -m tests.arm.results write $(abspath build/results-aarch64.pt)
	$(BIN)/python -m tests.arm.results compare build/results-here.pt build/results-aarch64.pt

lint: $(VENV)/.with-demo,bench,paper,test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror csrc/*.h csrc/cpu/* tests/backends/*.cpp tests/backends/team_check/torch/*/*/*.h tests/virtual_gpu/driver/*.[ch]

# DEVICE=cuda measures steps on a CUDA or ROCm GPU; the rest is about the CPU.
bench: $(VENV)/.with-bench
	$(BIN)/python -m benchmarks.step_time --device $(DEVICE)
ifeq ($(DEVICE),cpu)
	$(BIN)/python -m benchmarks.training_loops
	$(BIN)/python -m benchmarks.sharded_step
	$(BIN)/python -m benchmarks.host_work
	$(BIN)/python -m benchmarks.first_steps
	$(BIN)/python -m benchmarks.mixed_precision
endif

# Steps on shards under other versions of torch: make bench-sharded TORCH="2.12.1 2.15.0". Each is installed by itself, or a
# CUDA build would bring gigabytes of libraries, for which empty ones stand in. The built extension serves all of them.
bench-sharded: $(VENV)/.with-bench
	set -e; for torch in $(TORCH); do \
	    rm -rf build/other-torch; $(PYTHON) -m venv build/other-torch; \
	    build/other-torch/bin/pip install --quiet --no-deps torch==$$torch; \
	    build/other-torch/bin/pip install --quiet filelock fsspec jinja2 networkx setuptools sympy typing_extensions pyelftools matplotlib rich; \
	    build/other-torch/bin/python -c 'import pathlib, tests.packaging.cuda_stand_ins as c; \
	        [c.install(p) for p in pathlib.Path("build/other-torch").glob("lib/python*/site-packages/torch/lib")]'; \
	    build/other-torch/bin/python -m benchmarks.sharded_step --out results/sharded_step/torch-$$torch $(if $(QUICK),--quick); \
	done

# The examples, with what they need installed: minutes, and more where DeepSpeed builds its kernels.
frameworks: $(VENV)/.with-test,frameworks $(VENV)/apart
	$(BIN)/python -m pytest tests/packaging/test_frameworks.py tests/packaging/test_timm.py

# In a folder that only the tests of timm look into. timm needs torchvision, of which the package index has a CUDA build only:
# beside a CPU build of torch that cannot be imported, and transformers tries to if it is there.
$(VENV)/apart: $(VENV)/.torch
	$(BIN)/pip install --quiet --no-compile --no-deps -c constraints.txt --target $@ timm torchvision pillow

# make paper PRESET=real DATA=DIR needs CIFAR-10 there, PRESET=paper CIFAR-100 too.
paper: $(VENV)/.with-paper
	$(BIN)/python -m benchmarks.paper all --preset $(or $(PRESET),quick) $(if $(DATA),--data $(DATA))

# The sdist, and from it a wheel for any Linux with this one's glibc or a later one. torch brings its own libraries.
wheel: $(VENV)/.with-release
	rm -rf build dist
	$(BIN)/python -m build --no-isolation
	PATH="$(abspath $(BIN)):$$PATH" auditwheel repair --exclude 'libtorch*.so' --exclude 'libc10*.so' -w dist dist/*-linux_*.whl
	rm dist/*-linux_*.whl
	$(BIN)/twine check --strict dist/*

# That wheel beside each torch and Python there is: downloads gigabytes, which `make compat TORCH=2.10.0` limits.
compat: wheel
	$(BIN)/python -m tests.packaging.compat dist/*-abi3-*.whl $(addprefix --torch ,$(TORCH)) $(if $(EVERY_PAIR),--every-pair)

docs: $(VENV)/.with-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) build dist site *.egg-info swd_fused/*.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# torch first and by itself: the build needs its headers, and an open range would take gigabytes of CUDA packages.
# Python compiles what it imports; pip would compile all of torch first.
$(VENV)/.torch: constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --no-compile --upgrade -c constraints.txt setuptools torch numpy
	touch $@

# The package, built in place, with these extras.
$(VENV)/.with-%: $(VENV)/.torch $(SOURCES)
	$(BIN)/pip install --quiet --no-compile --no-build-isolation -c constraints.txt -e ".[$*]"
	touch $@
