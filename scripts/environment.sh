#!/usr/bin/env bash
# Makes the environment $1 and installs the wheel of the files that git tracks into it, with the extra $2 (test or packages)
# and the tested versions. An environment that is there already is brought up to date.
set -euo pipefail
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
bash scripts/copy_tracked.sh "$work/source"
[ -x "$1/bin/python" ] || python3 -m venv "$1"
pip() { "$1/bin/python" -m pip "${@:2}"; }
pip "$1" wheel --quiet --no-deps --wheel-dir "$work" "$work/source"
pip "$1" install --quiet --no-compile --constraint tests/constraints.txt "$(echo "$work"/*.whl)[$2]"
pip "$1" install --quiet --no-compile --no-deps --force-reinstall "$work"/*.whl # of the same version, another build
rarely='/(tests|test|models|pipelines|datasets|tasks|_vendor)/' # compiled when they are imported
"$1/bin/python" -m compileall -q -j 2 -x "$rarely" "$1/lib" >/dev/null || true # some hold what no release reads
