"""Finds a checkpoint: a local folder, a short name, or a hub repository, whose weights are downloaded or
stay there: then a folder stands in for it, and they are fetched as they are read."""

import json
import os
import re
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from shutil import disk_usage
from textwrap import shorten
from typing import Any

from blr.compressor.base.disk import write_stream
from blr.compressor.base.errors import (
    BlrError,
    HubError,
    InputError,
    OutputError,
    StorageError,
    UsageError,
)
from blr.compressor.base.exhaustion import FULL, storage_errors
from blr.compressor.base.quoting import first_line, is_text, printable, quote
from blr.compressor.checkpoint.extras import MODULES
from blr.compressor.checkpoint.header import MAX_HEADER_BYTES, read_index
from blr.compressor.checkpoint.regular import absence, is_barred, read_whole
from blr.compressor.checkpoint.remote import STANDING_IN, RemoteShard
from blr.compressor.recipe.architectures import short_names
from blr.compressor.recipe.schema import DENSE, Recipe

PIPELINE, PIPELINE_PART = "model_index.json", "transformer"  # of diffusers: its file, a folder in it
STREAMED = "weights stay there, fetched as they are read: three times each (calibrated: about six)"
LONGEST_REASON = 200  # characters of what the hub's client says
SILENT = 10_000_000  # bytes of a download that nobody needs to be told of
REPOSITORY = re.compile(r"[\w.-]{1,96}/[\w.-]{1,96}", re.ASCII)
PATTERNS = [
    *("*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", "*.bpe", "*.bin"),
    *("*LICEN[SC]E*", "*NOTICE*", "*USE_POLICY*", "*.md", "*.png", "*.jpg", "*.jpeg", "*.gif", "*.svg"),
]
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
WEIGHTS = ".safetensors", ".bin"
WHOLE = [f"*/*{suffix}" for suffix in WEIGHTS]  # of modules beside the model
REMEDY = "download it: leave out --stream, and set HF_HOME to a disk with room"


@dataclass(frozen=True)
class Found:
    """A checkpoint's folder, the name to record for it and its hub commit, if any."""

    folder: Path
    name: str
    revision: str | None = None


def resolve_model(
    model: str,
    *,
    revision: str | None = None,
    offline: bool = False,
    weights: bool = True,
    stream: bool | None = False,
) -> Found:
    """Find the folder of `model`, downloading it if it is a hub id that is not in the cache.

    Args:
        weights: download them too; otherwise config.json alone.
        stream: fetch weights as they are read (`checkpoint/remote.py`); None: where disks have no room.

    Raises UsageError for a revision or `stream` of a local folder, InputError for neither a folder nor a
    hub id, HubError for a hub that fails or refuses, StorageError for a full cache.
    """
    if offline:
        os.environ["HF_HUB_OFFLINE"] = "1"  # for every library that is imported from here on
    folder = _folder(model)
    if os.path.exists(folder):
        if revision is not None:
            raise UsageError(f"--revision {revision}: {model} is a local folder; leave it out")
        if stream:
            raise UsageError(f"--stream: {model} is a local folder; leave it out")
        return Found(_model_in(folder), printable(folder.resolve().name))
    if os.path.islink(folder):
        raise InputError(f"{quote(model, 160)[1:-1]}: a link to nothing; give a checkpoint's folder")
    repository = short_names().get(model.lower(), model)
    begun = os.path.lexists(Path(*folder.parts[:1]))  # else nothing of the path is here
    local = model.startswith((".", "/", "~")) or (begun and is_barred(folder))
    if local or not REPOSITORY.fullmatch(repository):
        raise InputError(
            f"{quote(model, 160)[1:-1]}: {absence(folder, 'folder')}; expected a checkpoint folder, "
            f"a hub id (owner/name) or one of the short names {', '.join(sorted(short_names()))}"
        )
    patterns = PATTERNS if weights else ["config.json"]
    return _download(repository, revision, offline or is_offline(), patterns, stream)


def _model_in(folder: Path) -> Path:
    inner = folder / PIPELINE_PART
    is_pipeline = os.path.isfile(folder / PIPELINE) and not os.path.lexists(folder / "config.json")
    return inner if is_pipeline and os.path.isdir(inner) else folder


def _folder(model: str) -> Path:
    """`model` as a path. Raises InputError for a name that libraries cannot take."""
    folder = Path(os.path.expanduser(model))
    if not is_text(str(folder)):
        found = f"a name that is no text in {sys.getfilesystemencoding()}"
        remedy = "rename the folder, or set LC_ALL to a UTF-8 locale"
        raise InputError(f"{quote(folder, 160)[1:-1]}: found {found}; {remedy}")
    return folder


def default_output(model: str, recipe: Recipe) -> Path:
    """The folder ``NAME-METHOD-cfCF`` in the current one, named after the settings of `recipe`."""
    own, name = recipe.own(), Path(os.path.abspath(_folder(model))).name
    base = f"-int{own.stored.base}" if own.stored.base else ""
    kind = f"-{own.stored.kind}" if own.stored.bits else ""
    sized = f"-bpw{own.stored.bpw:g}" if own.stored.bpw else f"-r{own.rank}" if own.rank else ""
    factor = f"-model-cf{recipe.model_cf:g}" if recipe.model_cf else f"-cf{recipe.cf:g}"
    size = factor if recipe.sized_by_cf else sized
    rest = f"-{own.method}{size}{kind}" if own.method != DENSE or kind or not recipe.caches_ranks else ""
    return Path(f"{name}{base}{rest}{_cache(recipe)}")


def _cache(recipe: Recipe) -> str:
    if not recipe.caches_ranks:
        return ""
    size = f"r{recipe.kv_rank}" if recipe.kv_rank else f"cf{recipe.kv_cf:g}"
    return f"-kv-{size}" + (f"-{recipe.kv_quantize}" if recipe.kv_quantize else "")


def is_offline() -> bool:
    """Whether the environment forbids the hub's libraries to open a socket."""
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}


def _download(
    repository: str, revision: str | None, offline: bool, patterns: list[str], stream: bool | None
) -> Found:
    """Get `repository` from the hub; if that cannot be reached, from a complete copy in the cache."""
    try:
        if offline:
            return _cached(repository, revision, patterns)
        return _asked(repository, revision, patterns, stream)
    except BlrError:
        raise
    except Exception as error:  # the hub client raises its own, httpx's and the system's errors
        told = _hub_error(error, repository)
        if offline or not _may_be_cached(error):
            raise told from error
        with suppress(Exception):
            found = _cached(repository, revision, patterns)
            if is_whole(found.folder, patterns):
                reason = str(told).partition("; ")[0]
                _say(f"{reason}: goes on with commit {found.revision} in the cache")
                return found
        raise told from error


def _say(line: str) -> None:
    print(f"blr: {line}", file=sys.stderr)


def _asked(repository: str, revision: str | None, patterns: list[str], stream: bool | None) -> Found:
    wanted = _of_pipeline(repository, revision, False, patterns)
    if wanted != patterns and stream:
        raise UsageError(f"--stream: {repository} is a pipeline of diffusers; leave it out")
    stream = stream if wanted == patterns else False
    if _stays(repository, revision, wanted, stream):
        standing, commit = stand_in(repository, revision, wanted)
        return Found(standing, repository, commit)
    folder = Path(_snapshot(repository, revision, wanted))
    return Found(_model_in(folder), repository, folder.name)


def _cached(repository: str, revision: str | None, patterns: list[str]) -> Found:
    wanted = _of_pipeline(repository, revision, True, patterns)
    folder = Path(_snapshot(repository, revision, wanted, local_files_only=True))
    return Found(_model_in(folder), repository, folder.name)


def _snapshot(repository: str, revision: str | None, patterns: list[str], **how: Any) -> Any:
    """The folder of a commit in the hub's cache; with `dry_run` the files that a download would take."""
    from huggingface_hub import snapshot_download  # reads the environment: not before it is set

    return snapshot_download(repository, revision=revision, allow_patterns=patterns, **how)


def _may_be_cached(error: Exception) -> bool:
    """Whether a copy in the cache may stand in: not for a missing revision or a full disk."""
    from huggingface_hub.errors import RevisionNotFoundError

    missing = any(isinstance(each, RevisionNotFoundError) for each in (error, error.__cause__))
    return not missing and getattr(error, "errno", None) not in FULL


def is_whole(folder: Path, patterns: list[str]) -> bool:
    """Whether a folder of the cache has config.json and, if `patterns` ask for them, all weights."""
    if not (folder / "config.json").is_file():
        return False
    if "*.safetensors" not in patterns:
        return True
    indices = list(folder.glob("*.index.json"))
    if not indices:
        return any(any(folder.glob(pattern)) for pattern in ("*.safetensors", "*.bin"))
    tables = (json.loads(index.read_bytes())["weight_map"] for index in indices)
    return any(all((folder / shard).is_file() for shard in set(table.values())) for table in tables)


def _hub_error(error: Exception, repository: str) -> BlrError:
    """The error to report for an `error` of the hub's client."""
    from huggingface_hub.constants import HF_HUB_CACHE
    from huggingface_hub.errors import LocalEntryNotFoundError

    if isinstance(error, LocalEntryNotFoundError) and is_offline():
        remedy = "run once without --offline and HF_HUB_OFFLINE, or give a local folder"
        return HubError(f"{repository}: not in the local cache, {HF_HUB_CACHE}; {remedy}")
    told = error.__cause__ or error  # a dry run hides that a model is gated behind its own error
    reason = shorten(first_line(told), LONGEST_REASON, placeholder=" ...")
    if getattr(error, "errno", None) in FULL:
        remedy = "free or enlarge the disk of the hub's cache (HF_HOME), then run again"
        return StorageError(f"{repository}: {reason}; {remedy}")
    remedy = "check the name, the network and `hf auth login`, or give a local folder"
    return HubError(f"{repository}: {type(told).__name__}: {reason}; {remedy}")


def _of_pipeline(repository: str, revision: str | None, offline: bool, patterns: list[str]) -> list[str]:
    """`patterns`, narrowed to the transformer if the repository is a pipeline of diffusers."""
    from huggingface_hub import try_to_load_from_cache

    tops = ["config.json", PIPELINE]
    if offline:
        cached = {name: try_to_load_from_cache(repository, name, revision=revision) for name in tops}
        found = {name for name, path in cached.items() if isinstance(path, str)}
    else:
        listed = _snapshot(repository, revision, tops, dry_run=True)
        found = {file.filename for file in listed}
    if found != {PIPELINE}:
        return patterns
    return [PIPELINE, *(f"{PIPELINE_PART}/{pattern}" for pattern in patterns)]


def _stays(repository: str, revision: str | None, patterns: list[str], stream: bool | None) -> bool:
    """Announce the download; whether weights stay there. Raises StorageError without room."""
    from huggingface_hub.constants import HF_HUB_CACHE

    files = _snapshot(repository, revision, patterns, dry_run=True)
    needed = sum(file.file_size or 0 for file in files if file.will_download)
    if stream:
        _say(f"{repository}: {STREAMED}")
        return True
    if needed <= SILENT:
        return False
    place = Path(HF_HUB_CACHE).absolute()
    while not place.exists():
        place = place.parent
    free = disk_usage(place).free
    asked = f"{needed / 1e9:.1f} GB to download to {HF_HUB_CACHE}"
    found = f"{repository}: {asked}, {free / 1e9:.1f} GB free"
    if needed > free and stream is None:
        _say(f"{found}: {STREAMED}")
        return True
    if needed > free:
        remedy = "free that disk or set HF_HOME to another (nothing is deleted for you)"
        raise StorageError(f"{found}; {remedy}")
    _say(found)
    return False


def stand_in(repository: str, revision: str | None, patterns: list[str]) -> tuple[Path, str]:
    """Make a folder of the model's files with headers in place of weights; the folder and the commit.
    Raises HubError without safetensors, InputError for an unsafe index, or what the client raises."""
    from huggingface_hub.constants import HF_HOME

    small = [pattern for pattern in patterns if not pattern.endswith(WEIGHTS)]
    snapshot = Path(_snapshot(repository, revision, small))
    if (snapshot / MODULES).is_file():
        _snapshot(repository, snapshot.name, WHOLE)
    folder = Path(HF_HOME) / "blr-standing-in" / repository.replace("/", "--") / snapshot.name
    shards = _shards(repository, snapshot)
    for path in (path for path in snapshot.rglob("*") if path.is_file()):
        name = path.relative_to(snapshot)
        if name.suffix not in WEIGHTS or len(name.parts) > 1:  # the cache may have some of them
            _put(folder / name, path.read_bytes())
    for shard in shards:
        length = int.from_bytes(shard.fetch(0, min(8, shard.size)), "little")
        if length > min(MAX_HEADER_BYTES, shard.size - 8):
            found = f"found a header of {length} bytes, expected a safetensors file"
            raise HubError(f"{shard.name}: {found}; {REMEDY}")
        _put(folder / shard.name, bytes(shard.fetch(0, 8 + length)))
        STANDING_IN[folder / shard.name] = shard
    return folder, snapshot.name


def _shards(repository: str, snapshot: Path) -> list[RemoteShard]:
    from huggingface_hub import HfApi, hf_hub_url
    from huggingface_hub.hf_api import RepoFile

    index = snapshot / INDEX
    names = sorted(set(read_index(index, ".safetensors").values())) if index.exists() else [SINGLE]
    listed = HfApi().get_paths_info(repository, names, revision=snapshot.name)
    files = {file.path: file for file in listed if isinstance(file, RepoFile)}
    if missing := [name for name in names if name not in files]:
        raise HubError(f"{repository}: found no {missing[0]}, expected it to be streamed; {REMEDY}")
    made = []
    for name in names:
        lfs, url = files[name].lfs, hf_hub_url(repository, name, revision=snapshot.name)
        made.append(RemoteShard(url, name, files[name].size, lfs.sha256 if lfs else None))
    return made


def _put(path: Path, data: bytes) -> None:
    """Write a file whole unless another process has. Raises OutputError for other contents there."""
    with storage_errors(path.parent), suppress(FileExistsError):
        write_stream(path, [data], new=True)
    found = b"" if os.path.islink(path) else bytes(read_whole(path, max(len(data), 1)))
    if found != data:
        raise OutputError(f"{path}: in the way, not written by blr; move it away")
