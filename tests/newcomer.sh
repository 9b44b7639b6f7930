#!/usr/bin/env bash
# What a newcomer does: a fresh clone, the commands of README, each example, each program of the documents, each verb of
# the command line; and a fresh environment that has the wheel and nothing else. Ends at the first thing that fails.
#
#     tests/newcomer.sh          all of it, of what has been committed
#     tests/newcomer.sh --here   in this checkout and its .venv, without what other tests run there
#
# Without torch_npu it runs on the CPU, in the environment with the wheel.
set -euo pipefail
unset PYTHONPATH PYTHONDONTWRITEBYTECODE TORCH_DEVICE_BACKEND_AUTOLOAD

readonly ORIGIN=$(git -C "$(dirname "$0")" rev-parse --show-toplevel)
readonly HERE=${1:-}
readonly WORK=$(mktemp -d)
readonly PYTHON=${PYTHON:-python3}
trap 'rm -rf "$WORK"' EXIT

step() { # step WHAT COMMAND...: runs it, and shows what it said if it fails
  local began=$SECONDS what=$1
  shift
  if ! "$@" >"$WORK/said" 2>&1; then
    cat "$WORK/said"
    echo "newcomer: $what failed after $((SECONDS - began)) s: $*"
    exit 1
  fi
  printf 'newcomer: %4d s  %s\n' $((SECONDS - began)) "$what"
}

refused() { # refused COMMAND...: it ends with 2, in one line and without a traceback
  local status=0
  "$@" >"$WORK/refusal" 2>&1 || status=$?
  test $status = 2 && test "$(grep -c . "$WORK/refusal")" -ge 1 && ! grep -q Traceback "$WORK/refusal"
}

program() { # program FILE: README's first program, as it stands there
  sed -n '/^```python$/,/^```$/p' README.md | sed -n '2,/^```$/p' | sed '$d' >"$1"
}

everything() { # in a fresh clone: README in its order, each example in what make demo has set up, and each program
  step 'git clone' git clone --quiet "$ORIGIN" "$WORK/clone"
  cd "$WORK/clone"
  step 'make' make
  step 'make demo' make demo PYTHON="$PYTHON"
  local example run=.venv/bin/python
  for example in examples/*.py; do
    grep -q '__main__' "$example" || continue
    case $example in
      */train_gpt.py | */train_ranks.py) continue ;; # make demo and make demo-ranks are that
      */plan_7b.py) step "$example" "$run" "$example" --stride 16 ;;
      */trainer_llama.py) step "$example" "$run" -m ascend_emulator "$example" --steps 2 --length 256 ;;
      */rl_ranks.py) step "$example" "$run" -m ascend_emulator --devices 2 \
        -m torch.distributed.run --standalone --nproc-per-node 2 "$example" --rounds 2 --steps 1 ;;
      */rl_phases.py) step "$example" "$run" -m ascend_emulator "$example" --steps 1 ;;
      */pipeline_schedule.py) step "$example" "$run" -m ascend_emulator "$example" --trace "$WORK/example.json" ;;
      *) step "$example" "$run" -m ascend_emulator "$example" --steps 2 ;;
    esac
  done
  step 'make demo-ranks' make demo-ranks
  step 'make setup' make setup
  step 'the programs of all documents' "$run" -m pytest -q tests/house/test_blocks.py tests/house/test_links.py
  step 'make docs' make docs
}

cd "$ORIGIN"
test "$HERE" = --here || everything
readonly RUN=$PWD/.venv/bin/python COMMAND=$PWD/.venv/bin/tiered-mem
program "$WORK/first.py"
if [ "$HERE" != --here ]; then
  step "README's program, emulated" "$RUN" -m ascend_emulator "$WORK/first.py"
  step "README's program, without torch_npu" env TORCH_DEVICE_BACKEND_AUTOLOAD=0 "$RUN" "$WORK/first.py"
fi

# Each verb.
cat >"$WORK/traced.py" <<'TRACED'
import sys
import torch
from tiered_mem import TieringManager

model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(4))).npu()
with TieringManager(policy="layer-order", trace=True) as manager:
    manager.attach(model, layers=list(model), min_bytes=1)
    for _ in range(2):
        model(torch.randn(512, 512, device="npu")).sum().backward()
    manager.export_trace(sys.argv[1])
TRACED
step 'a trace' "$RUN" -m ascend_emulator "$WORK/traced.py" "$WORK/trace.json"
cat >"$WORK/training.py" <<'TRAINING'
import torch
from tiered_mem import TieringManager

model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(8))).npu()
with TieringManager(device_budget="1GiB") as manager:
    manager.attach(model, layers=list(model))
    for _ in range(40):
        model(torch.randn(2048, 1024, device="npu")).sum().backward()
TRAINING
mkdir "$WORK/spill"
step 'tiered-mem --version' "$COMMAND" --version
for verb in $("$COMMAND" --help | sed -n 's/^    \([a-z]\+\) .*/\1/p'); do
  step "tiered-mem $verb --help" "$COMMAND" "$verb" --help
  case $verb in
    check) step 'tiered-mem check' "$RUN" -m ascend_emulator -m tiered_mem check --quick -o "$WORK/check.json" ;;
    probe) step 'tiered-mem probe' "$RUN" -m ascend_emulator -m tiered_mem probe "$WORK/spill" --bytes 16MiB ;;
    inspect) step 'tiered-mem inspect' "$COMMAND" inspect "$WORK/spill" --verify ;;
    clean) step 'tiered-mem clean' "$COMMAND" clean "$WORK/spill" ;;
    plan) step 'tiered-mem plan' "$COMMAND" plan --chip 910b3 --budget 256MiB "$WORK/training.py" ;;
    plot) step 'tiered-mem plot' "$COMMAND" plot "$WORK/trace.json" -o "$WORK/trace.png" ;;
    report) step 'tiered-mem report' "$COMMAND" report "$WORK/trace.json" -o "$WORK/trace.html" ;;
    *) echo "newcomer: nothing is known of the verb $verb" && exit 1 ;;
  esac
  step "tiered-mem $verb, mistyped" refused "$COMMAND" "$verb" --no-such-option
done

# The wheel, and nothing else but a torch that is likely to be in pip's cache.
step 'the wheel' "$RUN" -m pip wheel --quiet --no-deps --wheel-dir "$WORK/wheels" .
step 'a fresh environment' "$PYTHON" -m venv "$WORK/fresh"
readonly TORCH=$("$RUN" -c 'import importlib.metadata; print(importlib.metadata.version("torch"))')
step 'pip install of the wheel' "$WORK/fresh/bin/pip" install --quiet "torch==$TORCH" "$WORK"/wheels/*.whl
cd "$WORK"
step "README's program, with the wheel" fresh/bin/python first.py
step 'the command without rich' refused fresh/bin/tiered-mem probe --device cpu
step "pip install 'tiered_mem[cli]'" fresh/bin/pip install --quiet rich
step 'tiered-mem --version, with the wheel' fresh/bin/tiered-mem --version
step 'tiered-mem probe, with the wheel' fresh/bin/tiered-mem probe --device cpu --bytes 16MiB "$WORK/spill"
step 'tiered-mem check, with the wheel' fresh/bin/tiered-mem check --device cpu --quick
echo "newcomer: all of it in $SECONDS s"
