"""The head of a model card, which the hub reads: what the source's says, and what is ours.

Licence, base model and language of a derived model are those of its source, which some licences demand
to be said.
"""

from __future__ import annotations

from io import StringIO
from pathlib import Path
from typing import Any

from blr.compressor.checkpoint.extras import CARD, MAX_BYTES
from blr.compressor.checkpoint.library import TRANSFORMERS
from blr.compressor.checkpoint.regular import inside, read_text
from blr.compressor.errors import BlrError
from blr.compressor.recipe.yaml_file import parse_mapping

FENCE = "---\n"
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
    head, fence, body = text.removeprefix(FENCE).partition(f"\n{FENCE}")
    if not (fence and text.startswith(FENCE)):
        return {}, text
    return parse_mapping(path, head), body


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

    out = StringIO()
    yaml: Any = YAML(typ="safe")
    yaml.default_flow_style = False
    yaml.sort_base_mapping_type_on_output = False
    yaml.dump(value, out)
    return out.getvalue()
