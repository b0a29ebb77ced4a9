"""sentence-transformers: an encoder with pooling and a dense layer of its own, compressed."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import bare
import pytest
import torch
from exporting import compress_to
from pico import VOCAB, save_model, save_pico
from running import Invoke
from scipy.stats import spearmanr
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Dense, Normalize, Transformer
from sentence_transformers.sentence_transformer.modules import Pooling
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from blr.compressor import register

register()

WORDS = [f"w{n}" for n in range(VOCAB - 3)]
SENTENCES = [
    " ".join(WORDS[(7 * n + k * (n % 5 + 1)) % len(WORDS)] for k in range(4 + n)) for n in range(12)
]
# Embeds without blr, with the code in the folder.
WITHOUT_BLR = (
    bare.without("blr")
    + """
import json
from sentence_transformers import SentenceTransformer
model = SentenceTransformer(sys.argv[1], trust_remote_code=True, device="cpu")
print(json.dumps(model.encode(json.loads(sys.argv[2])).tolist()))
"""
)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pico encoder with words as tokens, pooled by its first token, with a dense layer behind."""
    folder = tmp_path_factory.mktemp("sentences")
    vocabulary = {word: n for n, word in enumerate(["[PAD]", "[UNK]", "[CLS]", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]")
    fast.save_pretrained(save_pico("bert", folder / "encoder"))
    torch.manual_seed(0)
    transformer = Transformer(str(folder / "encoder"), max_seq_length=7)
    parts = [transformer, Pooling(32, "cls"), Dense(32, 5), Normalize()]
    SentenceTransformer(modules=parts, device="cpu").save(str(folder / "source"))
    return folder / "source"


@pytest.fixture(scope="module")
def output(source: Path) -> Path:
    return compress_to(source, source.parent / "out", method="svd", cf=1.5)


def test_it_loads_and_embeds_with_blr_and_without(source: Path, output: Path) -> None:
    model = SentenceTransformer(str(output), device="cpu")
    found = torch.from_numpy(model.encode(SENTENCES))
    assert found.shape == (len(SENTENCES), 5) and model.max_seq_length == 7
    dense = torch.from_numpy(SentenceTransformer(str(source), device="cpu").encode(SENTENCES))
    assert 0.5 < float(torch.nn.functional.cosine_similarity(found, dense).mean()) < 0.9999
    done = bare.run(WITHOUT_BLR, output, json.dumps(SENTENCES))
    assert done.returncode == 0, done.stderr
    torch.testing.assert_close(torch.tensor(json.loads(done.stdout.splitlines()[-1])), found)


def test_eval_pools_as_the_folder_says(output: Path, tmp_path: Path, invoke: Invoke) -> None:
    """The correlation is that of sentence-transformers' own embeddings."""
    found, expected = spearman(output, tmp_path, invoke)
    assert found == pytest.approx(expected, abs=1e-3)


def spearman(folder: Path, tmp_path: Path, invoke: Invoke) -> tuple[float, float]:
    """Of `blr eval --sts`, and of sentence-transformers' own embeddings."""
    pairs = [(SENTENCES[n], SENTENCES[n - 1], n % 5) for n in range(len(SENTENCES))]
    with open(tmp_path / "sts.csv", "w", newline="") as file:
        csv.writer(file).writerows(pairs)
    code, out, err = invoke("eval", folder, "--sts", tmp_path / "sts.csv", "--format", "json", "-q")
    assert code == 0, err
    model = SentenceTransformer(str(folder), device="cpu")
    first, second = (torch.from_numpy(model.encode([p[side] for p in pairs])) for side in (0, 1))
    cosines = torch.nn.functional.cosine_similarity(first, second)
    return json.loads(out)["spearman"], 100 * spearmanr(cosines, [p[2] for p in pairs]).statistic


PROMPT = " ".join(WORDS[:3]) + " "
OWN: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # settings of the model, and of its pooling
    "prompt": ({"prompts": {"query": PROMPT}, "default_prompt_name": "query"}, {}),
    "prompt, not pooled": (
        {"prompts": {"query": PROMPT}, "default_prompt_name": "query"},
        {"include_prompt": False},
    ),
    "dimensions": ({"truncate_dim": 4}, {}),
    "both": ({"prompts": {"s": PROMPT}, "default_prompt_name": "s", "truncate_dim": 9}, {}),
    "prompt of no default": ({"prompts": {"query": PROMPT}}, {}),
}


@pytest.mark.parametrize("own", OWN)
def test_eval_takes_the_prompt_and_the_dimensions_of_the_model(
    own: str, source: Path, tmp_path: Path, invoke: Invoke
) -> None:
    settings, pooling = OWN[own]
    parts = [
        Transformer(str(source.parent / "encoder"), max_seq_length=12),
        Pooling(32, "mean", **pooling),
    ]
    SentenceTransformer(modules=parts, device="cpu", **settings).save(str(tmp_path / "model"))
    output = compress_to(tmp_path / "model", tmp_path / "out", method="svd", cf=1.5)
    for folder in (tmp_path / "model", output):
        found, expected = spearman(folder, tmp_path, invoke)
        assert found == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("name", ["T5EncoderModel", "T5ForConditionalGeneration", "MT5EncoderModel"])
def test_the_encoder_of_a_t5(name: str, source: Path, tmp_path: Path, invoke: Invoke) -> None:
    """sentence-transformers names the native class, `blr eval` the encoder."""
    settings = {
        "vocab_size": VOCAB,
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 64,
        "num_layers": 2,
        "num_heads": 4,
    }
    kind = "MT5Config" if name.startswith("MT5") else "T5Config"
    save_model(kind, {**settings, "pad_token_id": 0}, name, tmp_path / "encoder")
    for file in (source.parent / "encoder").glob("tokenizer*"):
        (tmp_path / "encoder" / file.name).write_bytes(file.read_bytes())
    parts = [Transformer(str(tmp_path / "encoder"), max_seq_length=12), Pooling(32, "mean")]
    SentenceTransformer(modules=parts, device="cpu").save(str(tmp_path / "model"))
    output = compress_to(tmp_path / "model", tmp_path / "out", method="svd", rank=64)
    dense, ours = (SentenceTransformer(str(f), device="cpu") for f in (tmp_path / "model", output))
    expected, found = (torch.from_numpy(model.encode(SENTENCES)) for model in (dense, ours))
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)
    done = bare.run(WITHOUT_BLR, output, json.dumps(SENTENCES))
    assert done.returncode == 0, done.stderr
    remote = torch.tensor(json.loads(done.stdout.splitlines()[-1]))
    torch.testing.assert_close(remote, expected, atol=1e-3, rtol=1e-3)
    for folder in (tmp_path / "model", output):
        mine, theirs = spearman(folder, tmp_path, invoke)
        assert mine == pytest.approx(theirs, abs=1e-3)
