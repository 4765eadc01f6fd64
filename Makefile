VENV := .venv
PYTHON := $(VENV)/bin/python

.PHONY: venv
venv: $(VENV)/.ready

# One script finds a Python >= 3.11 and installs what Debian leaves out, so that a bare host works too.
$(VENV)/.ready: pyproject.toml core/pyproject.toml $(wildcard backends/*/pyproject.toml) tools/venv.sh
	sh tools/venv.sh $(VENV)
	touch $@
