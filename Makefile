.PHONY: demo test check bench score model clean
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
OUT ?= out/demo

demo: $(READY)  ## set up, then generate the demo prompts with and without merging, side by side
	$(BIN)/mame-sd generate --prompts prompts/demo.txt --baseline --out $(OUT)/baseline
	$(BIN)/mame-sd generate --prompts prompts/demo.txt --out $(OUT)/merged
	$(BIN)/mame-sd sheet $(OUT)/baseline $(OUT)/merged --out $(OUT)/sheet.png

test: check  ## set up, lint, type-check and run every test
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: $(READY)  ## speed and quality beside tomesd and simpler ways, short forms: under 10 minutes on 2 cores
	$(BIN)/python -m benchmarks.attention --short
	$(BIN)/python -m benchmarks.unet --short
	$(BIN)/python -m benchmarks.frontier --short --out out/bench/frontier

score: $(READY)  ## how good the embedded model is, and what the default costs it
	$(BIN)/python scripts/check_embedded.py

model: $(READY)  ## train the embedded model from nothing (hours)
	$(BIN)/python scripts/train_embedded.py --work out/train --out mame_sd/embedded

$(READY): pyproject.toml constraints.txt
	$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $(READY)

clean:
	rm -rf .venv out build dist *.egg-info
