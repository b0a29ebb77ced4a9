"""What a model's folder says of how to generate, checked before transformers' `generate` meets it.

Only types are looked at: what some model could mean passes, and keys that nobody knows are nobody's
business.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from blr.compressor.checkpoint.hints import MAX_JSON_BYTES, REMEDY, is_number
from blr.compressor.checkpoint.regular import inside, parse_json, read_whole
from blr.compressor.workspace.strict_json import Told, fitted

GENERATION, CONFIG = "generation_config.json", "config.json"
MOST = 2**31 - 1
EXPECTED = "a value of the type that transformers takes"
Id = Annotated[int, Field(ge=-(2**31), le=MOST)]
Ids = Id | list[Id] | None
Count = Annotated[int, Field(ge=-1, le=MOST)] | None
Number = float | None
Switch = bool | None


class TokenIds(Told):
    """Tokens that a configuration names: numbers, some of them lists of numbers."""

    bos_token_id: Ids = None
    eos_token_id: Ids = None
    pad_token_id: Ids = None
    decoder_start_token_id: Ids = None
    forced_bos_token_id: Ids = None
    forced_eos_token_id: Ids = None


class Defaults(TokenIds):
    """The settings of generation_config.json that any call of `generate` reads."""

    max_length: Count = None
    max_new_tokens: Count = None
    min_length: Count = None
    min_new_tokens: Count = None
    num_beams: Count = None
    num_return_sequences: Count = None
    no_repeat_ngram_size: Count = None
    encoder_no_repeat_ngram_size: Count = None
    top_k: Number = None
    temperature: Number = None
    top_p: Number = None
    min_p: Number = None
    typical_p: Number = None
    epsilon_cutoff: Number = None
    eta_cutoff: Number = None
    top_h: Number = None
    repetition_penalty: Number = None
    encoder_repetition_penalty: Number = None
    length_penalty: Number = None
    diversity_penalty: Number = None
    guidance_scale: Number = None
    penalty_alpha: Number = None
    max_time: Number = None
    do_sample: Switch = None
    use_cache: Switch = None
    renormalize_logits: Switch = None
    remove_invalid_values: Switch = None
    return_dict_in_generate: Switch = None
    output_attentions: Switch = None
    output_hidden_states: Switch = None
    output_scores: Switch = None
    output_logits: Switch = None
    suppress_tokens: list[Id] | None = None
    begin_suppress_tokens: list[Id] | None = None
    bad_words_ids: list[list[Id]] | None = None
    stop_strings: str | list[str] | None = None
    cache_implementation: str | None = None


def check_defaults(folder: Path) -> None:
    """Refuse settings of generation_config.json, and tokens in config.json, of another type than
    transformers takes. Raises InputError, one line."""
    if (folder / GENERATION).exists():
        table = _read(folder, GENERATION)
        plain = {name: value for name, value in table.items() if not is_number(value)}
        fitted(plain, Defaults, folder / GENERATION, REMEDY, EXPECTED)
    config = _read(folder, CONFIG)
    for part in (config, config.get("text_config")):
        if isinstance(part, dict):
            fitted(part, TokenIds, folder / CONFIG, REMEDY, EXPECTED)


def _read(folder: Path, name: str) -> dict[str, Any]:
    path = inside(folder, name)
    return parse_json(read_whole(path, MAX_JSON_BYTES), path, constants=True)
