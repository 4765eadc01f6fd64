# make demo    see it work, on this machine, in two minutes
# make test    everything that CI runs
# make venv    the development environment in .venv
# make lint    ruff, ruff format, mypy
# make unit    the tests that need neither root nor a container runtime
# make e2e     the tests on real container runtimes (root)
# make floors  the fast tests with the oldest supported dependencies
# make clean   remove what the targets above made

VENV := .venv
PYTHON := $(VENV)/bin/python
CACHE := .cache
PROJECTS := pyproject.toml core/pyproject.toml $(wildcard backends/*/pyproject.toml)
FAST := tests/unit tests/conformance

.PHONY: demo test venv lint unit e2e floors clean

demo: $(VENV)/.ready
	$(PYTHON) demo

test: lint unit floors e2e

venv: $(VENV)/.ready

$(VENV)/.ready: $(PROJECTS) tools/venv.sh
	sh tools/venv.sh $(VENV)
	touch $@

$(CACHE)/venv-%/.ready: $(PROJECTS) tools/venv.sh tests/floors/%.txt tests/floors/common.txt
	mkdir -p $(CACHE)
	sh tools/venv.sh $(@D) tests/floors/$*.txt
	touch $@

lint: $(VENV)/.ready
	$(PYTHON) -m ruff check
	$(PYTHON) -m ruff format --check
	$(PYTHON) -m mypy

unit: $(VENV)/.ready
	$(PYTHON) -m pytest $(FAST)

e2e: $(VENV)/.ready
	$(PYTHON) -m pytest tests/e2e

floors: $(CACHE)/venv-debian12/.ready $(CACHE)/venv-el10/.ready
	$(CACHE)/venv-debian12/bin/python -m pytest $(FAST)
	$(CACHE)/venv-el10/bin/python -m pytest tests/unit/nri

clean:
	rm -rf $(VENV) $(CACHE)
