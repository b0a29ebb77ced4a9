"""Calibration text: what is accepted, what is refused and how."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from heal_models import save_characters
from transformers import AutoTokenizer

from blr.compressor.base.errors import BlrError, HubError, InputError
from blr.compressor.text.reading import (
    Calibration,
    read_calibration,
    read_documents,
    read_first_text,
    read_whole_text,
)

pytestmark = pytest.mark.fast


def read(tiny: Path, name: Path | str, **options: object) -> Calibration:
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    defaults = {"samples": 4, "seq_len": 32, "packed": True}
    return read_calibration(str(name), tokenizer, **{**defaults, **options})


def test_plain_text_becomes_consecutive_windows(tiny: Path, sample: Path) -> None:
    found = read(tiny, sample)
    assert [tuple(batch.shape) for batch in found.ids] == [(4, 32)]
    assert found.tokens == 128
    assert found.digest == read(tiny, sample).digest != read(tiny, sample, samples=3).digest
    text = AutoTokenizer.from_pretrained(tiny).decode(found.ids[0].flatten())
    assert sample.read_text().startswith(text[:200])


def test_json_lines_give_their_text_fields(tiny: Path, sample: Path, tmp_path: Path) -> None:
    path = tmp_path / "text.jsonl"
    path.write_text("\n".join(json.dumps({"text": line}) for line in sample.read_text().splitlines()))
    assert read(tiny, path).ids[0].equal(read(tiny, sample).ids[0])


def test_ends_of_lines_within_a_string_are_no_ends_of_json_lines(tmp_path: Path) -> None:
    """Unicode has more of them than JSON, which holds them as they are, and so does `str.splitlines`."""
    path, texts = tmp_path / "text.jsonl", ["a\u2028b\u2029c", "d\x85e\x7f"]
    path.write_text("\r\n".join(json.dumps({"text": t}, ensure_ascii=False) for t in texts), newline="")
    assert list(read_documents(str(path))) == [f"{text}\n" for text in texts]


@pytest.mark.parametrize(
    "written",
    [
        lambda lines: json.dumps(lines),
        lambda lines: "\ufeff\n" + json.dumps([{"text": line, "id": 3} for line in lines], indent=2),
        lambda lines: "\n".join(json.dumps({"text": line}) for line in lines),
    ],
    ids=["a list of strings", "a list of objects", "lines, as datasets writes them"],
)
def test_json_gives_its_texts_too(
    written: Callable[[list[str]], str], tiny: Path, sample: Path, tmp_path: Path
) -> None:
    path = tmp_path / "text.json"
    path.write_text(written(sample.read_text().splitlines()))
    assert read(tiny, path).ids[0].equal(read(tiny, sample).ids[0])
    assert read_whole_text(path, 1 << 20).splitlines() == sample.read_text().splitlines()
    assert read_first_text(path).startswith(sample.read_text()[:200])


def test_sentences_are_padded_and_masked(tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "lines.txt"
    path.write_text("one short line\n\na somewhat longer line of text that has more tokens\n")
    found = read(tiny, path, packed=False)
    assert found.masks[0].sum(1).unique().numel() == 2
    assert found.tokens == int(found.masks[0].sum()) < found.ids[0].numel()


def test_sentences_need_a_token_to_pad_with(tmp_path: Path) -> None:
    save_characters(tmp_path)
    (tmp_path / "lines.txt").write_text("one\nand another\n")
    with pytest.raises(InputError, match="no padding token"):
        read(tmp_path, tmp_path / "lines.txt", packed=False)


@pytest.mark.parametrize(
    ("name", "content", "kind", "message"),
    [
        ("empty.txt", b"", InputError, "empty"),
        ("blank.txt", b" \n\n", InputError, "empty"),
        ("short.txt", b"too short", InputError, "expected at least one window of 32"),
        ("latin.txt", "façade ".encode("latin-1") * 99, InputError, "UTF-8"),
        ("broken.jsonl", b'{"text": "a"}\n{"text": 3}\n', InputError, "broken.jsonl:2"),
        ("object.json", b'{\n "text": "a"\n}\n', InputError, r"object.json:1: .* as in a .jsonl"),
        ("broken.json", b'["a", "b"', InputError, "no JSON .* save it as .jsonl"),
        ("wrong.json", b'["a", {"title": "b"}]', InputError, "item 2 of the list: expected a string"),
        ("half.json", rb'["\ud800"]', InputError, "item 1 of the list: expected a string"),
        ("missing.txt", None, InputError, "no such file"),
        ("owner/name", None, HubError, "--offline"),
    ],
)
def test_unusable_text_is_refused(
    name: str, content: bytes | None, kind: type[BlrError], message: str, tiny: Path, tmp_path: Path
) -> None:
    path: Path | str = tmp_path / name if content is not None else name
    if content is not None:
        Path(path).write_bytes(content)
    with pytest.raises(kind, match=message):
        read(tiny, path, offline=True)
