"""Pages for people: short sentences and lines, standard words, blocks that a script can run."""

from __future__ import annotations

import pytest
from scripting import ROOT, script

LONGEST = {"README.md": 150, "scripts/RESULTS.md": 200}
GUIDE = 120
pytestmark = pytest.mark.fast

prose, readme = script("prose"), script("readme")


@pytest.mark.parametrize("page", prose.PAGES)
def test_a_page_is_plain(page: str) -> None:
    text = (ROOT / page).read_text("utf-8")
    assert list(prose.problems(text, page in prose.GENERATED)) == []


def test_pages_are_short() -> None:
    guides = {str(path.relative_to(ROOT)): GUIDE for path in (ROOT / "recipes/guides").glob("0*.md")}
    lines = {page: len((ROOT / page).read_text("utf-8").splitlines()) for page in LONGEST | guides}
    assert len(guides) == 9 and [page for page in lines if lines[page] > (LONGEST | guides)[page]] == []


def test_links_of_pages_lead_somewhere() -> None:
    import re

    for page in prose.PAGES:
        for target in re.findall(r"\]\(([^)#:]+)[)#]", (ROOT / page).read_text("utf-8")):
            assert (ROOT / page).parent.joinpath(target).exists(), f"{page}: {target}"


def test_problems_are_found() -> None:
    long = " ".join(["no"] * 26)
    found = list(
        prose.problems(f"{'x' * 111}\n\n- {long}. Fine.\n\n```\n{long}\n```\n\nIt is simply so.\n")
    )
    assert [problem.split()[0] for problem in found] == ["line", "26", "write"]


def test_blocks_are_read_with_what_they_print() -> None:
    page = "As `a.yaml`:\n\n```yaml\nx: 1\n```\n\n```bash\nls\n```\n\n```text\na.yaml\n```\n"
    made, listed = readme.blocks(page)
    assert made.script == "cat > a.yaml <<'END'\nx: 1\nEND\n" and made.expected is None
    assert listed.script == "ls\n" and listed.expected == ["a.yaml"] and listed.line == 7


@pytest.mark.parametrize(
    ("expected", "printed", "right"),
    [
        ("perplexity: 18.77", "perplexity: 20.1", True),
        ("perplexity: 18.77", "perplexity: 29.1", False),
        ("4,722,048 -> 2,590,080 bytes", "4,722,048 -> 2,590,080 bytes", True),
        ("a …, 3 layers", "a b c, 3 layers", True),
        ("a …, 3 layers", "a b c, 4 layers", False),
        ("a  b", "a b", True),
        ("a.b", "axb", False),
    ],
)
def test_lines_agree_up_to_small_differences(expected: str, printed: str, right: bool) -> None:
    assert readme.same(expected, printed) is right
    assert readme.agree([expected, "…"], [printed, "more", "lines"]) is right
    assert not readme.agree([expected], [])


def test_the_table_of_the_demo_is_compared_with_what_it_prints() -> None:
    page = "| the demo's end | MB | perplexity |\n|---|---|---|\n| dense | 4.73 | 16.80 |\n\n| a | 1 |"
    head, row = "on tests/data/sample.txt     MB   perplexity", "dense          4.73        17.1"
    assert readme.missing_rows(page, [head, row]) == []
    assert readme.missing_rows(page, [head, row.replace("17", "27")])
    assert readme.missing_rows("no table", [row])
    assert len(readme.missing_rows((ROOT / "README.md").read_text("utf-8"), [])) == 3
