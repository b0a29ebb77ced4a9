"""Puts an output on the hub: verified first, with a card whose head the hub understands."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from shlex import join
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from blr.compressor.base.errors import HubError, InputError, UsageError
from blr.compressor.base.quoting import named_line, quote
from blr.compressor.checkpoint.extras import CARD
from blr.compressor.checkpoint.regular import check_is_folder, inside, read_json, read_text, refuse
from blr.compressor.commands.judged import Judged
from blr.compressor.loading.resolve import REPOSITORY, is_offline
from blr.compressor.output.card import read_front, write_front
from blr.compressor.workspace.manifest import (
    MANIFEST,
    computing_digest,
    read_manifest,
    verify_manifest,
    with_file,
)
from blr.compressor.workspace.strict_json import Told, fitted

if TYPE_CHECKING:
    from huggingface_hub import HfApi

MAX_BYTES = 16 * 2**20  # of a card and of metrics
MADE = "\n## Made by\n"
MEASURED, MEASURE = "what `blr eval --format json` prints", "run it on this output"
Line = Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f`]*$", max_length=4096)]
Version = Annotated[str, Field(pattern=r"^[\w.+-]{1,100}$")]
WEIGHTS = re.compile(r"(?:model|pytorch_model)[\w.-]*\.(?:safetensors|bin)(?:\.index\.json)?")


@dataclass(frozen=True)
class Push:
    """An upload to the hub. `files` maps names in the repository to bytes, or to a local file."""

    folder: Path
    repository: str
    files: dict[str, bytes | Path]
    front: dict[str, object]
    notes: tuple[str, ...] = ()

    @property
    def bytes(self) -> int:
        return sum(len(f) if isinstance(f, bytes) else f.stat().st_size for f in self.files.values())


def prepare_push(folder: Path, repository: str, metrics: Path | None = None) -> Push:
    """Verify `folder`, and make its card and manifest, with figures of `blr eval --format json` from
    `metrics`. Nothing is changed or sent. Raises UsageError for the name, OutputError or VerifyError for
    the folder, InputError for the metrics."""
    if not _is_repository(repository):
        raise UsageError(f"{quote(repository, 120)}: expected owner/name, as the hub has them")
    check_is_folder(folder, "one that blr wrote")
    verify_manifest(folder)
    manifest = read_manifest(folder)
    front, body = read_front(read_text(inside(folder, CARD), MAX_BYTES), folder / CARD)
    if metrics is not None:
        front["model-index"] = _index(repository, metrics, folder)
    card = f"{write_front(front)}{body.partition(MADE)[0]}{_made(manifest, folder / MANIFEST)}".encode()
    files: dict[str, bytes | Path] = {name: folder / name for name in manifest["files"]}
    files |= {CARD: card, MANIFEST: with_file(folder, CARD, card)}
    wanted = (("license", "its source's card names none"), ("base_model", "it has no hub id"))
    notes = (  # of what the hub, or a licence, wants said
        f"the card says no {key}: {why}; add it on the hub, or compress from the hub id"
        for key, why in wanted
        if not front.get(key)
    )
    return Push(folder, repository, files, front, tuple(notes))


def _is_repository(name: str) -> bool:
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return REPOSITORY.fullmatch(name) is not None


def send(push: Push, *, private: bool, revision: str | None, message: str) -> str:
    """Commit all files at once, in a new repository if need be, and remove what an earlier output left
    there; the commit's address. Raises HubError."""
    if is_offline():
        remedy = "unset HF_HUB_OFFLINE, or look at it with --dry-run"
        raise HubError(f"{push.repository}: offline, expected the network; {remedy}")
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

    api = HfApi()
    with _hub_errors(push.repository):  # None: as its owner has it, which may be private
        api.create_repo(push.repository, private=True if private else None, exist_ok=True)
        info: Any = api.repo_info(push.repository, revision=revision)
    if private and not info.private:
        said = "a public repository, expected a private one for --private"
        raise HubError(f"{push.repository}: {said}; make it private on the hub, or name another")
    stale = _stale(push, api, {file.rfilename for file in info.siblings or []}, revision)
    operations: list[CommitOperationDelete | CommitOperationAdd] = [*map(CommitOperationDelete, stale)]
    for name, data in push.files.items():
        operations.append(CommitOperationAdd(name, data if isinstance(data, bytes) else str(data)))
    with _hub_errors(push.repository):
        done = api.create_commit(
            push.repository,
            operations,
            commit_message=message,
            parent_commit=info.sha,
            revision=revision,
        )
    return str(done.commit_url)


@contextmanager
def _hub_errors(repository: str) -> Iterator[None]:
    """Raise what the hub's client raises as HubError."""
    try:
        yield
    except Exception as error:
        remedy = "check the name, the network and that `hf auth login` gave a token that may write"
        raise HubError(f"{repository}: {named_line(error)}; {remedy}") from error


def _stale(push: Push, api: HfApi, there: set[str], revision: str | None) -> list[str]:
    """Files that an earlier output left in the repository. Raises HubError for weights of others, which
    transformers would load."""
    listed: set[str] = set()
    if MANIFEST in there:
        with _hub_errors(push.repository):
            path = Path(api.hf_hub_download(push.repository, MANIFEST, revision=revision))
        files = read_json(path, MAX_BYTES).get("files")
        listed = set(files) if isinstance(files, dict) else set()
    others = there - push.files.keys()
    if foreign := sorted(name for name in others - listed if WEIGHTS.fullmatch(name)):
        raise HubError(
            f"{push.repository}: holds {quote(foreign[0])}, weights that are not of this output and "
            "would be loaded before or beside it; remove them on the hub, or name another repository"
        )
    return sorted(others & listed)


class ToldSource(Told):
    """What a manifest says of where an output came from."""

    name: Line = "MODEL"
    revision: Line | None = None


class ToldRun(Told):
    """What it says of the command that made it; of exports and healed ones, of the libraries."""

    recipe: dict[str, object] | None = None
    calibration: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None
    heal: float | dict[str, object] | None = None  # minutes behind a compression; settings of `blr heal`
    max_shard_size: int | None = None
    threads: int | None = None
    device: Line | None = None
    versions: dict[Version, Version] = Field(default_factory=dict)

    def options(self) -> list[str]:
        """Of `blr compress`, beside model and recipe."""
        words = [] if self.calibration is None else ["--calibration", f"TEXT-{self.calibration[:16]}"]
        for option in ("heal", "max_shard_size", "threads", "device"):
            if getattr(self, option) not in (None, "auto"):
                words += [f"--{option.replace('_', '-')}", str(getattr(self, option))]
        return words


class Account(Told):
    """What `push` reads of a manifest."""

    run: ToldRun = ToldRun()
    source: ToldSource = ToldSource()
    input_sha256: str | None = None


def _made(manifest: dict[str, object], path: Path) -> str:
    """The card's section on the command. Raises InputError for a manifest that is not of blr."""
    told = {name: value for name, value in manifest.items() if value is not None}
    account = fitted(told, Account, path, "compress it again")
    run, source = account.run, account.source
    lines = "\n".join(f"{name} {version}" for name, version in run.versions.items())
    revision = ["--revision", source.revision] if source.revision else []
    words = ["blr", "compress", source.name, "--recipe", "recipe.yaml", *revision, *run.options()]
    command = f"{join(words)}\n" if run.recipe is not None else ""
    read = f"\nInput: SHA-256 {account.input_sha256}.\n" if account.input_sha256 else ""
    where = "`recipe.yaml` is that of this folder.\n" if command else ""
    return f"{MADE}\n{where}\n```\n{command}{lines}\n```\n{read}"


def _index(repository: str, path: Path, folder: Path) -> list[dict[str, object]]:
    """The `model-index` of a card: what `blr eval` measured of `folder`, in the hub's terms."""
    from huggingface_hub import EvalResult
    from huggingface_hub.repocard_data import eval_results_to_model_index

    found = fitted(read_json(path, MAX_BYTES), Judged, path, MEASURE, MEASURED)
    judged = found.checkpoint
    if judged is not None and judged.digest != computing_digest(folder):
        name = quote(str(judged.name), 120)
        raise InputError(f"{path}: figures of {name}, expected those of {folder}; run blr eval on that")
    rows = list(_measured(found))
    if not rows:
        refuse(path, "no metrics", MEASURED, MEASURE)
    results = [EvalResult(kind, data, data, metric, value) for kind, data, metric, value in rows]
    return eval_results_to_model_index(repository.partition("/")[2], results)


def _measured(found: Judged) -> Iterator[tuple[str, str, str, float]]:
    for row in found.perplexities:
        text, far = ("text-generation", Path(row.text).name), row.against
        yield *text, "perplexity", row.perplexity
        if far is not None and far.kl is not None and far.agreement is not None:
            yield *text, "kl_to_dense", far.kl.mean
            yield *text, "same_top1_as_dense", far.agreement
    for task, metrics in found.tasks.items():
        for metric, value in metrics.items():
            yield "text-generation", task, metric, value
    if found.spearman is not None:
        yield "sentence-similarity", "sts", "spearman", found.spearman
    if found.against is not None and found.against.cosine_to_dense is not None:
        yield "sentence-similarity", "sts", "cosine_to_dense", found.against.cosine_to_dense


def printed(push: Push) -> dict[str, object]:
    sizes = {"files": len(push.files), "bytes": push.bytes}
    card = json.loads(json.dumps(push.front, default=os.fspath))
    return {"repository": push.repository, **sizes, "card": card, "notes": list(push.notes)}
