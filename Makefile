.PHONY: demo test test-training test-oldest check bench model clean
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
INSTALLED := .venv/.installed
OLDEST := .venv-oldest
OUT ?= out/demo
DEMO := "rocket on a light blue background" "panda on a yellow brick background"

demo: $(INSTALLED)  ## set up, then compare unmerged images, merged ones and those of one step fewer
	OMP_NUM_THREADS=1 $(BIN)/mame-sd compare $(DEMO) --model embedded-transformer --steps 4 --rounds 3 --out $(OUT)/sheet.png

test: check  ## set up, lint, type-check and run every test
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -n 2 --dist worksteal

test-training: $(READY)  ## train each embedded model in small; where scripts/training or the weights changed
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -m training tests/embedded

test-oldest: $(OLDEST)/.ready  ## the compatibility matrix, encoders, captioners and caches with the oldest supported versions, in .venv-oldest
	HF_HUB_OFFLINE=1 $(OLDEST)/bin/python -m pytest -p no:cacheprovider -m "not training" tests/test_matrix.py tests/diffusion/test_families.py tests/diffusion/test_apply.py tests/diffusion/test_hooks*.py tests/diffusion/test_kernels.py tests/perception tests/captions tests/caches

check: $(READY)
	$(BIN)/ruff check .
	mkdir -p .venv/typing/mame_sd && touch .venv/typing/mame_sd/__init__.pyi  # eval and pipelines have their installed names for mypy too
	ln -sfn ../../../eval ../../../pipelines .venv/typing/mame_sd/
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

bench: $(READY)  ## speed and quality beside tomesd and simpler ways, short forms: under 10 minutes on 2 cores
	$(BIN)/python -m benchmarks.attention
	$(BIN)/mame-sd-eval benchmark --num 4 --steps 6 --out out/bench/quick

model: $(READY)  ## train the embedded model from nothing (hours)
	$(BIN)/python -m scripts.training.train_unet --work out/train
	$(BIN)/python -m scripts.training.train_unet --work out/train --export mame_sd/embedded/unet

$(INSTALLED): pyproject.toml .ci/constraints.txt mame_sd/embedded/pyproject.toml
	$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear .venv
	$(BIN)/python -m pip install --quiet --constraint .ci/constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint .ci/constraints.txt --editable mame_sd/embedded --editable .
	touch $(INSTALLED)

$(READY): $(INSTALLED)
	$(BIN)/python -m pip install --quiet --constraint .ci/constraints.txt --editable ".[dev]"
	$(BIN)/python -m pip install --quiet --constraint .ci/constraints.txt --no-deps timm  # without torchvision, whose wheels fit one build of torch
	touch $(READY)

$(OLDEST)/.ready: pyproject.toml .ci/constraints-oldest.txt
	$(OLDEST)/bin/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(OLDEST)
	$(OLDEST)/bin/python -m pip install --quiet --constraint .ci/constraints-oldest.txt --editable mame_sd/embedded --editable ".[matrix,lora]" hypothesis pytest
	$(OLDEST)/bin/python -m pip install --quiet --constraint .ci/constraints.txt --no-deps timm
	touch $(OLDEST)/.ready

clean:
	rm -rf .venv $(OLDEST) out build dist *.egg-info
