#!/usr/bin/env bash
# Compiles what the tests compile with another release of Triton, such as that of a GPU machine, without
# a GPU: kernels that interpret well may still be refused by an older compiler.
# Takes the environment where blr and its tests are ($PYTHON, else .venv, else python3). More arguments
# go to pytest.
set -euo pipefail
version=${1:?usage: scripts/check_triton.sh VERSION, as 3.6.0}
shift
cd "$(dirname "$0")/.."
python=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$python" -m pip install --quiet --no-deps --target "$work" "triton==$version"
mapfile -t files < <(git grep -l "^from compiling import" -- tests/kernels)
PYTHONPATH=$work "$python" -m pytest -q -k "compile or spill or registers or loads" "${files[@]}" "$@"
