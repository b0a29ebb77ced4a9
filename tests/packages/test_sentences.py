"""sentence-transformers: an encoder with pooling and a dense layer of its own, compressed."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

import bare
import pytest
import torch
from exporting import compress_to
from patience import PATIENCE
from pico import VOCAB, save_pico
from running import Invoke
from scipy.stats import spearmanr
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Dense, Normalize, Transformer
from sentence_transformers.sentence_transformer.modules import Pooling
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import blr.compressor.modeling  # noqa: F401

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
    command = [sys.executable, "-c", WITHOUT_BLR, str(output), json.dumps(SENTENCES)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    torch.testing.assert_close(torch.tensor(json.loads(done.stdout.splitlines()[-1])), found)


def test_eval_pools_as_the_folder_says(output: Path, tmp_path: Path, invoke: Invoke) -> None:
    """The correlation is that of sentence-transformers' own embeddings."""
    pairs = [(SENTENCES[n], SENTENCES[n - 1], n % 5) for n in range(len(SENTENCES))]
    with open(tmp_path / "sts.csv", "w", newline="") as file:
        csv.writer(file).writerows(pairs)
    code, out, err = invoke("eval", output, "--sts", tmp_path / "sts.csv", "--format", "json", "-q")
    assert code == 0, err
    model = SentenceTransformer(str(output), device="cpu")
    first, second = (torch.from_numpy(model.encode([p[side] for p in pairs])) for side in (0, 1))
    cosines = torch.nn.functional.cosine_similarity(first, second)
    expected = 100 * spearmanr(cosines, [p[2] for p in pairs]).statistic
    assert json.loads(out)["spearman"] == pytest.approx(expected, abs=1e-3)
