"""The last steps of every command that makes a folder: write, check, list, commit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blr.compressor.base.disk import Bytes, fsync_folder, pieces, write_stream
from blr.compressor.base.progress import CHECKING, WRITING, Progress
from blr.compressor.checkpoint.header import TensorEntry
from blr.compressor.checkpoint.source import Source
from blr.compressor.loading.sidecar_files import TOKENIZER
from blr.compressor.planning.plan import Plan
from blr.compressor.workspace.manifest import MANIFEST, build_manifest
from blr.compressor.workspace.shards import Slot, index_name, write_shards
from blr.compressor.workspace.workspace import Workspace

Written = dict[str, tuple[int, str]]  # file to its size and SHA-256


@dataclass(frozen=True)
class FolderContents:
    """What a folder is to hold.

    `shards` are slots by file; `read` gives the bytes of a tensor when its turn comes; `small` are the
    other files: contents, or a file to carry over; `later` names files that `check` may add.
    """

    shards: Mapping[str, list[Slot]]
    read: Callable[[TensorEntry], Iterable[Bytes]]
    small: Mapping[str, bytes | Path]
    later: tuple[str, ...] = ()


def write_whole(
    workspace: Workspace,
    folder: Path,
    contents: FolderContents,
    check: Callable[[Path], Written],
    facts: Callable[[], Mapping[str, Any]],
    progress: Progress,
) -> None:
    """Write `contents`, check them and list them in a manifest.

    Args:
        folder: the partial folder, or one in it for what the run goes on from.
        check: loads what was written as a user would; returns the files that it wrote itself.
        facts: gives the manifest's account of the run once all is written, with `input_sha256` of
            all that was read.

    Raises BlrError: as `check`; there is no manifest then.
    """
    names = {
        *contents.shards,
        index_name(contents.shards),
        *contents.small,
        TOKENIZER,
        *contents.later,
        MANIFEST,
    }
    workspace.claim((folder / name).relative_to(workspace.partial).as_posix() for name in names)
    folder.mkdir(exist_ok=True)
    with progress.timed("writing"):
        written = _write_shards(folder, contents, progress)
    for name, data in contents.small.items():
        written[name] = write_stream(folder / name, pieces(data))
    progress.stage(CHECKING)
    with progress.timed("check"):
        written.update(check(folder))
    fsync_folder(folder)  # the files before the manifest that lists them
    write_stream(folder / MANIFEST, [build_manifest(folder, written, **facts())])


def _write_shards(folder: Path, contents: FolderContents, progress: Progress) -> Written:
    with progress.layers(sum(map(len, contents.shards.values())), WRITING) as advance:

        def read(entry: TensorEntry) -> Iterable[Bytes]:
            advance(entry.name)
            return contents.read(entry)

        return write_shards(folder, contents.shards, read)


def slots_of(
    source: Source, plan: Plan, results: Mapping[str, Any], norms: Mapping[str, TensorEntry]
) -> list[Slot]:
    """The output's tensors in the source's order, factors in the place of their weight.

    Args:
        results: factors and record by module. norms: refitted ones, by tensor.
    """
    replaced = {planned.layer.entry.name: planned.layer.module for planned in plan.layers}
    slots = []
    for entry in source.entries.values():
        module = replaced.get(entry.name)
        if module is None:
            slots.append(Slot(entry.name, norms.get(entry.name, entry)))
        else:
            factors, _ = results[module]
            slots += [Slot(f"{module}.{suffix}", factor) for suffix, factor in factors.items()]
    return slots
