#!/usr/bin/env bash
# Builds the wheel, installs it with the tested versions into a fresh environment, checks style and
# types, runs the tests.
# All of it in a copy of the files that git tracks.
set -euo pipefail
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
chmod 755 "$work" # a test runs the command as another user
bash scripts/copy_tracked.sh "$work/source"
cd "$work/source"
python3 -m venv "$work/env"
"$work/env/bin/python" -m pip install --quiet --constraint tests/constraints.txt build
"$work/env/bin/python" -m build --quiet --wheel --outdir "$work/dist" .
rm -rf build ./*.egg-info # what building leaves is not ours to check either
wheel=$(echo "$work"/dist/*.whl)
"$work/env/bin/python" -m pip install --quiet --no-compile --constraint tests/constraints.txt "$wheel[test]"
"$work/env/bin/python" -m compileall -q -j 2 "$work/env/lib" >/dev/null || true # some hold what no release reads
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
"$work/env/bin/python" -m ruff check .
"$work/env/bin/python" -m ruff format --check .
mkdir -p "$work/types/blr" # the packages under their name, as the wheel has them
ln -s "$work"/source/{compressor,kernels,configs,recipes} "$work/types/blr"
(cd "$work/types" && "$work/env/bin/python" -m mypy --config-file ../source/pyproject.toml -p blr) >"$work/mypy" 2>&1 &
types=$! # beside the first tests
chosen=(-m "not slow") # BLR_FULL=1: the whole of every table
[ -z "${BLR_FULL:-}" ] || chosen=()
tests=0
"$work/env/bin/python" -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder "${chosen[@]}" "$@" || tests=$?
wait "$types" || { cat "$work/mypy"; exit 1; }
exit "$tests"
