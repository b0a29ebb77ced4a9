"""Quality of a model: perplexity of decoders, STS correlation of sentence encoders."""

import csv
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from io import StringIO
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from blr.compressor.base.device import pick_device
from blr.compressor.base.errors import CapabilityError, InputError, NumericsError
from blr.compressor.base.progress import Progress
from blr.compressor.base.quoting import is_numeral, quote
from blr.compressor.checkpoint.config import read_config
from blr.compressor.checkpoint.context import context_of
from blr.compressor.checkpoint.extras import MODULES
from blr.compressor.checkpoint.regular import read_start, read_text
from blr.compressor.commands.text_scores import (
    DenseStates,
    ScoredWindow,
    check_alike,
    distance,
    divided,
    kept_at,
    text_scores,
)
from blr.compressor.integrations.lm_eval import compared, run_tasks
from blr.compressor.loading.load import EMBEDS, GENERATES, load_model, load_tokenizer
from blr.compressor.loading.sentences import Sentences, read_sentences
from blr.compressor.loading.tokenizer import PROBE, check_ids, encode_padded, taken_by
from blr.compressor.output.loss import percentiles
from blr.compressor.recipe.settings import USUAL_WINDOW, EvalSettings
from blr.compressor.text.reading import Beginning, beginning_of, read_whole_text

MAX_BYTES = 64 * 2**20  # of a text; all of it is tokenized at once
Pair: TypeAlias = tuple[str, str, float]  # two sentences and their score


def evaluate_folder(
    folder: Path, asked: EvalSettings, progress: Progress, against: Path | None = None
) -> dict[str, object]:
    """Measure what `asked` says, JSON-ready, and how far it is from the dense model in the folder
    `against`. Texts and pairs are checked before a model is loaded."""
    pairs = read_pairs(asked.sts) if asked.sts else []
    if asked.sts:
        name = str((read_config(folder).get("architectures") or [""])[0])
        if name.endswith(("ForCausalLM", "LMHeadModel")) and not (folder / MODULES).exists():
            said = f"{name} continues text; expected an encoder of sentences for --sts"
            raise CapabilityError(f"{folder}: {said}; take --text")
    data, trust = [*asked.text, *filter(None, [asked.sts])], asked.trust_remote_code
    start = read_start(data[0]) if data else ""
    tokenizer = load_tokenizer(folder, trust=trust, text=start)
    part = asked.max_tokens, asked.skip_tokens or 0
    tokens = [read_tokens(path, tokenizer, *part) for path in asked.text]
    if against is not None:
        theirs = load_tokenizer(against, trust=trust, text=start)
        check_alike((folder, against), (tokenizer, theirs), (PROBE, start))
    evaluation = Evaluation(folder, against, asked, progress, tokenizer)
    evaluation.model(folder)
    if pairs:
        return evaluation.of_pairs(pairs)
    result = evaluation.of_texts(tokens) if tokens else {}
    return result | evaluation.of_tasks() if asked.tasks else result


@dataclass(frozen=True)
class Evaluation:
    """The checkpoint in `folder`, perhaps beside the dense one in `against`; both have one tokenizer."""

    folder: Path
    against: Path | None
    asked: EvalSettings
    progress: Progress
    tokenizer: PreTrainedTokenizerBase
    loaded: dict[Path, PreTrainedModel] = field(default_factory=dict)

    def model(self, folder: Path) -> PreTrainedModel:
        """The model in one of the folders, loaded when it is first asked for."""
        if folder not in self.loaded:
            asked, task = self.asked, EMBEDS if self.asked.sts else GENERATES
            self.loaded[folder] = load_model(
                folder,
                task,
                dtype=asked.dtype,
                device=asked.device,
                trust=asked.trust_remote_code,
                verify=asked.verify,
                progress=self.progress,
            )
        return self.loaded[folder]

    def of_pairs(self, pairs: list[Pair]) -> dict[str, object]:
        """The result on pairs of sentences; beside a dense model, how near embeddings are to its (one in
        100 is below the lowest cosine)."""
        spearman, ours = self._correlation(self.folder, pairs)
        found: dict[str, object] = {"spearman": spearman, "pairs": len(pairs)}
        if self.against is None:
            return found
        dense, theirs = self._correlation(self.against, pairs)
        near = torch.nn.functional.cosine_similarity(ours, theirs)
        far = {
            "cosine_to_dense": float(near.mean()),
            "lowest_cosine": percentiles(near, [1])[0],
            "dense_spearman": dense,
            "spearman_to_dense": rank_correlation(_of_each_pair(ours), _of_each_pair(theirs)),
        }
        return {**found, "against": far}

    def _correlation(self, folder: Path, pairs: list[Pair]) -> tuple[float, Tensor]:
        return sts_spearman(partial(self._embed, self.model(folder), read_sentences(folder)), pairs)

    def _embed(self, model: PreTrainedModel, head: Sentences, sentences: list[str]) -> Tensor:
        """Embeddings [n, d], computed in batches of similar length."""
        order, batch = sorted(range(len(sentences)), key=lambda n: len(sentences[n])), self.asked.batch
        groups = [order[n : n + batch] for n in range(0, len(order), batch)]
        rows: dict[int, Tensor] = {}
        with self.progress.layers(len(groups), "embedding") as advance:
            for group in groups:
                advance("")
                found = pooled(model, self.tokenizer, head, [sentences[n] for n in group])
                rows.update(zip(group, found, strict=True))
        return torch.stack([rows[n] for n in range(len(sentences))])

    def of_tasks(self) -> dict[str, object]:
        found = run_tasks(self.model(self.folder), self.tokenizer, self.asked)
        if self.against is None:
            return asdict(found[0])
        dense = run_tasks(self.model(self.against), self.tokenizer, self.asked)
        return {**asdict(found[0]), "tasks_against": compared(found, dense)}

    def of_texts(self, tokens: list[Tensor]) -> dict[str, object]:
        """The result on one text, or those on several."""
        asked, tokenizer = self.asked, self.tokenizer
        size = asked.window or min(USUAL_WINDOW, context_of(self.model(self.folder).config.to_dict()))
        begins = beginning_of(tokenizer)
        counted = _counted(size, asked.stride, list(tokenizer.convert_ids_to_tokens(list(begins))))
        found = []
        for path, ids in zip(asked.text, tokens, strict=True):
            told = self._of_text(ids, size, begins)
            found.append({"text": str(path), **told, "counted": counted})
        return found[0] if len(found) == 1 else {"texts": found}

    def _of_text(self, ids: Tensor, window: int, beginning: Beginning) -> dict[str, object]:
        how = window, self.asked.stride or window, self.asked.batch
        dense = None if self.against is None else self._dense(self.against, ids, beginning, *how)
        model = self.model(self.folder)
        found = text_scores(model, ids, *how, self.progress, beginning, dense)
        told = {**perplexity(found), "window": window, "beginning": beginning}
        if dense is None:
            return told
        dense.write(self.progress)
        first = self.asked.skip_tokens or 0
        return {**told, "against": asdict(distance(found, ids, first, self.tokenizer))}

    def _dense(self, folder: Path, ids: Tensor, beginning: Beginning, *how: int) -> DenseStates:
        """The dense model's states on a text, which `--keep-dense` keeps."""
        asked, path = self.asked, None
        if asked.keep_dense is not None:
            key = ids.tolist(), beginning, how, asked.dtype, str(pick_device(asked.device))
            path = kept_at(asked.keep_dense, folder, *key)
        return DenseStates(lambda: divided(self.model(folder), ids, beginning), path, len(ids))


def _counted(window: int, stride: int | None, begins: list[str]) -> str:
    """A sentence on how tokens of a text are counted."""
    if begins:
        told = f"every token of the text, in windows of {window}"
        return f"{told} that each begin with {' '.join(map(str, begins))}, which is not counted"
    first = "the text" if stride is not None and stride < window else "each"
    return f"every token, in windows of {window}, but the first of {first}"


def read_tokens(
    path: Path, tokenizer: PreTrainedTokenizerBase, max_tokens: int | None = None, skip: int = 0
) -> Tensor:
    """Token ids [n] of a text, without the first `skip`, cut to `max_tokens`. Raises InputError."""
    text = read_whole_text(path, MAX_BYTES)
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"][skip:][:max_tokens]
    if len(ids) < 2:
        raise InputError(f"{path}: {len(ids)} tokens, expected at least 2; give a longer text")
    return torch.tensor(ids)


def perplexity(found: list[ScoredWindow]) -> dict[str, float]:
    """exp of the mean negative log-likelihood of what windows of a text score, and their tokens."""
    losses = torch.cat([scores.loss for _, scores in found]).double()
    return {"perplexity": math.exp(float(losses.mean())), "tokens": len(losses)}


def pooled(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, head: Sentences, sentences: list[str]
) -> Tensor:
    """Embeddings [m, d] of one batch, as `head` pools the states of `model`."""
    limit = min(context_of(model.config.to_dict()), head.length or tokenizer.model_max_length)
    tokens = encode_padded(tokenizer, head.texts(sentences), limit).to(model.device)
    check_ids(model, tokens["input_ids"])
    hidden = model(**taken_by(model, tokens)).last_hidden_state  # [m, w, d]
    return head.embed(hidden, tokens["attention_mask"], head.unpooled(tokenizer)).cpu()


@torch.inference_mode()
def sts_spearman(embed: Callable[[list[str]], Tensor], pairs: Sequence[Pair]) -> tuple[float, Tensor]:
    """Correlation of cosine similarities with gold scores, in percent, and the embeddings [2 n, d]."""
    embeddings = embed([s for first, second, _ in pairs for s in (first, second)]).double()
    gold = torch.tensor([score for *_, score in pairs], dtype=torch.float64)
    return rank_correlation(_of_each_pair(embeddings), gold), embeddings


def _of_each_pair(embeddings: Tensor) -> Tensor:
    """Cosine similarities [n] of embeddings [2 n, d], two by two."""
    return torch.nn.functional.cosine_similarity(embeddings[0::2], embeddings[1::2])


def rank_correlation(cosine: Tensor, gold: Tensor) -> float:
    """Spearman's, in percent. Raises NumericsError where it is not defined."""
    found = 100 * float(torch.corrcoef(torch.stack([_ranks(cosine), _ranks(gold)]))[0, 1])
    if math.isfinite(found) and bool(torch.isfinite(cosine).all()):
        return found
    bad, values, scores = int((~torch.isfinite(cosine)).sum()), len(cosine.unique()), len(gold.unique())
    raise NumericsError(
        f"no rank correlation of {values} different cosine similarities ({bad} of {len(cosine)} NaN) "
        f"with {scores} different scores: expected finite ones that vary; evaluate in --dtype float32, "
        "or give pairs with other scores"
    )


def read_pairs(path: Path) -> list[Pair]:
    """Sentence pairs and scores of a CSV file, with or without a header. Raises InputError."""
    text = read_text(path, MAX_BYTES)
    try:
        rows = [row for row in csv.reader(StringIO(text, newline="")) if row]
    except csv.Error as error:
        remedy = "write sentence, sentence, score in every row"
        raise InputError(f"{path}: not a readable CSV file ({error}); {remedy}") from None
    if rows and not is_numeral(rows[0][-1]):
        rows = rows[1:]
    for number, row in enumerate(rows, 1):
        if len(row) < 3 or not is_numeral(row[-1]) or not math.isfinite(float(row[-1])):
            found = f"row {number} is {quote(row, 120)[1:-1]}"
            raise InputError(f"{path}: {found}, expected sentence, sentence, score; repair the row")
    if len(rows) < 2:
        raise InputError(
            f"{path}: {len(rows)} rows, expected two at least of sentence, sentence, score; give more"
        )
    return [(row[-3], row[-2], float(row[-1])) for row in rows]


def _ranks(values: Tensor) -> Tensor:
    """Ranks from 0, ties sharing their mean rank."""
    _, inverse, counts = torch.unique(values, return_inverse=True, return_counts=True)
    ends = counts.cumsum(0).double()
    return (ends - (counts.double() + 1) / 2)[inverse]
