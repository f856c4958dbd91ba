.PHONY: demo test check bench model clean
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

bench: $(READY)  ## how good the embedded model is, and what merging costs it
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
