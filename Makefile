PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test lint bench clean

demo: $(STAMP)
	$(BIN)/python -m benchmarks.demo

test: lint
	$(BIN)/python -m pytest

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror csrc/*.h csrc/*.cpp

bench: $(STAMP)
	$(BIN)/python -m benchmarks.step_time
	$(BIN)/python -m benchmarks.training_step

clean:
	rm -rf $(VENV) build *.egg-info swd_fused/*.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# torch first and by itself: the build needs its headers, and an open range would take gigabytes of CUDA packages.
$(STAMP): pyproject.toml setup.py constraints.txt $(wildcard csrc/*)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade -c constraints.txt pip setuptools wheel torch numpy
	$(BIN)/pip install --quiet --no-build-isolation -c constraints.txt -e ".[demo,bench,test]"
	touch $@
