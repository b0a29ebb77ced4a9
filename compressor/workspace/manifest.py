"""The manifest of an output: every file's size and SHA-256, and where the output came from. It covers
itself: `manifest_sha256` is that of its text with the digest's digits as zeros. Of shards it has the
headers' digests too, which tell a relabelled tensor."""

import hashlib
import json
import os
import re
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import NoneType
from typing import Any, Literal, TypedDict, cast

from blr.compressor.base.disk import sha256_file
from blr.compressor.base.errors import InputError, OutputError, VerifyError
from blr.compressor.base.quoting import quote
from blr.compressor.checkpoint.header import TensorEntry, header_bytes
from blr.compressor.checkpoint.regular import inside, parse_json, read_whole, refuse
from blr.compressor.checkpoint.remote import remote_shard
from blr.compressor.checkpoint.source import Source

MANIFEST = "blr_manifest.json"
FORMAT = 2
WITHOUT_DIGEST = 1  # the format before, which says nothing of itself and of headers
DIGEST = "manifest_sha256"
MAX_BYTES = 64 * 2**20
TABLES = ("run", "source", "healed_from", "teacher", "compressed_from")  # facts that are tables
_UNSET = "0" * 64
# What the hub and `git clone` put beside files that they give, none of which a model is read from
_HUBS_OWN = re.compile(
    r"\.gitattributes|\.git/[^\n]+|\.cache/huggingface/(?:\.gitignore|CACHEDIR\.TAG|[^\n]+\.(?:metadata|lock|incomplete))"
)


class Listed(TypedDict, total=False):
    """A listed file: bytes, SHA-256, and that of the header of a shard."""

    size: int
    sha256: str
    header_sha256: str


Hashes = Literal["all", "small", "none"]  # of which files: every one, all but the shards, none
SHARD = ".safetensors"
# What loaders look at, and what is downloaded of a repository on the hub
READ = frozenset({SHARD, ".json", ".txt", ".model", ".jinja", ".tiktoken"})
THREADS = 4  # hashing more files at once waits for the disk
ANOTHER = "give one that was"
REMEDY = "copy or compress it again; `blr verify` lists all that differs"


def build_manifest(folder: Path, files: dict[str, tuple[int, str]], **facts: object) -> bytes:
    """The manifest of `files` (size, SHA-256) in `folder`, with `facts`, as JSON."""
    listed: dict[str, Listed] = {}
    for name, (size, sha256) in sorted(files.items()):
        listed[name] = {"size": size, "sha256": sha256}
        if name.endswith(SHARD):
            listed[name]["header_sha256"] = hashlib.sha256(header_bytes(folder / name)).hexdigest()
    table = {"format": FORMAT, "files": listed, **facts, DIGEST: _UNSET}
    text = json.dumps(table, indent=2).encode() + b"\n"
    return _with_digest(text, _UNSET, hashlib.sha256(text).hexdigest())


def with_file(folder: Path, name: str, data: bytes) -> bytes:
    """The manifest of `folder` with other contents for one listed file. Raises as `read_manifest`."""
    manifest = read_manifest(folder)
    files = {listed: (found["size"], found["sha256"]) for listed, found in manifest["files"].items()}
    files[name] = (len(data), hashlib.sha256(data).hexdigest())
    facts = {key: manifest[key] for key in manifest if key not in ("format", "files", DIGEST)}
    return build_manifest(folder, files, **facts)


def _with_digest(text: bytes, old: str, new: str) -> bytes:
    """`text` with its last field, the digest `old`, made `new`."""
    head, found, tail = text.rpartition(f'"{DIGEST}": "{old}"'.encode())
    return head + found.replace(old.encode(), new.encode()) + tail


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of an output of blr. Raises OutputError if it is missing or damaged."""
    manifest, damage = _read(folder)
    if damage:
        remedy = "the folder is not as blr wrote it: copy or compress it again"
        raise OutputError(f"{folder / MANIFEST}: {damage}; {remedy}")
    return manifest


def is_output(folder: Path) -> bool:
    """Whether `folder` has a manifest of ours, damaged or not, as a plain file."""
    try:
        _read(folder)
    except OutputError:
        return False
    return not (folder / MANIFEST).is_symlink()


def computing_digest(folder: Path) -> str | None:
    """SHA-256 of the listed weights and configuration alone; None without a manifest."""
    try:
        files = read_manifest(folder)["files"]
    except (OutputError, InputError):
        return None
    read = {n: facts for n, facts in files.items() if n.endswith(".safetensors") or n == "config.json"}
    return hashlib.sha256(json.dumps(read, sort_keys=True).encode()).hexdigest()


def verify_manifest(folder: Path) -> int:
    """Check every file of an output; how many there are. Raises OutputError, VerifyError."""
    manifest, damage = _read(folder)
    problems = [f"{MANIFEST}: {damage}"] if damage else verify_files(folder, manifest)
    if problems:
        more = f" and {len(problems) - 1} more" if len(problems) > 1 else ""
        raise VerifyError(f"{folder}: {problems[0]}{more}; copy or compress it again")
    return len(manifest["files"])


def _read(folder: Path) -> tuple[dict[str, Any], str]:
    """The manifest, and how it differs from what was written, empty if it does not."""
    path = folder / MANIFEST
    try:
        text = bytes(read_whole(path, MAX_BYTES))
        manifest = parse_json(text, path)
    except InputError:
        text, manifest = b"", {}
    if not _is_ours(manifest):
        found = f"missing or not a manifest of format {FORMAT}, the folder was not written by blr"
        raise OutputError(f"{path}: {found}; {ANOTHER}")
    return manifest, _damage(manifest, text)


def _damage(manifest: dict[str, object], text: bytes) -> str:
    kept = manifest.get(DIGEST)
    if manifest["format"] == WITHOUT_DIGEST:
        return f"format {WITHOUT_DIGEST} with a digest" if DIGEST in manifest else ""
    if not isinstance(kept, str) or not is_digest(kept):
        return "no digest of its own"
    found = hashlib.sha256(_with_digest(text, kept, _UNSET)).hexdigest()
    return "" if found == kept else f"SHA-256 {found}, expected {kept}"


def saved_by(config: dict[str, Any]) -> str | None:
    """By whom and from what a folder was saved; None if blr wrote it. Raises TypeError, KeyError."""
    saved = config["blr"].get("saved")
    if saved is None:
        return None
    if not isinstance(saved, dict):
        raise TypeError("blr.saved is no table")
    by, origin = (quote(saved.get(key))[1:-1] for key in ("by", "from"))
    return f"saved by {by} from {origin}" if saved.get("from") else f"saved by {by}"


def _is_ours(manifest: dict[str, object]) -> bool:
    """Whether listed files and the facts on run and source have the types that commands write."""
    files, read = manifest.get("files"), manifest.get("input_sha256")
    if manifest.get("format") not in (FORMAT, WITHOUT_DIGEST) or type(files) is not dict or not files:
        return False
    if any(type(manifest.get(name)) not in (dict, NoneType) for name in TABLES):
        return False
    source = cast(dict[str, object], manifest.get("source") or {})
    named = all(type(source.get(name)) in (str, NoneType) for name in ("name", "revision"))
    listed = all(is_inside(name) and _is_listing(found) for name, found in files.items())
    return named and listed and (read is None or is_digest(read))


def is_inside(name: str) -> bool:
    """Whether a listed name is a plain relative path below the folder."""
    return name.isprintable() and "\\" not in name and not {"", ".", ".."} & set(name.split("/"))


def _is_listing(found: object) -> bool:
    if type(found) is not dict or type(found.get("size")) is not int or "sha256" not in found:
        return False
    return all(is_digest(value) for key, value in found.items() if key != "size")


def is_digest(value: object) -> bool:
    """Whether `value` is a SHA-256 in hexadecimal digits."""
    return type(value) is str and re.fullmatch(r"[0-9a-f]{64}", value) is not None


def verify_files(folder: Path, manifest: dict[str, Any]) -> list[str]:
    """What differs between the folder and its manifest, one line a file; empty when nothing."""
    present, unread = _walk(folder)
    unlisted = []
    for name in sorted(present - {*manifest["files"], MANIFEST}):
        if not _HUBS_OWN.fullmatch(name) or not stat.S_ISREG(os.lstat(folder / name).st_mode):
            unlisted.append(f"{quote(name)[1:-1]}: not listed in the manifest")
    return verify_listed(folder, manifest) + unlisted + unread


def verify_listed(folder: Path, manifest: dict[str, Any]) -> list[str]:
    """`verify_files` without a look at files that the manifest does not list."""
    listed = manifest["files"]
    return [f"{name}: {problem}" for name in listed if (problem := _check(folder / name, listed[name]))]


def _walk(folder: Path) -> tuple[set[str], list[str]]:
    """Names of all files below `folder`, and a line for each folder that cannot be listed."""
    present: set[str] = set()
    unread: list[str] = []

    def refused(error: OSError) -> None:
        name = os.path.relpath(error.filename, folder)
        unread.append(f"{quote(name)[1:-1]}: a folder that cannot be listed ({error.strerror})")

    for parent, folders, names in os.walk(folder, onerror=refused):
        links = [name for name in folders if os.path.islink(os.path.join(parent, name))]
        present |= {os.path.relpath(os.path.join(parent, name), folder) for name in (*names, *links)}
    return present, unread


def _check(path: Path, expected: dict[str, object]) -> str | None:
    try:
        status = os.lstat(path)
        if not stat.S_ISREG(status.st_mode):
            return "not a regular file"
        if status.st_size != expected["size"]:
            return f"{status.st_size} bytes, expected {expected['size']}"
        found = sha256_file(path)
    except OSError as error:
        return "missing" if isinstance(error, FileNotFoundError) else f"unreadable ({error.strerror})"
    return None if found == expected["sha256"] else f"SHA-256 {found}, expected {expected['sha256']}"


def read_listed(folder: Path) -> dict[str, Listed]:
    """The listed files that loaders read; {} without a manifest. Raises InputError for a damaged one."""
    if not os.path.lexists(folder / MANIFEST):
        return {}
    try:
        files = read_manifest(folder)["files"]
    except OutputError as error:
        raise InputError(str(error)) from None
    return {name: found for name, found in files.items() if Path(name).suffix in READ}


def check_listed(folder: Path, hashes: Hashes) -> None:
    """Compare sizes, headers of shards and the SHA-256 of some files with the manifest. Raises
    InputError naming the first that differs."""
    listed = read_listed(folder)
    for name, expected in listed.items():
        path = inside(folder, name)
        size = os.stat(path).st_size
        if size != expected["size"]:
            refuse(path, f"{size} bytes", f"{expected['size']} by {MANIFEST}", REMEDY)
        header = hashlib.sha256(header_bytes(path)).hexdigest() if "header_sha256" in expected else None
        if header != expected.get("header_sha256"):
            refuse(path, "another header", f"the one that {MANIFEST} lists", REMEDY)
    small = {name: found for name, found in listed.items() if not name.endswith(SHARD)}
    read = {"all": listed, "small": small, "none": {}}[hashes]
    with ThreadPoolExecutor(min(THREADS, len(os.sched_getaffinity(0)))) as pool:
        paths = [folder / name for name in read]
        for (name, expected), found in zip(read.items(), pool.map(_sha256, paths), strict=True):
            _compare(folder / name, found, expected["sha256"])


class ShardDigests:
    """SHA-256 of listed shards as a whole, made as their tensors are read in order."""

    def __init__(self, source: Source) -> None:
        listed, self._open = read_listed(source.folder), {}
        for path in source.shards:
            expected, shard = {}, remote_shard(path)
            if shard is not None and shard.sha256 is not None:
                expected["the hub"] = shard.sha256
            if path.name in listed:
                expected[MANIFEST] = listed[path.name]["sha256"]
            if expected:
                self._open[path] = hashlib.sha256(header_bytes(path)), expected

    def update(self, entry: TensorEntry, piece: bytes | bytearray) -> None:
        """Take the next bytes of a shard, a part of `entry`; shards may be read at once."""
        if entry.file in self._open:
            self._open[entry.file][0].update(piece)

    def check(self) -> None:
        """Raise InputError for a shard that is not what is listed."""
        for path, (digest, expected) in self._open.items():
            for by, wanted in expected.items():
                _compare(path, digest.hexdigest(), wanted, by)


def _sha256(path: Path) -> str:
    try:
        return sha256_file(path)
    except OSError as error:
        refuse(path, f"a read error ({error.strerror})", "a readable file", "check the disk")


def _compare(path: Path, found: str, expected: str, by: str = MANIFEST) -> None:
    if found != expected:
        refuse(path, f"SHA-256 {found}", f"{expected} by {by}", REMEDY)
