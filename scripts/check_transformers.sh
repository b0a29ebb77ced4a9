#!/usr/bin/env bash
# transformers' own common tests of model classes over ours (scripts/transformers_common.py): their file
# comes from the source distribution of the version that is installed, by the package index.
# Takes the environment where blr and its tests are ($PYTHON, else .venv, else python3). Arguments go to
# pytest, as -k "TestLlama and tied".
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
version=$("$python" -c 'import transformers; print(transformers.__version__)')
"$python" -m pip download --quiet --no-binary transformers --no-deps --dest "$work" "transformers==$version"
tar -xzf "$work/transformers-$version.tar.gz" -C "$work" "transformers-$version/tests"
"$python" -m pip install --quiet --no-deps --target "$work/packages" parameterized
export PYTHONPATH=$work/packages${PYTHONPATH:+:$PYTHONPATH} BLR_COMMON=$work/transformers-$version/tests
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
"$python" -m pytest -q -p no:cacheprovider --disable-warnings -W default scripts/transformers_common.py "$@"
