"""Runs the blocks of README.md and the guides, and compares what they print with what the pages say.

Usage: python scripts/readme.py [PAGE …] [--write] [--demo]

A page is one shell in a folder of its own that shows the repository's files. Blocks fenced as ``bash``
are typed into it, those fenced as ``python`` are given to python, and a ``yaml`` block becomes the file
named before it. A ``text`` block behind one of these is its standard output: ``…`` stands for anything
in a line, or for any lines, and numbers may be 10% off. Other fences are not run. ``--write`` puts what
was printed into the pages and keeps the lines that agree. ``--demo`` runs `scripts/demo.sh` as well and
compares what it prints with the README's table of it.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "recipes/guides").glob("*.md"))]
BLOCK = re.compile(r"^```(bash|python|yaml)\n(.*?)^```\n(?:\n```text\n(.*?)^```$)?", re.M | re.S)
FILE = re.compile(r"`([\w.-]+\.yaml)`")
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")
TOLERANCE = 0.1
LIMIT = 900  # seconds a page
ANY = "…"
SETTINGS = {"HF_HUB_OFFLINE": "1", "COLUMNS": "110", "OMP_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Block:
    """A block that runs, and the lines that its page says it prints (None: it says nothing)."""

    line: int
    script: str
    expected: list[str] | None
    place: tuple[int, int]  # of the expected lines in the page


def blocks(page: str) -> list[Block]:
    """The blocks of a page in its order."""
    found = []
    for match in BLOCK.finditer(page):
        kind, body, output = match.groups()
        if kind == "python":
            body = f"python - <<'END'\n{body}END\n"
        elif kind == "yaml":
            body = f"cat > {FILE.findall(page[: match.start()])[-1]} <<'END'\n{body}END\n"
        line = page.count("\n", 0, match.start()) + 1
        expected = None if output is None else output.splitlines()
        found.append(Block(line, body, expected, match.span(3)))
    return found


def value(number: str) -> float:
    return float(number.replace(",", ""))


def pattern(expected: str) -> str:
    """What a line must match: each number is a group, spaces are of any width."""
    parts = re.split(rf"({NUMBER.pattern}|{ANY}|\s+)", expected)
    special = {ANY: ".*", " ": r"\s+"}
    return "".join(
        f"({NUMBER.pattern})" if NUMBER.fullmatch(part) else special.get(part[:1], re.escape(part))
        for part in parts
    )


def same(expected: str, printed: str) -> bool:
    """Whether a line is as expected, spaces and small differences of numbers apart."""
    match = re.fullmatch(pattern(expected), printed.rstrip())
    if match is None:
        return False
    pairs = zip(NUMBER.findall(expected), match.groups(), strict=True)
    return all(abs(value(a) - value(b)) <= TOLERANCE * abs(value(a)) for a, b in pairs)


def agree(expected: list[str], printed: list[str]) -> bool:
    """Whether the lines that were printed are the expected ones."""
    if not expected:
        return not printed
    if expected[0] == ANY:
        return any(agree(expected[1:], printed[start:]) for start in range(len(printed) + 1))
    return bool(printed) and same(expected[0], printed[0]) and agree(expected[1:], printed[1:])


def program(found: list[Block], logs: Path) -> str:
    """All blocks of a page as one program for bash, each with files for what it prints."""
    steps = [f"{{\n{b.script}}} >{logs}/{n}.out 2>{logs}/{n}.err" for n, b in enumerate(found)]
    return "\n".join(["set -eu", *steps, f"touch {logs}/end"])


@contextmanager
def commands() -> Iterator[str]:
    """The PATH of shells whose `blr` is the one beside this Python, which forks for each command."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-P", str(ROOT / "scripts/forking.py"), folder]
        with subprocess.Popen(command, env=os.environ | SETTINGS, stdout=subprocess.PIPE) as server:
            server.stdout.readline()
            try:
                yield f"{folder}:{Path(sys.executable).parent}:{os.environ['PATH']}"
            finally:
                server.kill()


def run(found: list[Block], folder: Path, path: str) -> None:
    """Type a page's blocks into a shell in `folder`."""
    (folder / "logs").mkdir()
    work = folder / "work"
    work.mkdir()
    for name in ("README.md", "tests", "scripts", "recipes", "configs"):
        (work / name).symlink_to(ROOT / name)
    command = ["timeout", str(LIMIT), "bash", "-c", program(found, folder / "logs")]
    subprocess.run(command, cwd=work, env=os.environ | SETTINGS | {"PATH": path}, check=False)


def judged(found: list[Block], logs: Path) -> list[tuple[Block, str, list[str]]]:
    """The blocks that failed or printed something else: why, and what they printed."""
    wrong = []
    for n, block in enumerate(found):
        if not (logs / f"{n}.out").exists():
            break
        printed = [line.rstrip() for line in (logs / f"{n}.out").read_text("utf-8").splitlines()]
        last = not (logs / "end").exists() and not (logs / f"{n + 1}.out").exists()
        if last:
            wrong.append((block, "failed:\n" + (logs / f"{n}.err").read_text("utf-8")[-3000:], printed))
        elif block.expected is not None and not agree(block.expected, printed):
            lines = ["expected", *block.expected, "but it printed", *printed]
            wrong.append((block, "\n  ".join(lines), printed))
    return wrong


def rewritten(text: str, wrong: list[tuple[Block, str, list[str]]]) -> str:
    """A page with what was printed in the place of what was expected, but for lines that agree."""
    for block, _, printed in reversed(wrong):
        if block.expected is not None:
            kept = [next((old for old in block.expected if same(old, line)), line) for line in printed]
            start, end = block.place
            text = text[:start] + "".join(f"{line}\n" for line in kept) + text[end:]
    return text


def missing_rows(page: str, printed: list[str]) -> list[str]:
    """The rows of the README's table of the demo that it has not printed."""
    table = page.partition("| the demo's end")[2].partition("\n\n")[0].splitlines()[2:]
    rows = [line.replace("|", " ").strip() for line in table] or ["a table of the demo"]
    return [row for row in rows if not any(same(row, line) for line in printed)]


def demonstrated(path: str) -> bool:
    """Run the demo and report on it; whether it printed the README's table."""
    blr = f"{path.partition(':')[0]}/blr"
    with tempfile.TemporaryDirectory() as folder:
        command = ["timeout", str(LIMIT), "bash", str(ROOT / "scripts/demo.sh"), folder, blr]
        with open(Path(folder, "log"), "w") as log:  # like what blocks print: forks expect no pipe
            done = subprocess.run(
                command, env=os.environ | SETTINGS, stdout=log, stderr=log, check=False
            )
        printed = Path(folder, "log").read_text("utf-8")
    missing = missing_rows(PAGES[0].read_text("utf-8"), printed.splitlines())
    wrong = [f"README.md: the demo has not printed {row!r}, or other numbers" for row in missing]
    print("\n".join([printed, *wrong]), flush=True)
    return done.returncode == 0 and not missing


def checked(page: Path, write: bool, path: str) -> bool:
    """Run a page and report on it; whether all was as it says."""
    text, began = page.read_text("utf-8"), time.monotonic()
    found = blocks(text)
    with tempfile.TemporaryDirectory() as folder:
        run(found, Path(folder), path)
        logs = Path(folder) / "logs"
        wrong, ended = judged(found, logs), (logs / "end").exists()
    name = page.relative_to(ROOT)
    report = [f"{name}:{block.line}: {why}" for block, why, _ in wrong]
    print(
        "\n".join([*report, f"{name}: {len(found)} blocks, {time.monotonic() - began:.0f} s"]),
        flush=True,
    )
    if write:
        page.write_text(rewritten(text, wrong), "utf-8")
    return ended and not wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("pages", nargs="*", type=Path)
    parser.add_argument("--write", action="store_true", help="put what was printed into the pages")
    parser.add_argument("--demo", action="store_true", help="run scripts/demo.sh, too")
    asked = parser.parse_args()
    pages = [page.resolve() for page in asked.pages] or PAGES
    with commands() as path, ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        demo = pool.submit(demonstrated, path) if asked.demo else None
        right = list(pool.map(lambda page: checked(page, asked.write, path), pages))
        return 0 if all(right) and (demo is None or demo.result()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
