#!/usr/bin/env bash
# `blr` on a machine that has torch, triton and transformers but no package index: a bare GPU node.
#   scripts/offline_env.sh pack WHEELS [PYTHON VERSION]   where there is an index: what such a machine lacks
#   scripts/offline_env.sh ENV WHEELS                     there: ENV/bin/blr and ENV/bin/python
# The command runs this clone as it stands: its folders are linked, nothing is built. $PYTHON (python3) is
# the interpreter that has torch.
set -euo pipefail
usage="usage: scripts/offline_env.sh pack WHEELS [3.12], or scripts/offline_env.sh ENV WHEELS"
python=${PYTHON:-python3}
target=$(realpath -m "${1:?$usage}") wheels=$(realpath -m "${2:?$usage}")
if [ "$1" = pack ]; then # without what they depend on, so pydantic's two parts are named as a pair
  platforms=(manylinux_2_28_x86_64 manylinux_2_17_x86_64 manylinux2014_x86_64)
  exec "$python" -m pip download --quiet --no-deps --only-binary=:all: --implementation cp \
    --python-version "${3:-3.12}" "${platforms[@]/#/--platform=}" --dest "$wheels" \
    "pydantic==2.14.3" "pydantic-core==2.50.4" "ruamel.yaml>=0.18" annotated-types typing-inspection gguf
fi
clone=$(realpath "$(dirname "$0")/..")
"$python" -m venv --without-pip --clear "$target"
site=$("$target/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
"$python" -m pip install --quiet --no-index --no-deps --no-compile --target "$site" "$wheels"/*.whl
"$python" -c 'import pathlib, torch; print(pathlib.Path(torch.__file__).parents[1])' > "$site/torch.pth"
mkdir "$site/blr"
for room in compressor kernels configs recipes scripts/bench; do ln -s "$clone/$room" "$site/blr/"; done
printf '#!/bin/sh\nexec "%s" -m blr.compressor "$@"\n' "$target/bin/python" > "$target/bin/blr"
chmod +x "$target/bin/blr"
"$target/bin/blr" --version
