"""The generated pages say what the product says, and name every variable that the code reads."""

from __future__ import annotations

import re
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.fast


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = spec_from_file_location("reference", ROOT / "scripts" / "reference.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_reference_is_that_of_the_product(script: ModuleType) -> None:
    """Else: python scripts/reference.py."""
    assert (ROOT / script.REFERENCE).read_text("utf-8") == script.reference()


@pytest.mark.parametrize("page", ["recipes/guides/08-families.md", "recipes/README.md"])
def test_lists_are_those_of_the_product(page: str, script: ModuleType) -> None:
    assert page in script.PAGES and (ROOT / page).read_text("utf-8") == script.with_tables(page)


def test_every_variable_of_ours_is_described(script: ModuleType) -> None:
    described = {name for names in script.VARIABLES for name in names.split(", ")}
    read = {
        name
        for top in ("compressor", "kernels", "scripts")
        for kind in ("*.py", "*.sh")
        for path in (ROOT / top).rglob(kind)
        if path.name != "reference.py"
        for name in re.findall(r"\bBLR_[A-Z_]*[A-Z]\b", path.read_text("utf-8"))
    }
    assert read <= described
    assert {name for name in described if name.startswith("BLR_")} <= read
