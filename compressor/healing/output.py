"""Writes what a healing run gives: the compressed checkpoint with its trained tensors, and a record."""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.pytorch_utils import Conv1D

from blr.compressor.base.errors import NumericsError
from blr.compressor.base.quoting import named_line, quote
from blr.compressor.checkpoint.config import read_config
from blr.compressor.checkpoint.extras import CARD, LAYERS, MAX_BYTES, METRICS, REPORT, inert
from blr.compressor.checkpoint.header import TORCH_NAMES, TensorEntry
from blr.compressor.checkpoint.regular import read_json, read_text, refuse
from blr.compressor.checkpoint.source import Source
from blr.compressor.exporting.origin import Checkpoint
from blr.compressor.fitting.block_passes import watched
from blr.compressor.fitting.composed import dense_weight
from blr.compressor.fitting.rounding import Metric
from blr.compressor.healing.data import Reading
from blr.compressor.healing.objective import PADDING
from blr.compressor.healing.student_and_teacher import TrainedPair, structured_layers
from blr.compressor.healing.trained_parameters import extended, product_of, raised
from blr.compressor.loading.vendor import code_files
from blr.compressor.modeling.modeling_blr import GUARD, PREFIX, guard, module_names
from blr.compressor.modeling.registry import auto_map, declared_keys
from blr.compressor.output.check import Bar, OutputCheck
from blr.compressor.output.files import carried_files, check_reload, json_file
from blr.compressor.output.loss_messages import MARK, better_healing
from blr.compressor.output.report import report_pages, type_row
from blr.compressor.recipe.settings import HealOptions
from blr.compressor.structures.base import relative_error
from blr.compressor.structures.packing import restored
from blr.compressor.structures.spec import WIDTHS
from blr.compressor.structures.specs import Spec
from blr.compressor.workspace.journal import Journal
from blr.compressor.workspace.shards import Slot
from blr.kernels.fp8.reference import is_number

TOKENS = 8192  # run to find the inputs of layers in float8
BATCH = 4  # rows of these tokens that are run at once
KEPT = ("recipe.yaml",)
# What code may raise for JSON of another form than it wrote
UNLIKE = (KeyError, TypeError, ValueError, AttributeError, ArithmeticError, IndexError)
SECTION = """
## Healed

Trained for {steps:,} steps ({tokens:,} tokens of {texts}, on {device}) to answer
as `{teacher}` does: {loss}, {parameters:,} parameters ({kinds}) at {rate:g} of their root mean square a
step, seed {seed}. The state after step {best_step:,} was kept, the best by windows of the same texts
that were not trained on; {table}
"""
FOOT = """
Sizes, errors and what is unchanged stand above as they were before healing; `blr inspect` gives the
present sizes and errors, and `metrics.jsonl` the course of the last training.
"""
LOSSES = {
    "kl": "divergence of the next token's distribution",
    "lm": "loss on the text",
    "variation": "total variation between the next token's distributions",
    "distance": "1 − cosine of the sentence embeddings, and errors of the hidden states",
}
STATES = " and {:g} times the relative squared error of the blocks' outputs"
NATS = """in nats a token there:

| held-back text | KL before | after | loss before | after | of the dense model |
|---|---|---|---|---|---|
"""
COSINES = """there:

| held-back text | 1 − cosine of embeddings before | after | error of hidden states before | after |
|---|---|---|---|---|
"""


@torch.no_grad()
def read_inputs(pair: TrainedPair, rows: Tensor) -> dict[str, Tensor]:
    """The inputs [n, i] of the student's layers in float8, by name, on the CPU, for the first of `rows`
    [m, w] of token ids and padding. Layers that no token reaches are left out."""
    layers = {name: t.module for name, t in pair.twins.items() if getattr(t.spec, "fp8", False)}
    parts: dict[str, list[Tensor]] = {name: [] for name in layers}
    if not layers:
        return {}
    head = pair.student.get_output_embeddings()
    for some in rows[: max(TOKENS // rows.shape[1], 1)].split(BATCH):
        ids = some.to(pair.device)
        mask = ids != PADDING
        last: list[Tensor] = []  # the last input and its rows: several layers read one tensor

        def keep(name: str, x: Tensor, mask: Tensor = mask, last: list[Tensor] = last) -> None:
            if not last or last[0] is not x:
                last[:] = x, _real(x, mask)
            parts[name].append(last[1])

        # Compiled blocks know nothing of hooks
        with watched(layers, keep), torch.compiler.set_stance("force_eager"):
            out = pair.student.base_model(input_ids=ids.clamp_min(0), attention_mask=mask.long())
        for name, module in layers.items():
            if module is head:  # behind the base model
                keep(name, out.last_hidden_state)
    return {name: torch.cat(found) for name, found in parts.items() if any(map(len, found))}


def _real(x: Tensor, mask: Tensor) -> Tensor:
    """The rows [n, d] of the tokens in `mask` [m, w], on the CPU; all if there is not one for each."""
    rows = x.flatten(0, -2)
    return (rows[mask.flatten()] if len(rows) == mask.numel() else rows).cpu()


def metric_of(inputs: Tensor, device: torch.device) -> Metric:
    """What errors in a layer's weight cost, by the inputs [n, i] that it reads."""
    x = inputs.to(device, torch.float64)
    return Metric(x.mT @ x / len(x))


def make_check(
    checkpoint: Checkpoint, teacher: Checkpoint, reading: Reading, options: HealOptions, output: Path,
    warn: Callable[[str], None],
) -> OutputCheck:  # fmt: skip
    """The check of the output that healing writes."""
    reload = partial(check_reload, checkpoint.source)
    bar = Bar(output, better_healing(bool(options.files)), options.force, warn)
    held = partial(reading.held, options, teacher.source)
    return OutputCheck(teacher.source, reload, bar, options.check, held)


Packed = dict[str, dict[str, Tensor]]  # what is stored of layers in few bits, by their name on disk


def round_layers(pair: TrainedPair, source: Source, rows: Tensor, judge: Callable[[], None]) -> Packed:
    """What is stored of every layer in few bits, on the CPU, after all training. Layers in float8 are
    rounded only now, in the norm of what they read of `rows`; `judge` is called once they compute with
    the rounded numbers."""
    inputs, packed, late = read_inputs(pair, rows), Packed(), False
    for layer, name in module_names(pair.student, pair.student.config.blr["layers"]).items():
        twin, x = pair.twins.get(name), inputs.get(name)
        if twin is None:
            continue
        dtypes = {n: source.entries[f"{layer}.{n}"].dtype for n in twin.spec.stored()}
        widest = next(getattr(torch, TORCH_NAMES[d]) for d in dtypes.values() if d not in WIDTHS)
        metric = None if x is None else metric_of(x, pair.device)
        packed[layer] = {n: t.cpu() for n, t in twin.stored(widest, metric).items()}
        if getattr(twin.spec, "fp8", False):
            twin.take(packed[layer])
            late = True
    if late:
        judge()
    return packed


def store_trained(
    pair: TrainedPair, checkpoint: Checkpoint, journal: Journal, key: str, packed: Packed
) -> dict[str, TensorEntry]:
    """Store the trained tensors, with additions merged and `packed` ones as they are, under their names
    on disk and in the checkpoint's dtypes. Raises NumericsError for values that such a dtype cannot
    hold."""
    source = checkpoint.source
    tensors = {f"{layer}.{n}": t for layer, held in packed.items() for n, t in held.items()}
    merged = pair.places.parted(pair.masters, source)
    for entry in source.entries.values():
        name = pair.places.names[entry.name]
        master = merged.get(entry.name, pair.masters.get(pair.first_names.get(name, name)))
        if master is None:
            master = _sum(pair, checkpoint, entry)
        if master is not None and entry.name not in tensors:
            stored = master.detach().to("cpu", getattr(torch, TORCH_NAMES[entry.dtype]))
            apart = name in pair.masters  # else one of several in one tensor, which files hold apart
            tensors[entry.name] = stored.contiguous() if apart else stored.clone()
    numbers = {name: tensor for name, tensor in tensors.items() if is_number(tensor)}
    bad = [name for name, tensor in numbers.items() if not bool(torch.isfinite(tensor).all())]
    if bad:
        raise NumericsError(f"{bad[0]}: not finite after training; lower --lr and pass --restart")
    journal.store(key, tensors, {})
    found = journal.load(key)
    assert found is not None
    return found[0]


def _sum(pair: TrainedPair, checkpoint: Checkpoint, entry: TensorEntry) -> Tensor | None:
    """The stored tensor with its layer's addition; None if the layer has none."""
    owner, _, leaf = entry.name.rpartition(".")
    product = product_of(pair.masters, module_names(pair.student, [owner])[owner])
    spec = checkpoint.specs.get(owner)
    if product is None or leaf == "bias":
        return None
    stored = checkpoint.source.load_tensor(entry)
    if spec is None:
        return stored.double() + product[0] @ product[1] if leaf == "weight" else None
    return extended(stored, spec, leaf, *product)


def new_specs(pair: TrainedPair, checkpoint: Checkpoint) -> dict[str, Spec]:
    """The specs, by module, of structured layers whose rank additions have raised."""
    found = {}
    for module, name in module_names(pair.student, checkpoint.specs).items():
        product = product_of(pair.masters, name)
        if product is not None:
            found[module] = raised(checkpoint.specs[module], product[1].shape[0])
    return found


def slots(source: Source, trained: dict[str, TensorEntry]) -> list[Slot]:
    """The output's tensors, in the order of `source`."""
    return [Slot(name, trained.get(name, entry)) for name, entry in source.entries.items()]


@torch.no_grad()
def new_errors(pair: TrainedPair, records: dict[str, Any], packed: Packed) -> dict[str, Any]:
    """`records` by name on disk, with the errors of the healed weights if the teacher has a weight of
    that name."""
    theirs = dict(pair.teacher.named_modules())
    found = {}
    for stored, name in module_names(pair.student, records).items():
        record = records[stored]
        weight = getattr(theirs.get(name), "weight", None)
        ours = _weight(pair, name, packed.get(stored))
        if weight is not None and ours is not None and weight.numel() == ours.numel():
            weight = weight.mT if isinstance(theirs[name], Conv1D) else weight
            product = product_of(pair.masters, name)
            if product is not None:
                ours = ours + (product[0] @ product[1]).to(ours)
            record = {**record, "error": relative_error(weight.double(), ours.double())}
            record.pop("weighted_error", None)  # of the factors before
        found[stored] = record
    return found


def _weight(pair: TrainedPair, name: str, packed: dict[str, Tensor] | None) -> Tensor | None:
    """The weight [o, i] of a student's layer as it is stored; None if there is no such layer."""
    if packed is not None:
        held = {n: t.to(pair.device) for n, t in packed.items()}
        return restored(pair.twins[name].spec, held, torch.float32)
    layer = structured_layers(pair.student).get(name)
    return None if layer is None else dense_weight(layer)


def check_told(checkpoint: Checkpoint) -> None:
    """Try to update records and report. Raises InputError if `blr` did not write them."""
    folder, specs = checkpoint.source.folder, checkpoint.specs
    if (folder / CARD).is_file():
        read_text(folder / CARD, MAX_BYTES)
    for name in (LAYERS, REPORT):
        try:
            records = _json(folder / LAYERS)
            records |= {m: _grown(records[m], spec, 1.0) for m, spec in specs.items() if m in records}
            if name == REPORT and (data := _json(folder / REPORT)):
                _update(data, records, specs)
                report_pages(data)
        except UNLIKE as error:
            found = f"what cannot be gone on from ({quote(named_line(error), 120)[1:-1]})"
            refuse(folder / name, found, "what blr writes there", "compress the model again")


def small_files(
    checkpoint: Checkpoint, pair: TrainedPair | None, packed: Packed, facts: dict[str, Any],
    log: Sequence[Mapping[str, Any]],
) -> dict[str, bytes | Path]:  # fmt: skip
    """Everything but weights and manifest: name to contents, or to the file to carry over. `pair` is
    None if all tensors stay as they are; `facts` are for the card."""
    folder = checkpoint.source.folder
    specs = {} if pair is None else new_specs(pair, checkpoint)
    records = _json(folder / LAYERS)
    records = records if pair is None else new_errors(pair, records, packed)
    grown = {m: (s, s.parameters / checkpoint.specs[m].parameters) for m, s in specs.items()}
    records |= {m: _grown(records[m], *found) for m, found in grown.items() if m in records}
    held = {name: folder / name for name in KEPT if (folder / name).is_file()}
    card, report = folder / CARD, _json(folder / REPORT)
    if report:
        _update(report, records, specs)
        report["healing"] = {"facts": facts, "log": log}
    return {
        **carried_files(checkpoint.source),
        **held,
        "config.json": json_file(_config(folder, specs)),
        LAYERS: json_file(records),
        CARD: healed_card(read_text(card, MAX_BYTES) if card.is_file() else "", facts).encode(),
        METRICS: b"".join(json.dumps(line).encode() + b"\n" for line in log),
        **(report_pages(report) if report else {}),
        **code_files(),
    }


def _config(folder: Path, specs: dict[str, Spec]) -> dict[str, Any]:
    """config.json of the output, with our code alone, and its layers by `specs`."""
    config = read_config(folder)
    layers = {**config["blr"]["layers"], **{module: spec.to_dict() for module, spec in specs.items()}}
    config = {**config, "blr": {**config["blr"], "layers": layers}}
    native = config["model_type"].removeprefix(f"{PREFIX.lower()}_")
    kept = inert(config, declared_keys(native) | {"blr"})
    ours = {**kept, "auto_map": auto_map(native, config.get("architectures")), GUARD: guard(native)}
    return {key: ours[key] for key in (*config, "auto_map", GUARD) if key in ours}


def _json(path: Path) -> dict[str, Any]:
    return read_json(path, MAX_BYTES) if path.is_file() else {}


def _grown(record: dict[str, Any], spec: Spec, ratio: float) -> dict[str, Any]:
    """The record of a layer that now has `spec` and is `ratio` times as large."""
    sized = {"bits": record["bits"] * ratio} if "bits" in record else {}
    return {**record, "spec": spec.to_dict(), **sized}


def _grow(data: dict[str, Any], layer: dict[str, Any], spec: Spec) -> None:
    """Give a layer of the report the size of `spec`, and add the difference to the totals."""
    more = spec.parameters - layer["parameters"]
    layer |= {"rank": spec.describe(), "parameters": spec.parameters}
    ratio = spec.parameters / (spec.parameters - more)
    if layer.get("equal_rank") is not None:
        layer["equal_rank"] *= ratio
    if "bytes" in layer:
        layer["bytes"] += round(layer["bytes"] * (ratio - 1))
    totals = data["totals"]
    totals["parameters"] += more
    dense = totals["dense_parameters"]
    totals["cf"] = dense / totals["parameters"]
    if layer.get("bits") is not None and totals.get("bits") is not None:
        totals["bits"] += layer["bits"] * (ratio - 1) * layer["dense_parameters"] / dense
        layer["bits"] *= ratio


def _update(data: dict[str, Any], records: dict[str, Any], specs: Mapping[str, Spec]) -> None:
    for layer in data["layers"]:
        record = records.get(layer["module"], layer)
        layer["error"] = float(record["error"])
        if "weighted_error" not in record:  # it was that of the factors before
            layer.pop("weighted_error", None)
        if spec := specs.get(layer["module"]):
            _grow(data, layer, spec)
    for kind in data["types"]:
        kind |= type_row(kind["type"], data["layers"])


def healed_card(card: str, facts: dict[str, Any]) -> str:
    """`card` with one more section at its end, about a run with these `facts` (`HealRun.told`)."""
    texts = " and ".join(_label(name, "its own text") for name in facts["before"])
    loss = LOSSES[facts["loss"]]
    if facts["loss"] != "distance" and facts["hidden"]:
        loss += STATES.format(facts["hidden"])
    kinds, table = ", ".join(facts["train"]), _table(facts["before"], facts["after"])
    section = SECTION.format(**{**facts, "loss": loss, "kinds": kinds, "texts": texts, "table": table})
    return card.removesuffix(FOOT) + section + MARK + FOOT


def _table(before: dict[str, dict[str, float]], after: dict[str, dict[str, float]]) -> str:
    encoder = "distance" in next(iter(before.values()))
    columns = ("distance", "states") if encoder else ("kl", "student")
    rows = []
    for name, was in before.items():
        numbers = [x for column in columns for x in (was[column], after[name][column])]
        numbers += [] if encoder else [was["teacher"]]
        rows.append(f"| {_label(name)} | " + " | ".join(f"{x:.4f}" for x in numbers) + " |")
    return (COSINES if encoder else NATS) + "\n".join(rows)


def _label(name: str, own: str = "own text") -> str:
    return own if name == "self" else name
