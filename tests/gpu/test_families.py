"""Random decoders of other families than the bundled checkpoint's: biases of q|k|v, norms of q and k,
sliding windows; dense and compressed by the command line, decoded against transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from fresh import blr, shared
from greedy import Prompt, follow, left_padded, separated
from references import plain_products
from rows import Row, bounded, relative, row, tokens_row
from tolerances import TOLERANCES
from torch import Tensor, nn

from blr.compressor.loading.load import load_model
from blr.compressor.modeling.layers import StructuredLinear
from blr.compressor.runtime.decoder import Decoder

pytestmark = pytest.mark.gpu
Judge = Callable[[Iterator[Row]], None]

VOCABULARY = 800
SIZES = {
    **{"vocab_size": VOCABULARY, "hidden_size": 256, "intermediate_size": 448},
    **{"num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 2},
    **{"max_position_embeddings": 2048, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0},
}


@dataclass(frozen=True)
class Family:
    """Classes of transformers, settings besides `SIZES`, and the gain of a linear layer: with the
    smaller embeddings of a tied head, layers must add more for the tokens not to repeat."""

    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    gain: float = 1.0


FAMILIES = {
    "qwen2": Family("Qwen2", {"tie_word_embeddings": True}, gain=1.6),
    "qwen3": Family("Qwen3", {"tie_word_embeddings": False, "head_dim": 64}),
    "mistral": Family("Mistral", {"tie_word_embeddings": False, "sliding_window": 100}),
}
METHODS: dict[str, tuple[str, ...]] = {
    "dense": (),
    "svd": ("--method", "svd"),
    "grouped": ("--method", "svd", "--heads", "grouped:2"),
    "monarch": ("--method", "monarch", "--blocks", "4"),
    "blast": ("--method", "blast", "--blocks", "4", "--rounds", "3"),
    "ks": ("--method", "ks"),
}
LENGTHS = (90, 61, 120, 5, 77, 1, 128, 33)  # of the rows of a batch; continuations cross 128 and 256
NEW, CONTEXT = 256, 1100
LONG = {(500, 463): 40, (1024, 990): 40}  # prompts at the next borders to tokens that follow
CANDIDATES = 4  # prompts of each length to choose from
TEXT, FORCED = 148, 48  # tokens of a text, and how many of them are fed one by one


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", FAMILIES)
def test_family(family: str, method: str, device: str, work: Path, judge: Judge) -> None:
    """One family compressed in one way (or "dense")."""
    judge(compare(family, method, device, work))


def compare(family: str, method: str, device: str, work: Path) -> Iterator[Row]:
    name = f"{family} {method}"
    folder = compressed(work, device, family, method)
    model = load_model(folder, "AutoModelForCausalLM", dtype="float32", device=device)
    layers = sum(isinstance(module, StructuredLinear) for module in model.modules())
    yield row((layers > 0) == (method != "dense"), name, "loads", f"{layers} structured layers")
    decoder = Decoder(model, batch=len(LENGTHS), context=CONTEXT, ops=operations(device))
    yield from compare_batches(name, model, decoder)
    yield from compare_borders(name, model, decoder)
    yield from compare_half(name, folder, device)


def operations(device: str) -> str:
    """What the runtime can run there."""
    return "triton" if device == "cuda" else "torch"


def compressed(work: Path, device: str, family: str, method: str) -> Path:
    """The random model of `family`, compressed by `method`."""
    dense = shared(work / family, partial(save_random, FAMILIES[family]))
    if method == "dense":
        return dense
    given = (*METHODS[method], "--cf", 1.25, "--device", device, "--quiet")
    blr("compress", dense, "-o", work / f"{family}-{method}", *given)
    return work / f"{family}-{method}"


def save_random(family: Family, folder: Path) -> None:
    """A model whose every parameter matters: biases and gains of norms too."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{family.name}Config")(**SIZES, **family.settings)
    model = getattr(transformers, f"{family.name}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(1, 0.2) if parameter.dim() == 1 else None
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.weight.normal_(0, family.gain / module.in_features**0.5)
                _ = module.bias is None or module.bias.normal_(0, 0.5)
        model.get_input_embeddings().weight.normal_(0, 0.05 if config.tie_word_embeddings else 1)
    model.save_pretrained(folder)


def prompts(*lengths: int, seed: int) -> list[list[list[int]]]:
    """Random prompts, `CANDIDATES` of each length."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(CANDIDATES, length) for length in lengths]
    return [torch.randint(2, VOCABULARY, shape, generator=generator).tolist() for shape in shapes]


def decoded(decoder: Decoder, chosen: list[Prompt], new: int) -> list[list[int]]:
    """What the runtime says after these prompts, padded on the left."""
    return decoder.generate(*left_padded([p.ids for p in chosen]), max_new_tokens=new)


def compare_batches(name: str, model: Any, decoder: Decoder) -> Iterator[Row]:
    """256 tokens in float32 after prompts of unequal lengths; the last batch finds its graphs made."""
    chosen = separated(model, prompts(*LENGTHS, seed=0), NEW)
    lead = f"best logit ahead by {min(p.lead for p in chosen):.0e} or more"
    for rows in (1, 2, 3, 8, 2):
        some = chosen[:rows]
        wanted = [p.tokens for p in follow(model, [p.ids for p in some], NEW)]
        distinct = f"{len({token for tokens in wanted for token in tokens})} different"
        found = decoded(decoder, some, NEW)
        yield tokens_row(name, f"batch {rows}", found, wanted, f"{distinct}, {lead}")


def compare_borders(name: str, model: Any, decoder: Decoder) -> Iterator[Row]:
    """Continuations across the larger borders of contexts, prompts across that of chunks."""
    for lengths, new in LONG.items():
        chosen = separated(model, prompts(*lengths, seed=1), new)
        found = decoded(decoder, chosen, new)
        yield tokens_row(name, f"prompts of {lengths}", found, [p.tokens for p in chosen])


@torch.no_grad()
def compare_half(name: str, folder: Path, device: str) -> Iterator[Row]:
    """Logits of a given text in bfloat16 against the same rounded weights in float32."""
    task, allowed = "AutoModelForCausalLM", TOLERANCES[torch.bfloat16]
    half = load_model(folder, task, dtype="bfloat16", device=device)
    exact = load_model(folder, task, dtype="float32", device=device)
    exact.load_state_dict({key: value.float() for key, value in half.state_dict().items()})
    decoder = Decoder(half, batch=3, context=256, ops=operations(device))
    for rows in (1, 3):
        ids = torch.tensor([group[0] for group in prompts(*[TEXT] * rows, seed=2)]).to(device)
        with plain_products(exact), plain_products(half):
            truth, native = (model(ids).logits[:, -FORCED - 1 : -1] for model in (exact, half))
        error, usual = relative(forced(decoder, ids), truth), relative(native, truth)
        case, detail = f"logits in bfloat16, batch {rows}", f"transformers {usual:.1e}"
        yield bounded(name, case, error, allowed, detail)


def forced(decoder: Decoder, ids: Tensor) -> Tensor:
    """[B, FORCED, vocab]: the runtime's logits of the last tokens of a text [B, TEXT], one by one."""
    start = TEXT - FORCED
    steps = [decoder.prefill(ids[:, :start])]
    steps += [decoder.step(ids[:, at]) for at in range(start, TEXT - 1)]
    return torch.stack(steps, 1)
