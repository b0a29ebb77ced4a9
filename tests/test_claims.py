"""Pages promise of vLLM, GPUs and tables what the plugin, the tables and the code hold."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from scripting import ROOT, script

from blr.compressor.exporting.options import KINDS
from blr.compressor.modeling.splitting import AXES
from blr.kernels.common.transient import VARIABLE, transient_bytes

prose = script("prose")
pytestmark = pytest.mark.fast
GPU = re.compile(r"\b(?:G?[HB]\d00|A\d{2,3}|L40?S?|T4|V100|RTX[ -]?\w?\d{4})\b")
SAYS_WHICH = re.compile(r"\b(no|not|never)\b|--as (vllm|plain)\b")
SAY_MEASURED = ("README.md", "scripts/RESULTS.md", "recipes/README.md")
GUIDES = [page for page in prose.PAGES if re.match(r"recipes/guides/\d", page)]
FOR_USERS = [*SAY_MEASURED, *GUIDES, "scripts/CHANGELOG.md"]


def passages(page: str) -> Iterator[str]:
    """Paragraphs, items and rows of tables, without the words of links."""
    text = re.sub(r"\[[^\]]*\](\([^)]*\))?", "", (ROOT / page).read_text("utf-8"))
    yield from prose.paragraphs(text)
    yield from (line for line in text.splitlines() if line.startswith("|"))


def sentences(page: str) -> Iterator[str]:
    for passage in passages(page):
        yield from prose.END.split(passage)


def plugin(name: str) -> Any:
    """A constant of the plugin, which only vLLM can import."""
    path = ROOT / "compressor/integrations/vllm_plugin.py"
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return ast.literal_eval(node.value)
    raise LookupError(name)


@pytest.mark.parametrize("page", FOR_USERS)
def test_no_page_says_that_vllm_serves_every_export(page: str) -> None:
    """It takes those of two kinds, and refuses others (tests/vllm). Speeds of exports are not vLLM's."""
    assert {"vllm", "plain"} <= set(KINDS)
    both = [p for p in passages(page) if re.search("vllm", p, re.I) and re.search("export", p, re.I)]
    assert [p for p in both if not SAYS_WHICH.search(p)] == []
    assert [s for s in sentences(page) if re.search(r"vllm.*\d tokens", s, re.I)] == []


def test_what_readme_promises_first_is_not_of_vllm() -> None:
    """Its figures there are of exports and of transformers."""
    assert "vllm" not in (ROOT / "README.md").read_text("utf-8").partition("\n## ")[0].lower()


def test_guides_name_the_families_that_vllm_serves() -> None:
    told = [sentence for page in GUIDES for sentence in sentences(page)]
    (said,) = (s for s in told if "The plugin takes" in s)
    assert tuple(re.findall(r"\b[A-Z]\w+", said.partition(" takes ")[2])) == plugin("FAMILIES")
    (experts,) = (s for s in told if "It also takes the experts of" in s)
    mixtures = re.findall(r"\b[A-Z]\w+", experts.partition(" takes ")[2])
    assert [each.lower() for each in mixtures] == [
        each.removesuffix("Moe").lower() for each in plugin("MIXTURES")
    ]
    (split,) = (s for s in told if "are split over GPUs" in s)
    assert {"Low rank": "svd", "BLAST": "blast", "Monarch": "monarch"}.keys() == set(
        re.split(", | and ", split.partition(" are ")[0])
    )
    assert {"svd", "blast", "monarch"} <= AXES.keys() and "ks" not in AXES


def test_gpus_that_figures_were_measured_on_have_tables() -> None:
    tuned = {path.stem for path in (ROOT / "configs/tuned").glob("*.yaml")}
    for page in SAY_MEASURED:
        named = {gpu.lower() for gpu in GPU.findall((ROOT / page).read_text("utf-8"))}
        assert named <= tuned, page
    (said,) = (s for page in GUIDES for s in sentences(page) if "are shipped" in s and GPU.search(s))
    assert {gpu.lower() for gpu in GPU.findall(said)} == tuned
    known = yaml.safe_load((ROOT / "configs/gpus.yaml").read_text("utf-8"))
    for page in GUIDES:
        named = {gpu.lower() for gpu in GPU.findall((ROOT / page).read_text("utf-8"))}
        assert named <= known.keys(), page


def test_no_page_says_that_a_table_bounds_intermediates(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable does, and the device where it is not set, as guide 6 says."""
    monkeypatch.delenv(VARIABLE, raising=False)
    assert transient_bytes("cuda") is None and transient_bytes("cpu") == 64 << 20
    guide = " ".join(passages("recipes/guides/06-speed-and-memory.md"))
    assert "default on a CPU and off on a GPU" in guide
    for page in prose.PAGES:
        found = [s for s in sentences(page) if VARIABLE in s or "intermediates" in s]
        assert [s for s in found if re.search(r"\btables?\b", s)] == [], page
