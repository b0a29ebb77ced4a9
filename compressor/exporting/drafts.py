"""A second, smaller model in the folder of an export, which proposes tokens to the first one."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any, cast

from blr.compressor.base.errors import CapabilityError, OutputError, UsageError
from blr.compressor.checkpoint.context import NGRAM
from blr.compressor.checkpoint.source import Source, open_source
from blr.compressor.exporting.origin import Checkpoint, open_checkpoint
from blr.compressor.loading.loader_names import load_empty, misfit
from blr.compressor.loading.native import native_errors, read_context
from blr.compressor.loading.sidecar_files import token_ids
from blr.compressor.modeling.models import model_class
from blr.compressor.modeling.registry import register
from blr.compressor.output.files import check_fills, json_file, structured_config
from blr.compressor.planning.plan import Plan
from blr.compressor.runtime.drafted import ENDS, FOLDER, WEIGHTS
from blr.compressor.runtime.phases import FAMILIES
from blr.compressor.structures.specs import Spec, spec_from_dict
from blr.compressor.workspace.shards import Slot

MAX_BATCH = 8  # sequences of which a pass takes two tokens each, its draft and one more
DRAFTS = 4  # tokens that another engine lets it propose
BESIDE = "The smaller model in `{folder}/` proposes tokens"
REPEATED = "The runtime proposes what followed the last two tokens before (n-gram lookup)"
SECTION = """ {what}, and this model checks several in one
pass. It keeps those that it would choose itself, so that the text is its own. Of weights in few bits,
rounding can part the two on a GPU.

Other engines do so, too, with models from their own folders:

```bash
{vllm}
```

```python
{transformers}
```
"""


@dataclass(frozen=True)
class Draft:
    """The model that proposes tokens. config: its config.json in the export. shared: the tensors that
    the first model's stand for."""

    source: Source
    config: dict[str, Any]
    shared: frozenset[str]

    @property
    def name(self) -> str:
        """Its class."""
        return str(self.config["architectures"][0])

    @property
    def specs(self) -> list[Spec]:
        """The specs of its structured layers."""
        return [spec_from_dict(fields) for fields in self.config["blr"]["layers"].values()]

    @property
    def slots(self) -> list[Slot]:
        """Its tensors in the export."""
        kept = (e for e in self.source.entries.values() if e.name not in self.shared)
        return [Slot(entry.name, entry) for entry in kept]

    @property
    def beside(self) -> dict[str, list[Slot]]:
        """Its file of weights."""
        return {WEIGHTS: self.slots}

    @property
    def small_files(self) -> dict[str, bytes | Path]:
        """Its configuration."""
        return {f"{FOLDER}/config.json": json_file(self.config)}

    def section(self, name: str) -> str:
        """What the card of the first model, of this name, says of it."""
        what = BESIDE.format(folder=FOLDER)
        return SECTION.format(what=what, **elsewhere(name, self.source.folder.name))

    def check_loads(self, folder: Path) -> None:
        """Raise OutputError unless the tensors in `folder`, with those shared, fill the model."""
        _, info = load_empty(model_class(self.name), folder / FOLDER)
        lacking = set(cast("Iterable[str]", info["missing_keys"])) - set(ENDS if self.shared else ())
        if found := misfit({**info, "missing_keys": lacking}, "missing", "unexpected", "mismatched"):
            raise OutputError(
                f"{folder / FOLDER}: {found} when reloaded; this is a bug in blr, keep the checkpoint"
            )


def elsewhere(name: str, draft: str) -> dict[str, str]:
    """How other engines decode `name` with `draft`: a command of vLLM and a call of transformers."""
    given: dict[str, Any] = {"method": "draft_model", "model": draft}
    call = f"assistant_model=AutoModelForCausalLM.from_pretrained({draft!r})"
    if draft == NGRAM:
        given, call = {"method": NGRAM, "prompt_lookup_max": 2}, f"prompt_lookup_num_tokens={DRAFTS}"
    given |= {"num_speculative_tokens": DRAFTS}
    return {
        "vllm": f"vllm serve {quote(name)} --speculative-config {quote(json.dumps(given))}",
        "transformers": f"model.generate(**inputs, {call})",
    }


def check_batch(batch: int) -> None:
    """Raise CapabilityError for more sequences than are decoded with a draft."""
    if batch > MAX_BATCH:
        raise CapabilityError(
            f"--batch {batch}: with --draft up to {MAX_BATCH} sequences are decoded at once; lower it"
        )


def open_draft(folder: Path, checkpoint: Checkpoint, context: int, kept: Mapping[str, Any]) -> Draft:
    """Open the draft in `folder` for an export of `checkpoint`, whose tensors `kept` stay as they are.
    Raises UsageError for a model that is no draft of this one."""
    source, config = _opened(folder)
    _check_pair(checkpoint.source, source, context)
    ends = [name for name in ENDS if name in kept and _same(checkpoint.source, source, name)]
    draft = Draft(source, config, frozenset(ends))
    with native_errors(source):
        register(config["model_type"].removeprefix("blr_"))
        cls = model_class(draft.name)
    check_fills(source, cls, config, {name: entry.shape for name, entry in source.entries.items()})
    return draft


def _opened(folder: Path) -> tuple[Source, dict[str, Any]]:
    """The model in `folder`, and its configuration as one of ours."""
    source = open_source(folder)
    table = source.config.get("blr")
    if not isinstance(table, dict) or "export" not in table:
        checkpoint = open_checkpoint(folder)
        if not checkpoint.compressed:
            return checkpoint.source, structured_config(checkpoint.source.config, Plan([]))
        return source, source.config
    export = {key: value for key, value in table["export"].items() if key != "draft"}
    return source, {**source.config, "blr": {**table, "export": export}}


def _check_pair(dense: Source, draft: Source, context: int) -> None:
    for source in (dense, draft):
        if (kind := source.model_type.removeprefix("blr_")) not in FAMILIES:
            known = ", ".join(FAMILIES)
            raise UsageError(f"--draft: {source.folder} is a {kind}; expected one of {known}")
    name = f"--draft {draft.folder}"
    sizes = [source.config.get("vocab_size") for source in (dense, draft)]
    if sizes[0] != sizes[1]:
        raise UsageError(
            f"{name}: a vocabulary of {sizes[1]} tokens, expected the model's {sizes[0]}; give a model "
            "compressed from this one"
        )
    ids = [found and found[1] for found in (token_ids(dense.folder), token_ids(draft.folder))]
    if ids[0] != ids[1]:
        raise UsageError(
            f"{name}: another tokenizer than the model's; give a model compressed from this one"
        )
    limit = read_context(draft)
    if context > limit:
        raise CapabilityError(
            f"{name}: {limit} positions, expected at least the context of {context}; give --context "
            f"{limit}"
        )


def _same(dense: Source, draft: Source, name: str) -> bool:
    """Whether both models store the same tensor `name`."""
    one, two = dense.entries.get(name), draft.entries.get(name)
    if one is None or two is None or (one.dtype, one.shape) != (two.dtype, two.shape):
        return False
    return dense.sha256(one) == draft.sha256(two)
