"""Runs a calibrated compression: reads text, measures sensitivities, plans ranks, fits the blocks."""

import hashlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from blr.compressor.base.errors import CapabilityError
from blr.compressor.base.progress import FITTING, LAST, MEASURING
from blr.compressor.base.progress import OWN as WRITING_OWN
from blr.compressor.checkpoint.context import context_of, of_text
from blr.compressor.checkpoint.header import TensorEntry
from blr.compressor.checkpoint.regular import read_start
from blr.compressor.checkpoint.source import Source
from blr.compressor.fitting.blocks import Batch, BlockModel
from blr.compressor.fitting.factorize import Result, Work, factorize_layers, is_whole
from blr.compressor.fitting.refit import finish_blocks, finish_epochs
from blr.compressor.fitting.sensitivity import Sensitivity, measure
from blr.compressor.fitting.sequential import fit_blocks
from blr.compressor.fitting.student import FitRun
from blr.compressor.loading.load import load_computing, load_tokenizer
from blr.compressor.loading.native import family_of
from blr.compressor.planning.plan import Plan, cache_notes
from blr.compressor.planning.training_sizes import (
    FINISH_EPOCHS,
    SENSITIVITY_TOKENS,
    reads_sensitivities,
    refit_epochs,
)
from blr.compressor.recipe.schema import Recipe
from blr.compressor.text.own import ROOM, OwnText, write_own_text
from blr.compressor.text.reading import (
    Calibration,
    beginning_of,
    begun,
    is_own,
    packed_calibration,
    read_calibration,
)
from blr.compressor.text.windows import check_known, interleaved
from blr.compressor.workspace.journal import canonical_json, layer_key

SWEEP = 8  # to be raised when measured sensitivities change
NAMED = 6  # layers that a note names at most
ENOUGH = 4  # tokens for each number of an expert's input: with fewer a calibration may lose

Replan = Callable[[dict[str, list[float]] | None], Plan]


@dataclass
class Outcome:
    """The result of a calibrated compression: factors by module, their plan, facts of the calibration,
    curves of sensitivity by module, and trained norms by tensor."""

    results: dict[str, Result]
    plan: Plan
    facts: dict[str, object]
    curves: dict[str, list[float]]
    norms: dict[str, TensorEntry]


def compress_calibrated(work: Work, replan: Replan, text: str, weights: str = "") -> Outcome:
    """Fit every planned layer to the activations that `text` causes. `replan` makes the plan from
    measured sensitivities (None: uniform ranks); `weights` is the digest of all weights, on which
    statistics depend."""
    source, recipe, target = work.source, work.recipe, work.target
    model = BlockModel(source, family_of(source), target)
    if model.family.experts:
        model.part_experts(replan(None))
    timed = work.progress.timed
    with timed("text"):
        calibration = _read(work, text, model)
    model.load_rest()
    batches = model.start(calibration, work.processes)
    key = layer_key(
        weights=weights,
        calibration=calibration.digest,
        sequential=recipe.sequential,
        seed=recipe.seed,
        blocks=[model.path, len(model)],
    )
    specs = [planned.spec for planned in replan(None).layers]
    epochs = refit_epochs(recipe, specs, target.type == "cuda")
    usual = FINISH_EPOCHS * (epochs > 0)  # --refit 0 asks for closed form
    finish = finish_epochs(recipe.finish, usual, model, batches)
    sensitivity, curves = None, dict[str, list[float]]()
    if not reads_sensitivities(recipe, specs, epochs):
        work.progress.leave_out(MEASURING)
    else:
        with timed("sensitivity"):
            sensitivity = _measure(work, model, batches, key, replan)
        curves = {module: curve.tolist() for module, curve in sensitivity.curves.items()}
    plan = replan(None if sensitivity is None else curves)
    if sensitivity is not None:
        plan.notes += cache_notes(plan, curves, sensitivity.tokens)
    notes, widest = list(plan.notes), max(planned.spec.in_features for planned in plan.layers)
    if calibration.tokens < widest:
        notes.append(
            f"calibrated on {calibration.tokens} tokens, fewer than the {widest} inputs of a layer: the "
            "loss on other text may be far larger than without a calibration; give more text"
        )
    work.progress.notes(notes)
    prefix = layer_key(key=key, measured=sensitivity is not None)
    if not finish:
        work.progress.leave_out(LAST)
    run = FitRun(work, model, plan, batches, sensitivity, epochs, prefix, finish)
    results = fit_blocks(run)
    if not any(student.trained for student in run.students):  # all that is fitted lies outside of blocks
        finish = 0
    if finish:
        with timed("last pass"):
            finish_blocks(run, model.start(calibration, work.processes))
    results |= _outside(work, plan, results)
    facts = {"tokens": calibration.tokens, "digest": calibration.digest}
    facts |= {"refit_epochs": epochs, "finish_epochs": finish}
    plan.notes += (told := few_tokens(plan, results))
    work.progress.notes(told)
    ordered = {planned.layer.module: results[planned.layer.module] for planned in plan.layers}
    return Outcome(ordered, plan, facts, curves, run.norms)


def expected(recipe: Recipe, text: str | None, device: str) -> list[str]:
    """The steps of fitting by `recipe` to `text` (None: from weights alone) on a kind of `device`."""
    if text is None:
        return [FITTING]
    own = [WRITING_OWN] * bool(is_own(text) or recipe.mix)
    measured = [MEASURING] * (recipe.allocation != "uniform")
    last = device == "cuda" and recipe.refit != 0 if recipe.finish is None else recipe.finish > 0
    return [*own, *measured, FITTING, *[LAST] * last]


def read_text(
    source: Source, samples: int, seq_len: int, name: str, packed: bool, offline: bool
) -> tuple[PreTrainedTokenizerBase, Calibration | None]:
    """The tokenizer of `source`, and the calibration's text in windows of `seq_len` tokens (None where
    the model writes it). Raises what `read_calibration` does, and InputError for unknown tokens."""
    start = read_start(Path(name)) if os.path.exists(name) else ""
    tokenizer = load_tokenizer(source.folder, text=start)
    if is_own(name):
        return tokenizer, None
    found = read_calibration(
        name, tokenizer, samples=samples, seq_len=seq_len, packed=packed, offline=offline
    )
    check_known(found.ids, of_text(source.config).get("vocab_size"), name)
    return tokenizer, found


def _read(work: Work, text: str, model: BlockModel) -> Calibration:
    recipe, source = work.recipe, work.source
    seq_len = min(recipe.seq_len, context_of(model.model.config.to_dict()))
    if seq_len < recipe.seq_len:
        work.progress.notes(
            [f"calibrating on windows of {seq_len} tokens, the model's context, not {recipe.seq_len}"]
        )
    own, packed = is_own(text), model.model.can_generate()
    if (own or recipe.mix) and not packed:
        remedy = "give a text by --text" if own else "leave --mix out"
        raise CapabilityError(
            f"{source.folder}: a model that generates no text has none of its own; {remedy}"
        )
    tokenizer, found = read_text(source, recipe.samples, seq_len, text, packed, work.offline)
    if found is not None and not recipe.mix:
        return found
    return with_own_text(work, tokenizer, seq_len, found)


def _measure(
    work: Work, model: BlockModel, batches: list[Batch], key: str, replan: Replan
) -> Sensitivity:
    """Measure sensitivities on the first batches that hold `SENSITIVITY_TOKENS`."""
    chosen, tokens = [], 0
    for batch in batches:
        if tokens < SENSITIVITY_TOKENS:
            chosen.append(batch)
            tokens += batch.tokens
    rows: set[str] = set()  # modules whose fits need the diagonal of the information alone
    if work.recipe.bpw is None:  # else sensitivities choose bits as well
        rows = {p.layer.module for p in replan(None).layers if not is_whole(p.spec)}
    key = layer_key(key=key, sensitivity=[tokens, SWEEP, sorted(rows)])
    return measure(work, model, chosen, key, lambda module: module not in rows)


def _outside(work: Work, plan: Plan, done: dict[str, Result]) -> dict[str, Result]:
    """Fit the layers that are in no group of a block without statistics, and say so."""
    rest = [planned for planned in plan.layers if planned.layer.module not in done]
    if not rest:
        return {}
    names = [planned.layer.module for planned in rest]
    listed = ", ".join([*names[:NAMED], *["…"][: len(names) > NAMED]])
    work.progress.notes(
        [f"fitted without calibration, outside of blocks or not run once in them: {listed}"]
    )
    return factorize_layers(work, Plan(rest))


def with_own_text(
    work: Work, tokenizer: PreTrainedTokenizerBase, seq_len: int, text: Calibration | None
) -> Calibration:
    """Windows of `seq_len` tokens, of which the model writes the share `mix`, or all without a `text`.
    They leave out the random token that a sample began with, where the context has room."""
    samples, processes = work.recipe.samples, work.processes
    count = samples if text is None else max(1, round(work.recipe.mix * samples))
    model = load_computing(work.source.folder, "AutoModelForCausalLM", work.target)
    length = min(seq_len + ROOM, context_of(model.config.to_dict()))
    digests = {name: work.source.sha256(entry) for name, entry in work.source.entries.items()}
    author = hashlib.sha256(canonical_json(digests)).hexdigest()
    wanted = OwnText(count * length, length, work.recipe.seed, author)
    share = processes.rank, processes.count
    rows = write_own_text(model, tokenizer, wanted, work.journal, work.progress, share, processes.wait)
    beginning = beginning_of(tokenizer)
    parts = [begun(rows[:count, len(beginning) + length - seq_len :], beginning).long()]
    if text is not None and count < samples:
        parts.insert(0, torch.cat(text.ids)[: samples - count])
    return packed_calibration(interleaved(parts), beginning)


def few_tokens(plan: Plan, results: Mapping[str, Result]) -> list[str]:
    """A note if experts had fewer than `ENOUGH` tokens for each number of their inputs."""
    counts = {p: results[p.layer.module][1].get("tokens") for p in plan.layers if p.layer.stack}
    known = [(n, p.spec.in_features) for p, n in counts.items() if isinstance(n, int)]
    few = sum(count < ENOUGH * width for count, width in known)
    if not few:
        return []
    return [
        f"{few} of {len(known)} layers of experts had fewer than {ENOUGH} tokens for each of their "
        f"inputs, {sum(not count for count, _ in known)} had none: the loss on other text may be larger "
        "than without a calibration; give more text (--samples)"
    ]
