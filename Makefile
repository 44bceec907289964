# Everything from nothing: `make demo` and `make test` set up what they need, once.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2> /dev/null && echo $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# a C compiler as a wheel, where the machine has none (foretell/kernels/build.py)
EXTRAS := dev,grammar$(if $(or $(CC:cc=),$(shell command -v cc || command -v gcc || command -v clang)),,$(COMMA)compiler)
COMMA := ,
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# --no-compile below: compiling every module of every package takes longer than all that is ever imported

.PHONY: demo test quick lint gpu-check clean

demo: $(READY)
	@$(BIN)/foretell demo

test: $(READY) lint
	@$(BIN)/foretell pull smollm2-135m > /dev/null
	$(BIN)/python -m pytest -n 2 --dist loadgroup

quick: $(READY)
	$(BIN)/python -m pytest -n 2 --dist loadgroup -m "not real"

lint: $(READY)
	$(BIN)/ruff format --check src tests
	$(BIN)/ruff check src tests
	$(BIN)/mypy

gpu-check: $(READY)
	$(BIN)/python -m pytest -m gpu tests/test_gpu.py
	$(BIN)/foretell bench step --device cuda --repeats 20

$(READY): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "foretell needs Python 3.11 or newer: make PYTHON=/path/to/python3" >&2; exit 1; }
	@sh scripts/venv.sh $(PYTHON) $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable '.[$(EXTRAS)]'
	@touch $(READY)

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
