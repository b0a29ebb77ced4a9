"""lm-eval's three types of requests on a compressed decoder, by its own class and by `blr eval`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from exporting import compress_to, export_to
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from pico import save_pico
from running import Invoke
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from blr.compressor import register

register()

PAIRS = [("The protocol is", " a set of rules"), ("A computer", " network")]


@pytest.fixture(scope="module", params=["compressed", "exported"])
def folder(request: pytest.FixtureRequest, tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("outputs")
    output = compress_to(tiny, folder / "compressed", method="svd", cf=1.25)
    return output if request.param == "compressed" else export_to(output, folder / "exported")


@pytest.fixture(scope="module")
def harness(folder: Path) -> Any:
    return HFLM(pretrained=str(folder), device="cpu", dtype="float32", batch_size=2)


def requests(kind: str, arguments: list[tuple[Any, ...]]) -> list[Instance]:
    return [Instance(kind, {}, given, number) for number, given in enumerate(arguments)]


def test_loglikelihoods(folder: Path, harness: Any) -> None:
    found = harness.loglikelihood(requests("loglikelihood", PAIRS), disable_tqdm=True)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for (context, continuation), (total, _) in zip(PAIRS, found, strict=True):
        start = len(tokenizer(context)["input_ids"])
        ids = torch.tensor(tokenizer(context + continuation)["input_ids"])
        with torch.no_grad():
            scores = model(ids[None]).logits[0].log_softmax(-1)
        expected = scores[start - 1 : -1].gather(1, ids[start:, None]).sum()
        assert total == pytest.approx(float(expected), rel=1e-4)


def test_rolling_and_generated(harness: Any) -> None:
    rolling = requests("loglikelihood_rolling", [(context + more,) for context, more in PAIRS])
    assert all(total < 0 for total in harness.loglikelihood_rolling(rolling, disable_tqdm=True))
    until = {"until": ["\n"], "max_gen_toks": 8, "do_sample": False}
    asked = requests("generate_until", [(context, dict(until)) for context, _ in PAIRS])
    texts = harness.generate_until(asked, disable_tqdm=True)
    assert len(texts) == len(PAIRS) and all(isinstance(text, str) for text in texts)
    assert texts == harness.generate_until(asked, disable_tqdm=True)


TASK = """
task: networks
dataset_path: json
dataset_kwargs: {data_files: {validation: FILE}}
output_type: multiple_choice
validation_split: validation
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: acc}]
"""
DOCUMENTS = [
    {"question": "The protocol is", "choices": ["a set of rules", "zq xv jk"], "answer": 0},
    {"question": "A computer", "choices": ["qqq zzz", "network"], "answer": 1},
    {"question": "The file is", "choices": ["xjw", "stored on the disk"], "answer": 1},
]


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    """A folder with one task whose data lies beside it."""
    (tmp_path / "tasks").mkdir()
    rows = tmp_path / "tasks" / "documents.jsonl"
    rows.write_text("".join(f"{json.dumps(document)}\n" for document in DOCUMENTS))
    (tmp_path / "tasks" / "networks.yaml").write_text(TASK.replace("FILE", str(rows)))
    return tmp_path / "tasks"


def best(model: Any, tokenizer: Any, document: dict[str, Any]) -> int:
    """The choice that a model gives the most probability behind the question."""
    start, totals = len(tokenizer(document["question"])["input_ids"]), []
    for choice in document["choices"]:
        ids = torch.tensor(tokenizer(f"{document['question']} {choice}")["input_ids"])
        with torch.no_grad():
            scores = model(ids[None]).logits[0].log_softmax(-1)
        totals.append(float(scores[start - 1 : -1].gather(1, ids[start:, None]).sum()))
    return max(range(len(totals)), key=totals.__getitem__)


def test_eval_of_a_task_of_ones_own(folder: Path, tasks: Path, sample: Path, invoke: Invoke) -> None:
    options = ("--tasks", "networks", "--tasks-path", tasks, "--format", "json", "-q")
    text = ("--text", sample, "--max-tokens", "256", "--window", "128")
    code, out, err = invoke("eval", folder, *options, *text)
    assert code == 0, err
    found = json.loads(out.splitlines()[-1])
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    right = [best(model, tokenizer, document) == document["answer"] for document in DOCUMENTS]
    assert found["tasks"]["networks"]["acc"] == pytest.approx(sum(right) / len(right))
    assert found["samples"] == {"networks": len(DOCUMENTS)} and found["perplexity"] > 1
    code, out, err = invoke("eval", folder, *options[:4], "--limit", "2", "-q")
    row = next(line for line in out.splitlines() if line.startswith("networks"))
    assert code == 0 and row.split()[1] == "acc" and row.split()[-1] == "2"


def test_items_are_compared_with_the_dense_model(
    folder: Path, tiny: Path, tasks: Path, invoke: Invoke
) -> None:
    options = ("--tasks", "networks", "--tasks-path", tasks, "--against", tiny, "-q")
    code, out, err = invoke("eval", folder, *options, "--format", "json")
    assert code == 0, err
    found = json.loads(out.splitlines()[-1])
    tokenizer = AutoTokenizer.from_pretrained(folder)
    right = [
        [best(model, tokenizer, document) == document["answer"] for document in DOCUMENTS]
        for model in (
            AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32).eval()
            for place in (tiny, folder)
        )
    ]
    far, pairs = found["tasks_against"], list(zip(*right, strict=True))
    assert far["dense"]["networks"]["acc"] == pytest.approx(sum(right[0]) / 3)
    assert far["recovery"]["networks"]["acc"] == pytest.approx(100 * sum(right[1]) / sum(right[0]))
    lost, gained = pairs.count((True, False)), pairs.count((False, True))
    assert (far["lost"], far["gained"]) == ({"networks": lost}, {"networks": gained})
    code, out, err = invoke("eval", folder, *options)
    head = next(line for line in out.splitlines() if line.startswith("task "))
    assert head.split()[-4:] == ["dense", "recovery", "lost", "gained"], err


def test_a_task_that_does_not_exist_is_named(tiny: Path, tasks: Path, invoke: Invoke) -> None:
    code, out, err = invoke("eval", tiny, "--tasks", "no-such", "--tasks-path", tasks, "-q")
    assert (code, out) == (4, "") and "'no-such'" in err.splitlines()[-1]


@pytest.mark.parametrize("name", ["llama", "gpt2", "t5"])
def test_the_backend_is_that_of_the_native_type(name: str, tmp_path: Path) -> None:
    """Causal, or a sequence to a sequence: found by the model type."""
    output = compress_to(save_pico(name, tmp_path / "dense"), tmp_path / "out", method="svd")
    found = []
    for folder in (tmp_path / "dense", output):
        harness = HFLM.__new__(HFLM)
        harness._get_backend(AutoConfig.from_pretrained(folder), backend="default")
        found.append(harness.backend)
    assert found == ["seq2seq" if name == "t5" else "causal"] * 2
