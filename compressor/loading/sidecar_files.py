"""What an output takes along besides its weights: tried before the work, settled after it."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, create_model
from transformers import AutoTokenizer, GenerationConfig, PreTrainedConfig

from blr.compressor.base.disk import scratch_folder, write_stream
from blr.compressor.base.errors import OutputError
from blr.compressor.base.exhaustion import is_panic, raise_exhausted, storage_errors
from blr.compressor.base.quoting import first_line, quote
from blr.compressor.checkpoint.extras import MAX_JSON_BYTES, REMEDY, carried, is_number
from blr.compressor.checkpoint.regular import inside, read_json, refuse
from blr.compressor.checkpoint.source import Source
from blr.compressor.loading.native import quiet_transformers
from blr.compressor.loading.tokenizer import PROBE, check_tokenizer
from blr.compressor.modeling.modeling_blr import PREFIX
from blr.compressor.workspace.strict_json import Told, fitted

GENERATION, CONFIG = "generation_config.json", "config.json"
MOST = 2**31 - 1
EXPECTED = "a value of the type that transformers takes"
Id = Annotated[int, Field(ge=-(2**31), le=MOST)]
# Tokens that a configuration names: numbers, some of them lists of numbers
TOKENS = ("bos", "eos", "pad", "decoder_start", "forced_bos", "forced_eos")
IDS: dict[str, object] = {f"{name}_token_id": Id | list[Id] | None for name in TOKENS}
COUNTS = (
    *("max_length", "max_new_tokens", "min_length", "min_new_tokens", "num_beams"),
    *("num_return_sequences", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size"),
)
NUMBERS = (
    *("top_k", "temperature", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff", "top_h"),
    *("repetition_penalty", "encoder_repetition_penalty", "length_penalty", "diversity_penalty"),
    *("guidance_scale", "penalty_alpha", "max_time"),
)
SWITCHES = (
    *("do_sample", "use_cache", "renormalize_logits", "remove_invalid_values", "output_attentions"),
    *("output_hidden_states", "output_scores", "output_logits", "return_dict_in_generate"),
)
# What any call of `generate` reads of generation_config.json
DEFAULTS: dict[str, object] = {
    **IDS,
    **dict.fromkeys(COUNTS, Annotated[int, Field(ge=-1, le=MOST)] | None),
    **dict.fromkeys(NUMBERS, float | None),
    **dict.fromkeys(SWITCHES, bool | None),
    **dict.fromkeys(("suppress_tokens", "begin_suppress_tokens"), list[Id] | None),
    "bad_words_ids": list[list[Id]] | None,
    "stop_strings": str | list[str] | None,
    "cache_implementation": str | None,
}


def _settings(name: str, kinds: dict[str, object]) -> type[Told]:
    fields: dict[str, Any] = {key: (kind, None) for key, kind in kinds.items()}
    return create_model(name, __base__=Told, **fields)


TokenIds, Defaults = _settings("TokenIds", IDS), _settings("Defaults", DEFAULTS)


def check_defaults(folder: Path) -> None:
    """Raise InputError for settings of generation_config.json, or ids in config.json, of wrong types."""
    if (folder / GENERATION).exists():
        table = _read(folder, GENERATION)
        plain = {name: value for name, value in table.items() if not is_number(value)}
        fitted(plain, Defaults, folder / GENERATION, REMEDY, EXPECTED)
    config = _read(folder, CONFIG)
    for part in (config, config.get("text_config")):
        if isinstance(part, dict):
            fitted(part, TokenIds, folder / CONFIG, REMEDY, EXPECTED)


def _read(folder: Path, name: str) -> dict[str, object]:
    path = inside(folder, name)
    return read_json(path, MAX_JSON_BYTES, constants=True)


TOKENIZER = "tokenizer_config.json"
# One of which makes a tokenizer, but for those of bytes
VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")


def check_carried(source: Source, config: Mapping[str, object]) -> None:
    """Raise now what would fail when an output with `config` is checked after hours of work. Raises
    InputError for a bad tokenizer or generation_config.json, OutputError for a tokenizer that cannot be
    carried over to the model type of `config`."""
    check_tokenizer(source.folder)
    check_generation(source.folder)
    for name in source.extras.pickled:  # weights that a module of sentence-transformers would lack
        remedy = "convert them, or pass --allow-pickle if you trust them"
        refuse(source.folder / name, "only pickled weights of a module", "safetensors", remedy)
    with scratch_folder() as folder, storage_errors(folder):
        (folder / "config.json").write_text(json.dumps(config), "utf-8")
        for name, path in source.extras.carried.items():
            data = carried(path)
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            if isinstance(data, Path):
                (folder / name).symlink_to(os.path.abspath(data))
            else:
                (folder / name).write_bytes(data)
        keep_tokenizer(source.folder, folder)


def check_generation(folder: Path) -> None:
    """Raise InputError for generation defaults that no model can be loaded with."""
    check_defaults(folder)
    path = folder / GENERATION
    if not os.path.exists(path):
        return
    try:
        with quiet_transformers():
            GenerationConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # whatever hostile values make it raise
        raise_exhausted(error)
        reason = quote(first_line(error), 160)[1:-1]
        refuse(path, f"settings that transformers refuses ({reason})", "those of a model", REMEDY)


def keep_tokenizer(source: Path, folder: Path) -> dict[str, tuple[int, str]]:
    """Name the source's tokenizer class in tokenizer_config.json where it would not be found without
    blr. Returns the size and SHA-256 of a file that was rewritten. Raises OutputError if the tokenizer
    still gives other ids, with blr's code or without."""
    before = token_ids(source)
    if before is None or _same_ids(before, folder):
        return {}
    path = folder / TOKENIZER
    table = json.loads(path.read_bytes()) if path.exists() else {}
    text = json.dumps({**table, "tokenizer_class": before[0]}, indent=2)
    written = write_stream(path, [text.encode() + b"\n"])
    if not _same_ids(before, folder):
        raise OutputError(
            f"{folder}: its tokenizer does not give the ids of the source's; "
            f"this transformers version cannot carry a {before[0]} over to another model type; save the "
            "source's tokenizer as tokenizer.json, or take another version"
        )
    return {path.name: written}


def _same_ids(expected: tuple[str, tuple[list[int], dict[str, int]]], folder: Path) -> bool:
    kind = json.loads((folder / "config.json").read_bytes())["model_type"]
    ways = (True, False) if kind.startswith(f"{PREFIX.lower()}_") else (True,)
    found = [token_ids(folder, code=code) for code in ways]
    return all(each is not None and each[1] == expected[1] for each in found)


def token_ids(folder: Path, *, code: bool = True) -> tuple[str, tuple[list[int], dict[str, int]]] | None:
    """Class name of the tokenizer in `folder`, its ids of a probing text and of all tokens; None if
    there is none, or only one with code of its own. `code`: with blr's model types registered."""
    if not any((folder / name).exists() for name in VOCABULARIES):
        return None
    try:
        with quiet_transformers():
            known = {} if code else {"config": PreTrainedConfig.from_pretrained(folder)}
            tokenizer = AutoTokenizer.from_pretrained(
                folder, trust_remote_code=False, local_files_only=True, **known
            )
            ids = tokenizer(PROBE)["input_ids"], tokenizer.get_vocab()
            return type(tokenizer).__name__, ids
    except BaseException as error:
        raise_exhausted(error)
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        return None
