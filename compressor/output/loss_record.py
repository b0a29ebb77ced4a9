"""What a checked output says of its loss: put into the card and the report that were written before."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from blr.compressor.base.disk import write_stream
from blr.compressor.checkpoint.extras import CARD, REPORT
from blr.compressor.output.loss_messages import MARK, rounded, told
from blr.compressor.output.produce import Written
from blr.compressor.output.report import report_pages


def write_loss(folder: Path, facts: dict[str, Any] | None) -> Written:
    """Rewrite card and report of a folder that is being written, as far as it has them.

    Args:
        facts: of `loss.Loss` or `loss.Unmeasured`; None for a model that continues no text.

    Returns:
        What was rewritten: size and SHA-256 by file.
    """
    files = _card(folder / CARD, facts) | _report(folder / REPORT, facts)
    return {name: write_stream(folder / name, [data]) for name, data in files.items()}


def _card(path: Path, facts: dict[str, Any] | None) -> dict[str, bytes]:
    text = path.read_text("utf-8") if path.is_file() else ""
    if MARK not in text:
        return {}
    said = "" if facts is None else f"\nPerplexity {told(facts)}.\n"
    return {CARD: text.replace(MARK, said).encode()}


def _report(path: Path, facts: dict[str, Any] | None) -> dict[str, bytes]:
    if facts is None or not path.is_file():
        return {}
    data = json.loads(path.read_bytes())
    return report_pages(data | {"loss": rounded(facts)})
