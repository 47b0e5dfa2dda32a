# Everything here needs Python 3.11+ and make only; the first target that runs makes .venv from requirements.lock.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
SERVING := .venv-serving
SERVING_READY := $(SERVING)/.ready
UI ?=
MATERIAL ?= ../shared
WORKERS ?= 3

export HF_HUB_OFFLINE = 1
export TOKENIZERS_PARALLELISM = false

.PHONY: help install demo dev test test-services test-walk test-scale test-serving serving-env browser postgres target fmt check lint types clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

install: $(READY)  ## make .venv with the locked packages

$(READY): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is needed; name one with make PYTHON=..."; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check --quiet -r requirements.lock
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --no-deps --no-build-isolation -e .
	@touch $@

demo: $(READY)  ## the whole story on eight files, then the UI (UI=0: without)
	$(BIN)/python -m demo.story $(if $(filter 0,$(UI)),--no-ui,)

dev: $(READY)  ## the Dagster UI on 127.0.0.1 with the embedded store (DFLASH_RECIPE names the recipe)
	$(BIN)/dflash dev

test: $(READY)  ## the fast tests, at most 12 minutes on two cores
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile -m "not services and not walk and not serving and not scale" --material=$(MATERIAL)

test-services: $(READY) browser postgres  ## the running UI in a real browser, the demo from start to end
	$(BIN)/python -m pytest -m services --material=$(MATERIAL)

test-walk: $(READY) browser  ## a day's work in the browser; with SCREENSHOTS=docs it takes the pictures of docs/operating.md
	$(BIN)/python -m pytest -m walk $(if $(SCREENSHOTS),--screenshots=$(SCREENSHOTS),)

test-scale: $(READY)  ## what takes long: 1,805 files through the daemon, SIGKILL at every crash point
	$(BIN)/python -m pytest -m scale --material=$(MATERIAL)

test-serving: $(READY) $(SERVING_READY)  ## exported drafters in vLLM on the CPU, against our own decoder
	$(BIN)/python -m pytest -m serving --material=$(MATERIAL)

serving-env: $(SERVING_READY)  ## make .venv-serving: vLLM for CPUs, with its own torch and transformers

# Without dependencies: vLLM also names torchvision and the like, whose builds for GPUs do not fit this torch.
$(SERVING_READY): requirements-serving.lock
	$(PYTHON) -m venv $(SERVING)
	$(SERVING)/bin/python -m pip install --disable-pip-version-check --quiet --no-deps -r requirements-serving.lock
	@touch $@

browser:  ## Chromium for the browser tests (Debian's)
	@command -v chromium >/dev/null || { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq chromium >/dev/null; }

postgres:  ## PostgreSQL for the test of deploy/ (Debian's)
	@ls /usr/lib/postgresql/*/bin/postgres >/dev/null 2>&1 || { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq postgresql >/dev/null; }

target: $(READY)  ## train the demo's target model
	$(BIN)/python -m demo.train_target --out demo/target

fmt: $(READY)  ## format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(READY)
	$(BIN)/mypy

check: lint types  ## lint and types

clean:  ## remove what the demo and the UI left in .dflash
	rm -rf .dflash
