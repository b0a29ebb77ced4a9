#!/usr/bin/env bash
# Copies the files that git tracks, as they are now, to the folder $1: what else lies in the clone
# (outputs, environments, notes, an older build) is neither checked nor packed.
set -euo pipefail
cd "$(dirname "$0")/.."
list() { # the clone may belong to another user; without git it is an unpacked archive
  git -c safe.directory='*' ls-files -z 2>/dev/null ||
    find . \( -name .git -o -name .venv \) -prune -o -type f -print0
}
mkdir -p "$1"
list |
  while IFS= read -r -d '' file; do [ ! -e "$file" ] || printf '%s\0' "$file"; done |
  tar -c --null -T - | tar -x -C "$1"
[ -f "$1/pyproject.toml" ] || { echo "git tracks nothing here; add the files" >&2; exit 1; }
