"""Exported encoders: forward passes as CUDA graphs and compiled ahead of time, against the source."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from fresh import CALL, blr, blr_process, fresh, shared
from greedy import follow
from references import plain_products
from rows import Row, bounded, relative, row, tokens_row
from tolerances import TOLERANCES
from torch import Tensor

from blr.compressor.loading.load import load_model

pytestmark = pytest.mark.gpu
Judge = Callable[[Iterator[Row]], None]

VOCABULARY = 600
TEXT = {
    **{"vocab_size": VOCABULARY, "hidden_size": 384, "intermediate_size": 1536},
    **{"num_hidden_layers": 6, "num_attention_heads": 12, "max_position_embeddings": 128},
}
IMAGE = {
    **{"hidden_size": 192, "intermediate_size": 768, "num_hidden_layers": 4, "num_labels": 10},
    **{"num_attention_heads": 3, "image_size": 64, "patch_size": 16},
}
GPT2 = {
    **{"vocab_size": VOCABULARY, "n_embd": 192, "n_layer": 3, "n_head": 4, "n_positions": 128},
    **{"bos_token_id": 0, "eos_token_id": 0},
}


NEW = 16  # tokens of one that generates


@dataclass(frozen=True)
class Encoder:
    """A model class of transformers with its settings, how `blr compress` treats it, and the Auto
    class that loads it. layers: those a rounding error passes through."""

    name: str
    model: str
    settings: dict[str, Any]
    task: str = "AutoModel"
    method: tuple[str, ...] = ()
    extra: dict[str, Any] = field(default_factory=dict)  # arguments of every call


BLAST = ("--method", "blast", "--blocks", "4", "--rounds", "3")
ENCODERS = {
    "bert": Encoder("Bert", "BertModel", TEXT),
    "bert-svd": Encoder("Bert", "BertModel", TEXT, method=("--method", "svd")),
    "bert-monarch": Encoder("Bert", "BertModel", TEXT, method=("--method", "monarch", "--blocks", "4")),
    "vit-blast": Encoder("ViT", "ViTForImageClassification", IMAGE, "AutoModelForImageClassification",
                         BLAST),
    "vit-ks": Encoder("ViT", "ViTForImageClassification", IMAGE, "AutoModelForImageClassification",
                      ("--method", "ks")),
    "gpt2-base": Encoder("GPT2", "GPT2Model", GPT2, extra={"use_cache": False}),
    "gpt2-svd": Encoder("GPT2", "GPT2LMHeadModel", GPT2, "AutoModelForCausalLM", ("--method", "svd"),
                        {"use_cache": False}),
}  # fmt: skip

# In a fresh process: every call through the model, and through its forward pass alone.
FORWARD = f"""
import torch, transformers
torch.backends.cudnn.allow_tf32 = False  # of convolutions; that of products is off by default
load = getattr(transformers, job["task"]).from_pretrained
model = load(job["folder"], trust_remote_code=True, dtype=torch.float32).to(job["device"]).eval()
calls, found = torch.load(job["inputs"]), []
print("{CALL}", file=sys.stderr, flush=True)
with torch.no_grad():
    for call in calls:
        inputs = {{name: value.to(job["device"]) for name, value in call.items()}} | job["extra"]
        found.append([model(**inputs)[0], model.forward(**inputs)[0]])
tokens = []
if job["new"]:
    options = {{"do_sample": False, "eos_token_id": None, "pad_token_id": 0}}
    prompt = calls[0]["input_ids"].to(job["device"])
    for _ in range(2):
        new = model.generate(prompt, max_new_tokens=job["new"], **options)[:, prompt.shape[1]:]
        tokens.append(new.tolist())
torch.save([[tensor.cpu() for tensor in pair] for pair in found], job["outputs"])
held = model.__dict__.get("_blr_graphs")
print(json.dumps({{"graphs": len(held.made.entries) if held else 0, "tokens": tokens}}))
"""


def save_random(encoder: Encoder, folder: Path) -> None:
    """A model with random weights of visible size, biases and gains too."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{encoder.name}Config")(**encoder.settings)
    model = getattr(transformers, encoder.model)(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.03)
    model.save_pretrained(folder)


def source_of(work: Path, name: str) -> Path:
    """The encoder `name`, compressed if it is to be."""
    encoder = ENCODERS[name]
    dense = shared(work / "encoders" / f"{name}-dense", partial(save_random, encoder))
    if not encoder.method:
        return dense
    given = (*encoder.method, "--cf", 1.5, "--device", "cpu", "--quiet")
    return shared(work / "encoders" / name, lambda folder: blr("compress", dense, "-o", folder, *given))


def inputs_of(encoder: Encoder) -> list[dict[str, Tensor]]:
    """Calls of several shapes, each shape again with other data; texts with padding where before
    there was none, and the first call again at the end."""
    generator = torch.Generator().manual_seed(1)
    if encoder.name == "ViT":
        size = IMAGE["image_size"]
        images = [torch.randn(n, 3, size, size, generator=generator) for n in (1, 4, 1, 4)]
        return [{"pixel_values": each} for each in (*images, images[0])]
    calls = []
    for rows, columns in ((2, 24), (1, 7), (2, 24), (8, 64), (1, 7)):
        ids = torch.randint(2, VOCABULARY, (rows, columns), generator=generator)
        calls.append({"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    padded = {name: value.clone() for name, value in calls[0].items()}
    padded["attention_mask"][1, 9:] = 0
    bare = {"input_ids": calls[2]["input_ids"]}
    return [*calls, padded, calls[2], bare, calls[0]]


def shapes_of(calls: list[dict[str, Tensor]]) -> int:
    """How many different shapes there are: as many as graphs."""
    return len({tuple((name, value.shape) for name, value in call.items()) for call in calls})


@torch.no_grad()
def truth_of(source: Path, encoder: Encoder, calls: list[dict[str, Tensor]]) -> list[Tensor]:
    """Results of the source in float64 on the CPU."""
    model = load_model(source, encoder.task, dtype="float64", device="cpu")
    doubles = ({n: v.double() if v.is_floating_point() else v for n, v in c.items()} for c in calls)
    with plain_products(model):
        return [model(**call, **encoder.extra)[0] for call in doubles]


@pytest.mark.parametrize("name", ENCODERS)
def test_captured(name: str, device: str, work: Path, judge: Judge) -> None:
    """An export through its graphs and without, against the source; every call in turn."""
    judge(compare(name, device, work))


def compare(name: str, device: str, work: Path) -> Iterator[Row]:
    encoder, source, folder = ENCODERS[name], source_of(work, name), work / "exported" / name
    folder.parent.mkdir(exist_ok=True)
    blr("export", source, "-o", folder, "--self-contained", "--quiet")
    calls, files = inputs_of(encoder), [str(folder) + end for end in (".inputs", ".outputs")]
    torch.save(calls, files[0])
    generates, extra = encoder.task == "AutoModelForCausalLM", encoder.extra
    job = {"folder": str(folder), "task": encoder.task, "device": device, "extra": extra}
    job |= {"inputs": files[0], "outputs": files[1], "new": NEW * generates}
    found, (loading, said) = fresh(FORWARD, job)
    pairs, allowed = torch.load(files[1]), TOLERANCES[torch.float32] * layers_of(encoder) ** 0.5
    for number, ((ours, plain), exact) in enumerate(
        zip(pairs, truth_of(source, encoder, calls), strict=True)
    ):
        yield bounded(name, f"call {number} as the source", relative(ours, exact), allowed)
        yield bounded(name, f"call {number} as the plain forward", relative(ours, plain), allowed)
    if generates:
        yield from compare_generation(source, name, calls[0], found["tokens"], loading + said)
    elif device == "cuda":
        shapes, heard = shapes_of(calls), loading + said
        told = "; ".join([f"{found['graphs']} graphs for {shapes} shapes", *heard])
        yield row(found["graphs"] == shapes and not heard, name, "a graph a shape, no excuse", told)


def layers_of(encoder: Encoder) -> int:
    return encoder.settings.get("num_hidden_layers") or encoder.settings["n_layer"]


def compare_generation(
    source: Path, name: str, call: dict[str, Tensor], found: list[Any], said: list[str]
) -> Iterator[Row]:
    """A decoder that the runtime does not know: tokens of transformers, one message why."""
    model = load_model(source, "AutoModelForCausalLM", dtype="float32", device="cpu")
    wanted = [prompt.tokens for prompt in follow(model, call["input_ids"].tolist(), NEW)]
    for tokens in found:
        yield tokens_row(name, "generates", tokens, wanted)
    reason = "with transformers instead of the fused runtime"
    yield row(len(said) == 1 and reason in said[0], name, "message", "; ".join(said))


# Runs a compiled forward pass with torch alone.
COMPILED = """
import torch
torch.backends.cudnn.allow_tf32 = False
run = torch._inductor.aoti_load_package(job["package"])
calls = torch.load(job["inputs"])
found = [run(**{name: value.to(job["device"]) for name, value in call.items()}) for call in calls]
torch.save([{name: value.cpu() for name, value in each.items()} for each in found], job["outputs"])
assert not any(name.partition(".")[0] == "transformers" for name in sys.modules)
print(json.dumps([value.device.type for value in found[0].values()]))
"""


@pytest.mark.parametrize("name", ["bert", "vit-blast"])
def test_compiled(name: str, device: str, work: Path, judge: Judge) -> None:
    """`blr export --as pt2`: made, verified, and loaded with torch alone."""
    encoder, source = ENCODERS[name], source_of(work, name)
    folder = work / f"pt2-{name}"
    done = blr_process("export", source, "-o", folder, "--as", "pt2", "--quiet")
    if done.code == 9 and ("C++ compiler" in done.last_line or "does not run here" in done.last_line):
        pytest.skip(done.last_line)
    assert done.code == 0, done.last_line
    assert blr_process("verify", folder).code == 0
    calls = [call for call in inputs_of(encoder) if len(call) == len(inputs_of(encoder)[0])]
    files = {"inputs": f"{folder}.inputs", "outputs": f"{folder}.outputs"}
    torch.save(calls, files["inputs"])
    places, _ = fresh(COMPILED, {**files, "package": str(folder / "model.pt2"), "device": device})
    assert places[0] == device
    found = [next(iter(each.values())) for each in torch.load(files["outputs"])]
    allowed = TOLERANCES[torch.float32] * layers_of(encoder) ** 0.5
    pairs = zip(found, truth_of(source, encoder, calls), strict=True)
    judge(
        bounded(f"pt2 {name}", f"call {number}", relative(*pair), allowed)
        for number, pair in enumerate(pairs)
    )
