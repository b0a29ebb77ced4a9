"""accelerate's offload and transformers' Trainer take structured models as any other."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import bare
import pytest
import torch
from exporting import compress_to
from peft import LoraConfig, get_peft_model
from pico import VOCAB, save_pico
from running import Invoke
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    Trainer,
    TrainingArguments,
    default_data_collator,
)

from blr.compressor import register

register()

METHODS = {"svd": {}, "monarch": {"blocks": 4}, "blast": {"blocks": 4, "rounds": 1}, "ks": {}}
IDS = torch.arange(2, 26).view(2, 12) % VOCAB


@pytest.fixture(scope="module")
def compressed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("compressed")
    source = save_pico("llama", folder / "dense")
    return {m: compress_to(source, folder / m, method=m, cf=1.5, **METHODS[m]) for m in METHODS}


def on_cpu(model: Any, folder: Path) -> Any:
    return accelerate.cpu_offload(model, execution_device=torch.device("cpu"))


def on_disk(model: Any, folder: Path) -> Any:
    return accelerate.disk_offload(model, str(folder), execution_device=torch.device("cpu"))


def half_on_disk(model: Any, folder: Path) -> Any:
    layers = {f"model.layers.{n}": "disk" if n else "cpu" for n in range(2)}
    rest = dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), "cpu")
    return AutoModelForCausalLM.from_pretrained(
        model.name_or_path, device_map={**layers, **rest}, offload_folder=str(folder)
    )


@pytest.mark.parametrize("offload", [on_cpu, on_disk, half_on_disk])
@pytest.mark.parametrize("method", METHODS)
def test_offloaded_models_compute_the_same(
    method: str, offload: Callable[[Any, Path], Any], compressed: dict[str, Path], tmp_path: Path
) -> None:
    model = AutoModelForCausalLM.from_pretrained(compressed[method]).eval()
    with torch.no_grad():
        expected = model(IDS).logits
        torch.testing.assert_close(offload(model, tmp_path)(IDS).logits, expected)


def train(folder: Path, output: Path, steps: int, resume: bool = False) -> Any:
    """A model after `steps` in all, its states saved on the way."""
    rows = [
        {"input_ids": row, "labels": row}
        for row in torch.randint(2, VOCAB, (16, 12), generator=torch.Generator().manual_seed(0))
    ]
    options = {
        "max_steps": steps,
        "save_steps": 2,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
    }
    quiet = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "logging_strategy": "no"}
    arguments = TrainingArguments(str(output), per_device_train_batch_size=4, seed=0, **options, **quiet)
    model = AutoModelForCausalLM.from_pretrained(folder)
    trainer = Trainer(model, arguments, train_dataset=rows)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


@pytest.mark.parametrize("method", ["blast", "ks"])
def test_trainer_resumes_and_saves(
    method: str, compressed: dict[str, Path], tmp_path: Path, invoke: Invoke
) -> None:
    """Its states, and what it saves, are folders that load, verify and export."""
    whole = train(compressed[method], tmp_path / "whole", 4).model.state_dict()
    train(compressed[method], tmp_path / "halves", 2)
    trainer = train(compressed[method], tmp_path / "halves", 4, resume=True)
    torch.testing.assert_close(trainer.model.state_dict(), whole)
    before = AutoModelForCausalLM.from_pretrained(compressed[method]).state_dict()
    assert not any(whole[name].equal(before[name]) for name in whole if "layers" in name)
    trainer.save_model(str(tmp_path / "saved"))
    for folder in (tmp_path / "saved", tmp_path / "halves" / "checkpoint-4"):
        torch.testing.assert_close(AutoModelForCausalLM.from_pretrained(folder).state_dict(), whole)
        assert invoke("verify", folder)[0] == 0
    assert invoke("export", tmp_path / "saved", "-o", tmp_path / "export", "--quiet")[0] == 0


# Loads with the code in the folder alone; prints the loss
REMOTE = (
    bare.without("blr")
    + """
import json
import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments, default_data_collator
folder, output, ids = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
options = {"report_to": [], "use_cpu": True, "label_smoothing_factor": 0.1}
rows = [{"input_ids": row, "labels": row} for row in json.loads(ids)]
trainer = Trainer(model, TrainingArguments(output, **options))
with torch.no_grad():
    print(float(trainer.compute_loss(model, default_data_collator(rows))))
"""
)


def smoothed(model: Any, output: Path) -> float:
    """Trainer's loss with smoothed labels."""
    options = {"report_to": [], "use_cpu": True, "label_smoothing_factor": 0.1}
    rows = [{"input_ids": row, "labels": row} for row in IDS.tolist()]
    trainer = Trainer(model.eval(), TrainingArguments(str(output), **options))
    with torch.no_grad():
        return float(trainer.compute_loss(model, default_data_collator(rows)))


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen2", "bert-mlm"])
def test_smoothed_labels_are_those_of_the_native_class(name: str, tmp_path: Path) -> None:
    """Shifted for causal language models alone; of full rank, so that the losses are the same."""
    auto = AutoModelForMaskedLM if name == "bert-mlm" else AutoModelForCausalLM
    source = save_pico(name, tmp_path / "dense")
    output = compress_to(source, tmp_path / "out", method="svd", rank=64)
    expected = smoothed(auto.from_pretrained(source), tmp_path / "run")
    model = auto.from_pretrained(output)
    assert smoothed(model, tmp_path / "run") == pytest.approx(expected, abs=1e-4)
    if name == "llama":
        with_adapter = get_peft_model(model, LoraConfig(target_modules=["q_proj"]))
        assert smoothed(with_adapter, tmp_path / "run") == pytest.approx(expected, abs=1e-4)
        done = bare.run(REMOTE, output, tmp_path / "run", json.dumps(IDS.tolist()))
        assert done.returncode == 0, done.stderr
        assert float(done.stdout.splitlines()[-1]) == pytest.approx(expected, abs=1e-4)
