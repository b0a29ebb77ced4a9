#!/usr/bin/env bash
# Runs the tests with the packages that people use our outputs with (tests/packages), in a fresh environment with
# their tested versions or in the environment $BLR_ENV. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
bash scripts/copy_tracked.sh "$work/source"
[ -n "${BLR_ENV:-}" ] || bash scripts/environment.sh "$work/env" packages
python=$(realpath -s "${BLR_ENV:-$work/env}")/bin/python
cd "$work/source"
"$python" -m pip list --format freeze |
  grep -iE '^(torch|transformers|accelerate|peft|sentence-transformers|onnx|onnxruntime|onnxscript|lm_eval|model-signing|diffusers|compressed.tensors)='
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false BLR_PACKAGES=1
"$python" -m pytest -q -n 2 --dist loadfile tests/packages "$@"
