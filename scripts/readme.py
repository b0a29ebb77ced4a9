"""Runs the README's blocks as they stand, in order: those fenced as bash, python and yaml.

Usage: python3 scripts/readme.py, in a clone where scripts/demo.sh has made .venv. Commands are typed
into one shell; a python block is given to python, a yaml block becomes the file named before it.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BLOCK = re.compile(r"^```(bash|python|yaml)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"`([\w.-]+\.yaml)`")


def script(text: str) -> str:
    """The README as one program for bash."""
    lines = ["set -euxo pipefail"]
    for found in BLOCK.finditer(text):
        kind, body = found.groups()
        if kind == "bash":
            lines.append(body)
        elif kind == "python":
            lines.append(f"python - <<'END'\n{body}END")
        else:
            name = FILE.findall(text[: found.start()])[-1]
            lines.append(f"cat > {name} <<'END'\n{body}END")
    return "\n".join(lines)


if __name__ == "__main__":
    program = script((ROOT / "README.md").read_text("utf-8"))
    raise SystemExit(subprocess.run(["bash", "-c", program], cwd=ROOT, check=False).returncode)
