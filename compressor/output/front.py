"""The head of a model card, which the hub reads: what the source's says, and what is ours.

Licence, base model and language of a derived model are those of its source, which some licences demand
to be said.
"""

from __future__ import annotations

import math
import re
from io import StringIO
from pathlib import Path
from typing import Any

from blr.compressor.base.errors import BlrError
from blr.compressor.checkpoint.extras import CARD, MAX_BYTES
from blr.compressor.checkpoint.library import TRANSFORMERS
from blr.compressor.checkpoint.regular import inside, read_text
from blr.compressor.recipe.yaml_file import parse_mapping

FENCE = "---\n"
_HEAD = re.compile(r"\s*---[ \t]*\n(?P<head>.*?)(?:(?<=\n)---[ \t]*(?:\n|\Z))", re.DOTALL)
# Plain scalars that YAML 1.1, by which the hub reads cards, takes for text as YAML 1.2 does
_PLAIN = re.compile(r"[A-Za-z][A-Za-z0-9_./+ -]*(?<! )", re.ASCII)
_WORDS = {"y", "n", "yes", "no", "on", "off", "true", "false", "null"}
KEPT = (
    *("license", "license_name", "license_link", "base_model", "language", "pipeline_tag"),
    *("library_name", "tags"),
)
TAGS = ("blr", "structured-compression")


def card_front(
    folder: Path, name: str, tags: tuple[str, ...] = TAGS, library: str = TRANSFORMERS.name
) -> str:
    """The head of the card of an output made from the checkpoint in `folder`, called `name`.

    Args:
        name: a hub id (owner/name) is named as a base model. tags: ours, behind the source's.
        library: what loads it, unless the source's card says.
    """
    kept = source_front(folder)
    bases = [*_texts(kept.pop("base_model", None)), *([name] if "/" in name else [])]
    front = {
        **kept,
        **({"base_model": list(dict.fromkeys(bases))} if bases else {}),
        "library_name": kept.get("library_name", library),
        "tags": list(dict.fromkeys([*_texts(kept.get("tags")), *tags])),
    }
    return write_front(front)


def write_front(front: dict[str, Any]) -> str:
    """The head of a card, fences and all."""
    return f"{FENCE}{_yaml(front)}{FENCE}"


def read_front(text: str, path: Path) -> tuple[dict[str, Any], str]:
    """The head of a card as plain YAML, empty if it has none, and the rest of its text.

    Raises RecipeError for a head that is no plain YAML; `path` names it.
    """
    found = _HEAD.match(text)
    if found is None:
        return {}, text
    head = found["head"]
    return (parse_mapping(path, head) if head.strip() else {}), text[found.end() :]


def source_front(folder: Path) -> dict[str, Any]:
    """What the head of the source's card says under `KEPT`: texts and lists of texts; nothing of a card
    that has no head, or one that is no plain YAML."""
    try:
        found, _ = read_front(read_text(inside(folder, CARD), MAX_BYTES), folder / CARD)
    except BlrError:
        return {}
    return {key: found[key] for key in KEPT if key in found and _is_plain(found[key])}


def _is_plain(value: Any) -> bool:
    return isinstance(value, str) or (
        isinstance(value, list) and all(isinstance(item, str) for item in value)
    )


def _texts(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else list(value or ())


def _yaml(value: dict[str, Any]) -> str:
    from ruamel.yaml import YAML
    from ruamel.yaml.representer import SafeRepresenter

    class Representer(SafeRepresenter):
        """For readers of YAML 1.1 and 1.2 alike."""

    Representer.add_representer(str, _text_node)
    Representer.add_representer(float, _float_node)
    out = StringIO()
    yaml: Any = YAML(typ="safe", pure=True)
    yaml.Representer = Representer
    yaml.default_flow_style = False
    yaml.sort_base_mapping_type_on_output = False
    yaml.dump(value, out)
    return out.getvalue()


def _text_node(representer: Any, text: str) -> Any:
    plain = _PLAIN.fullmatch(text) is not None and text.lower() not in _WORDS
    return representer.represent_scalar("tag:yaml.org,2002:str", text, style=None if plain else '"')


def _float_node(representer: Any, number: float) -> Any:
    """A float with a point, without which YAML 1.1 takes one with an exponent for text."""
    mantissa, e, exponent = repr(number).partition("e")
    shown = mantissa + ".0" * bool(e and "." not in mantissa) + e + exponent
    words = {math.inf: ".inf", -math.inf: "-.inf"}
    shown = words.get(number, ".nan" if math.isnan(number) else shown)
    return representer.represent_scalar("tag:yaml.org,2002:float", shown)
