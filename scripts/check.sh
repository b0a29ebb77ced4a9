#!/usr/bin/env bash
# Builds the wheel, installs it with the tested versions into a fresh environment, runs the tests.
set -euo pipefail
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
chmod 755 "$work" # a test runs the command as another user
python3 -m venv "$work/env"
"$work/env/bin/python" -m pip install --quiet --constraint tests/constraints.txt build
"$work/env/bin/python" -m build --quiet --wheel --outdir "$work/dist" .
wheel=$(echo "$work"/dist/*.whl)
"$work/env/bin/python" -m pip install --quiet --constraint tests/constraints.txt "$wheel[test]"
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
"$work/env/bin/python" -m ruff check .
"$work/env/bin/python" -m ruff format --check .
"$work/env/bin/python" -m pytest -n 2 --dist loadfile "$@"
