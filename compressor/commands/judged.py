"""What `blr eval --format json` prints, as other commands read it."""

from typing import Annotated

from pydantic import Field

from blr.compressor.workspace.strict_json import Told

Figure = Annotated[float, Field(gt=0)]


class JudgedMean(Told):
    """A mean without its standard error."""

    mean: float


class JudgedDistance(Told):
    """How far an output is from the dense model: a decoder in a text, or an encoder."""

    kl: JudgedMean | None = None
    agreement: float | None = None
    cosine_to_dense: float | None = None


class JudgedText(Told):
    """The perplexity measured on one text, by the name of that text."""

    text: str
    perplexity: Figure
    against: JudgedDistance | None = None


class JudgedOutput(Told):
    """The evaluated checkpoint: its name and the SHA-256 digest of its files."""

    name: str | None = None
    digest: str | None


class Judged(Told):
    """One evaluation: perplexities, task scores or Spearman correlation, or the error that ended it."""

    error: str | None = None
    checkpoint: JudgedOutput | None = None
    text: str = "text"
    perplexity: Figure | None = None
    texts: list[JudgedText] = Field(default_factory=list)
    tasks: dict[str, dict[str, float]] = Field(default_factory=dict)
    spearman: float | None = None
    against: JudgedDistance | None = None

    @property
    def perplexities(self) -> list[JudgedText]:
        if self.perplexity is None or self.texts:
            return self.texts
        return [JudgedText(text=self.text, perplexity=self.perplexity, against=self.against)]
