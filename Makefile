# make demo    see it work, on this machine, in two minutes
# make test    everything that CI runs
# make venv    the development environment in .venv
# make lint    ruff, ruff format, mypy
# make unit    the tests that need neither root nor a container runtime
# make e2e     the tests on real container runtimes (root)
# make test-host  what takes too long for every run: the packages under piuparts, a whole day's
#                 containers, real runtimes with the oldest supported dependencies (root)
# make floors  the fast tests with the oldest supported dependencies
# make fuzz    the decoder and the NRI session under a coverage-guided fuzzer, a minute
# make bench   what things cost, as ratios (bench/README.md)
# make deb     Debian packages into dist/deb (packaging/README.md)
# make rpm     rpm packages into dist/rpm
# make wheels  wheels and sdists into dist/pypi
# make docs    the pages and pictures that are made of something else
# make clean   remove what the targets above made

VENV := .venv
PYTHON := $(VENV)/bin/python
CACHE := .cache
PROJECTS := pyproject.toml core/pyproject.toml $(wildcard backends/*/pyproject.toml)
FAST := tests/unit tests/conformance

.PHONY: demo test venv lint unit e2e floors fuzz bench bench-check deb rpm wheels docs test-host clean

demo: $(VENV)/.ready
	$(PYTHON) demo

test: lint unit floors e2e fuzz bench-check

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

test-host: deb $(VENV)/.ready $(CACHE)/venv-debian12/.ready
	sh packaging/deb/piuparts.sh dist/deb
	CDI_COURIER_TEST_SOAK=864000 $(PYTHON) -m pytest tests/e2e/test_soak.py
	# Two processes: Debian 12's gRPC starts threads in whatever is forked from one that has used it, whatever
	# it is told, and live injection is tried in forks without any.
	$(CACHE)/venv-debian12/bin/python -m pytest tests/e2e/test_live.py tests/e2e/test_live_cgroup.py
	$(CACHE)/venv-debian12/bin/python -m pytest tests/e2e --ignore=tests/e2e/test_live.py \
		--ignore=tests/e2e/test_live_cgroup.py

floors: $(CACHE)/venv-debian12/.ready $(CACHE)/venv-el10/.ready
	$(CACHE)/venv-debian12/bin/python -m pytest $(FAST)
	$(CACHE)/venv-el10/bin/python -m pytest tests/unit/nri tests/unit/core/test_descriptors.py

# Findings and the grown corpus stay in the cache; the seeds are in the repository.
fuzz: $(VENV)/.ready
	mkdir -p $(CACHE)/fuzz/decode $(CACHE)/fuzz/nri
	$(PYTHON) tests/fuzz/fuzz_decode.py -max_total_time=30 -max_len=4096 -verbosity=0 \
	    -artifact_prefix=$(CACHE)/fuzz/ $(CACHE)/fuzz/decode tests/fuzz/seeds/decode
	$(PYTHON) tests/fuzz/fuzz_nri.py -max_total_time=25 -max_len=1024 -rss_limit_mb=512 -verbosity=0 \
	    -artifact_prefix=$(CACHE)/fuzz/ $(CACHE)/fuzz/nri tests/fuzz/seeds/nri

bench: $(VENV)/.ready
	mkdir -p $(CACHE)
	$(PYTHON) bench/run.py --json $(CACHE)/bench.json --plot $(CACHE)

bench-check: $(VENV)/.ready
	$(PYTHON) bench/run.py --check

# All that packages are made of is this project's own or the distribution's; nothing comes from PyPI.
deb:
	sh packaging/deb/build.sh dist/deb

rpm:
	sh packaging/rpm/build.sh dist/rpm

wheels: $(VENV)/.ready
	PYTHON=$(abspath $(PYTHON)) sh packaging/wheels.sh dist/pypi

docs: $(VENV)/.ready
	mkdir -p $(CACHE)
	$(PYTHON) tools/reference.py --settings-page >$(CACHE)/page && mv $(CACHE)/page docs/settings.md
	set -e; for source in docs/pictures/*.txt; do \
	    $(PYTHON) tools/picture.py $$source >$(CACHE)/page; mv $(CACHE)/page $${source%.txt}.svg; done

clean:
	rm -rf $(VENV) $(CACHE) dist
