"""Holds the pages for people to plain sentences: length of lines and sentences, and words to avoid.

Usage: python scripts/prose.py [PAGE …]; tests/test_prose.py runs it. Code and tables are held to
the length of lines alone. New words go into BANNED with what to write instead.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    *("README.md", "recipes/README.md", "compressor/README.md", "configs/README.md"),
    *("kernels/README.md", "tests/README.md"),
    *("scripts/CHANGELOG.md", "scripts/RESULTS.md", ".github/CONTRIBUTING.md", ".github/SECURITY.md"),
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "recipes/guides").glob("*.md")),
]
WIDTH = 110  # characters
WORDS = 25  # of a sentence
GENERATED = ("recipes/guides/reference.md",)  # its words are those of the product's help
BANNED = {  # what to write instead
    "lest": "so that … not",
    "learnt by heart": "overfitted",
    "by heart": "overfitting",
    "what that loses": "the loss",
    "makes good": "corrects",
    "made good": "corrected",
    "a link to nothing": "broken symbolic link",
    "that is said": "a note says so",
    "nothing of them": "none",
    "door": "interface",
    "times over": "epochs",
    "whereof": "of which",
    "simply": "(leave it out)",
    "obviously": "(leave it out)",
    "just": "only, or leave it out",
    "know the weights alone": "fitted without a text",
    "lesser": "less important",
    "likest": "most alike",
    "whatever is": "(name the case)",
    "utilize": "use",
    "in order to": "to",
}
CODE = re.compile(r"^ *```.*?^ *```$", re.M | re.S)
MADE = re.compile(r"<!-- (\w+) -->.*?<!-- /\1 -->", re.S)  # by scripts, of lists
ITEM = re.compile(r"^(?: *[-*] | *\d+\. |#+ |> )")
END = re.compile(r"(?<=[.!?])\s+(?=[A-Z`*\[(])")


def paragraphs(text: str) -> Iterator[str]:
    """Runs of prose: paragraphs, items, headings; no code, tables or lists that scripts make."""
    held: list[str] = []
    for line in [*MADE.sub("", CODE.sub("", text)).splitlines(), ""]:
        begins = ITEM.match(line)
        if held and (begins or not line.strip() or line.startswith("|")):
            yield " ".join(held)
            held = []
        if line.strip() and not line.startswith("|"):
            held.append(ITEM.sub("", line).strip())


def plain(text: str) -> str:
    """Prose with each piece of code as one word, and links as their words."""
    text = re.sub(r"`[^`]*`", "Code", text)
    return re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)


def problems(text: str, generated: bool = False) -> Iterator[str]:
    """What a page has to mend, a line each."""
    for number, line in enumerate(text.splitlines(), 1):
        if len(line) > WIDTH:
            yield f"line {number} has {len(line)} characters; expected at most {WIDTH}"
    for paragraph in () if generated else paragraphs(text):
        for sentence in END.split(plain(paragraph)):
            words = re.findall(r"\w[\w'’.,/×-]*", sentence)
            if len(words) > WORDS:
                yield f"{len(words)} words, expected at most {WORDS}: {sentence}"
            for word, instead in BANNED.items():
                if re.search(rf"\b{word}\b", sentence, re.I):
                    yield f"write {instead!r} in the place of {word!r}: {sentence}"


def main(pages: list[str]) -> int:
    wrong = 0
    for page in pages or PAGES:
        for problem in problems((ROOT / page).read_text("utf-8"), page in GENERATED):
            print(f"{page}: {problem}")
            wrong += 1
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
