#!/usr/bin/env bash
# Runs tests/engines: exports for vLLM, MLX and llama.cpp, computed on the CPU by transformers with
# compressed-tensors and peft, by mlx-lm and by llama-cpp-python; prints a table of figures. The environment is
# a fresh one, where llama.cpp is built from its source package in some minutes, or $BLR_ENV. $BLR_SMOLLM names
# a folder that scripts/fetch_smollm2.sh made, which is then run as well. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
bash scripts/copy_tracked.sh "$work/source"
if [ -z "${BLR_ENV:-}" ]; then
  bash scripts/environment.sh "$work/env" test
  "$work/env/bin/python" -m pip install --quiet --constraint tests/constraints.txt \
    'mlx[cpu]' mlx-lm gguf llama-cpp-python compressed-tensors peft
fi
python=$(realpath -s "${BLR_ENV:-$work/env}")/bin/python
cd "$work/source"
"$python" -m pip list --format freeze | grep -iE '^(torch|transformers|compressed.tensors|peft|mlx|mlx-lm|gguf|llama_cpp_python)='
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false BLR_ENGINES=1 BLR_FIGURES="$work/figures"
status=0
"$python" -m pytest -q tests/engines "$@" || status=$?
cat "$work/figures"
exit $status
