#!/usr/bin/env bash
# Checks style and types and runs the tests, on the wheel in a fresh environment (or in the environment $BLR_ENV)
# and in a copy of the files that git tracks. Arguments go to pytest. BLR_FULL=1 runs the whole of every table.
set -euo pipefail
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
chmod 755 "$work" # a test runs the command as another user
bash scripts/copy_tracked.sh "$work/source"
[ -n "${BLR_ENV:-}" ] || bash scripts/environment.sh "$work/env" test
python=$(realpath -s "${BLR_ENV:-$work/env}")/bin/python
cd "$work/source"
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
"$python" -m ruff check .
"$python" -m ruff format --check .
mkdir -p "$work/types/blr" # the packages under their name, as the wheel has them
ln -s "$work"/source/{compressor,kernels,configs,recipes,scripts/bench} "$work/types/blr"
(cd "$work/types" && "$python" -m mypy --config-file ../source/pyproject.toml -p blr) >"$work/mypy" 2>&1 &
types=$! # beside the first tests
chosen=(-m "not slow")
[ -z "${BLR_FULL:-}" ] || chosen=()
tests=0
"$python" -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder "${chosen[@]}" "$@" || tests=$?
wait "$types" || { cat "$work/mypy"; exit 1; }
exit "$tests"
