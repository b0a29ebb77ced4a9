"""What `blr eval --format json` prints, as other commands read it."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from blr.compressor.workspace.strict_json import Told

Figure = Annotated[float, Field(gt=0)]


class JudgedText(Told):
    """Of one text."""

    text: str
    perplexity: Figure


class JudgedOutput(Told):
    """Which model was judged."""

    name: str | None = None
    digest: str | None


class Judged(Told):
    """Of one text or several, tasks, or pairs; or why it failed."""

    error: str | None = None
    checkpoint: JudgedOutput | None = None
    text: str = "text"
    perplexity: Figure | None = None
    texts: list[JudgedText] = Field(default_factory=list)
    tasks: dict[str, dict[str, float]] = Field(default_factory=dict)
    spearman: float | None = None

    @property
    def perplexities(self) -> list[JudgedText]:
        """One a text."""
        alone = self.perplexity
        return self.texts or ([] if alone is None else [JudgedText(text=self.text, perplexity=alone)])
