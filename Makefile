# make demo and make test are what there is to run; each sets up .venv first if that is needed.
BY_TWO := --numprocesses=2 --dist=loadfile
# What runs without a device is the same in each schedule; and the libraries' models take long to import.
DEVICE_TESTS := $(addprefix --ignore=tests/,allocators cli policies spill test_packaging.py test_layers.py \
                  test_host_limit.py test_host_budget.py test_sizes.py test_allocator_replay.py \
                  test_recorded_allocations.py emulator/test_library_models.py)
# So is what the emulator's operators compute, what a checkpoint holds, and what a trace or a compiler sees: the first
# run with the detector has it.
ONCE := $(addprefix --ignore=tests/emulator/test_,kernels.py gradients.py fused_operators.py training_set.py link.py) \
        $(addprefix --ignore=tests/test_,compile.py trace.py trace_export.py trace_files.py) \
        $(addprefix --ignore=tests/optimizer/test_,checkpoints.py checkpoint_failures.py state_reads.py \
          distributed_checkpoints.py failures.py trials.py)
# And the first run of all leaves these to the detector's.
DETECTED := --ignore=tests/emulator/test_training_set.py \
            $(addprefix --ignore=tests/te/test_,layers.py marks.py manual.py) \
            $(addprefix --ignore=tests/optimizer/test_,equality.py strange_optimizers.py checkpoints.py \
              checkpoint_failures.py state_reads.py distributed_checkpoints.py residence.py \
              disk_residence.py disk_residence_faults.py disk_residence_random.py)
PYTHON ?= python3
DEVICE ?= cuda
VENV := .venv
RUN := $(VENV)/bin/python

setup: compiler $(VENV)/.installed
	@$(MAKE) --no-print-directory --jobs=2 -C emulator PYTHON=$(abspath $(RUN))

demo: setup
	$(RUN) -m ascend_emulator --unless-hardware --h2d 4GB/s --d2h 4GB/s examples/train_gpt.py

# Without the race detector torch_npu's task queue is on, as it is by default on hardware.
test: setup
	$(RUN) -m pytest $(BY_TWO) $(DETECTED)
	ASCEND_EMULATOR_RACES=1 ASCEND_EMULATOR_SCHEDULE=eager $(RUN) -m pytest $(BY_TWO) $(DEVICE_TESTS)
	ASCEND_EMULATOR_RACES=1 ASCEND_EMULATOR_SCHEDULE=late $(RUN) -m pytest $(BY_TWO) $(DEVICE_TESTS) $(ONCE) \
	  --ignore=tests/te/test_layers.py
	ASCEND_EMULATOR_RACES=1 ASCEND_EMULATOR_SCHEDULE=random $(RUN) -m pytest $(BY_TWO) $(DEVICE_TESTS) $(ONCE)

mutants: setup
	$(RUN) -m tests.mutants

lint: setup
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy tiered_mem emulator/ascend_emulator tests/mutants.py

bench: setup
	$(RUN) -m ascend_emulator --unless-hardware -m benchmarks.offload_overhead
	$(RUN) -m ascend_emulator --unless-hardware --h2d 4GB/s --d2h 4GB/s -m benchmarks.offload_hooks
	$(RUN) -m ascend_emulator --unless-hardware --h2d 4GB/s --d2h 4GB/s -m benchmarks.link_speed
	$(RUN) -m ascend_emulator --unless-hardware -m benchmarks.optimizer_step
	TORCH_DEVICE_BACKEND_AUTOLOAD=0 $(RUN) -m benchmarks.allocator_replay
	TORCH_DEVICE_BACKEND_AUTOLOAD=0 $(RUN) -m benchmarks.allocator_speed
	TORCH_DEVICE_BACKEND_AUTOLOAD=0 $(RUN) -m benchmarks.spill

# On a machine with a device, in the Python that is there: nothing is set up and nothing is fetched.
silicon:
	$(PYTHON) -m benchmarks.silicon --device $(DEVICE) $(if $(SMALL),--small)

compiler:
	@command -v $(CXX) >/dev/null || \
	  { echo 'setup: no C++ compiler; install one that knows C++20 (Debian: apt install g++)'; exit 1; }

$(VENV)/.installed: pyproject.toml emulator/pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo 'setup: Python 3.10 or newer is needed; name one with make PYTHON=python3.12 setup'; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo 'setup: the venv module is missing; install it (Debian: apt install python3-venv)'; exit 1; }
	@test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	@echo 'setup: installing into $(VENV) and compiling the emulator, about three minutes'
	@$(RUN) -m pip install --editable ./emulator --editable '.[dev]' >$(VENV)/setup.log 2>&1 || \
	  { echo "setup: pip could not install all of it: $$(grep ERROR $(VENV)/setup.log | tail -n 1) ($(VENV)/setup.log)"; \
	    exit 1; }
	@touch $@

clean:
	$(MAKE) -C emulator clean
	rm -rf $(VENV)

.PHONY: setup compiler demo test mutants lint bench silicon clean
