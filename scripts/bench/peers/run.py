"""Compresses one model by blr and by other packages at the same bits, and judges every output alike.

Usage: python run.py MODEL PYTHON RESULTS --calibration TEXT --heal-text TEXT --text TEXT --text TEXT
with `python` of the environment that has blr, and PYTHON of the one that has the peers ("GPTQ as EoRA"
takes both from there). RESULTS is a JSON file: rows that it has are not made again.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from blr.compressor.text.reading import read_calibration

NAMES = {
    "autoround": "AutoRound",  # the slowest first
    "awq": "AWQ",
    "gptq": "GPTQ",
    "gptqmodel": "GPTQModel",
    "gptqmodel_eora": "GPTQModel and EoRA",
    "llamacpp": "llama.cpp",
    "llamacpp_iq": "llama.cpp IQ",
    "eora": "GPTQ as EoRA",
    "hqq": "HQQ",
    "torchao": "torchao",
}
FORMS = {"llamacpp": ("Q2_K", "Q3_K", "Q4_K"), "llamacpp_iq": ("IQ2_S", "IQ3_S", "IQ4_XS")}
CLOSED = {"svdllm": "as SVD-LLM", "asvd": "as ASVD"}  # our own restatements of what they publish
BITS = (2, 3, 4)
SEEDS = (0, 1)
CF = "1.5"
BLR = (sys.executable, "-m", "blr.compressor")
HEALING = ("--steps", "150", "--batch", "16384", "--mix", "0")
OWN_HEALING = ("--steps", "240", "--batch", "16384", "--own-tokens", "524288", "--lr", "0.005")


@dataclass(frozen=True)
class Output:
    """What is made: a line of the plot (`series`) and a `form` on it, by blr with `options` and a seed,
    then healed with the options `heal`, or by another `package`, which is told a `size` (bits or CF)."""

    series: str
    form: str
    options: tuple[str, ...] = ()
    seed: int | None = None
    package: str = "blr"
    size: str = ""
    heal: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """What names the row, as "blr, rank 16, int3, seed 0"."""
        return f"{self.series}, {self.form}" + ("" if self.seed is None else f", seed {self.seed}")


def ours(bits: int, rank: int = 0, grid: str = "uniform", own: bool = False) -> list[Output]:
    """blr in few bits, beside them low rank where it has a rank, once for each seed: fitted to the text,
    of which the model writes two thirds itself if `own`, and the same healed."""
    form: tuple[str, ...] = ("--quantize", f"int{bits}")
    if rank:
        form = ("--base", f"int{bits}", "--method", "svd", "--rank", str(rank))
    said = [f"rank {rank}"] * bool(rank) + [f"{grid} grid"] * (grid != "uniform")
    series = ", ".join(["blr", *said, *["own text"] * own])
    choice = ("--grid", grid) if bits == 3 else ()
    options = (*form, *choice, "--group", "64", *(("--mix", "0.67") if own else ()))
    healing = OWN_HEALING if own else HEALING
    return [
        Output(series + ", healed" * bool(heal), f"int{bits}", options, seed, heal=heal)
        for seed in SEEDS
        for heal in ((), healing)
    ]


def structured(method: str, called: str) -> list[Output]:
    """blr by one structure in 16 bits."""
    options = ("--method", method, "--cf", CF)
    return [Output(f"blr, {called}", f"CF {CF}", options, seed) for seed in SEEDS]


PEERS = [
    Output(said, form, package=package, size=str(n))
    for package, said in NAMES.items()
    for n, form in zip(BITS, FORMS.get(package, ("int2", "int3", "int4")), strict=True)
]
CLOSED_FORMS = [Output(said, f"CF {CF}", package=package, size=CF) for package, said in CLOSED.items()]
OURS = [  # the most wanted first
    *(row for own in (False, True) for bits in (3, 4, 2) for row in ours(bits, 0, own=own)),
    *(row for own in (False, True) for bits in (2, 3) for row in ours(bits, 16, own=own)),
    *(row for rank in (0, 16) for row in ours(3, rank, "curved")),
    *(*structured("svd", "low rank"), *structured("blast", "BLAST")),
    *(row for rank in (8, 4) for row in ours(2, rank)),
]
BY_TURNS = zip_longest([*PEERS, *CLOSED_FORMS], OURS)
OUTPUTS = [row for pair in BY_TURNS for row in pair if row is not None]


class Bench:
    """The outputs of one command, in a `work` folder that goes away."""

    def __init__(self, asked: argparse.Namespace, work: Path) -> None:
        self.asked, self.work, self.lock = asked, work, threading.Lock()
        self.rows: dict[str, Any] = {}
        if asked.results.exists():
            self.rows = json.loads(asked.results.read_text())
        given = {"samples": asked.samples, "seq_len": asked.seq_len, "packed": True}
        tokenizer = AutoTokenizer.from_pretrained(asked.model)
        self.ids = work / "ids.pt"
        torch.save(torch.cat(read_calibration(asked.calibration, tokenizer, **given).ids), self.ids)

    def add(self, output: Output) -> None:
        """Make, judge and keep one output; say why where that fails."""
        folder = (self.asked.keep or self.work) / output.name.replace(", ", "_").replace(" ", "-")
        try:
            about = self._ours(output, folder) if output.options else self._peer(output, folder)
            row = {"series": output.series, "form": output.form} | about | {"texts": self.judged(folder)}
        except (subprocess.SubprocessError, OSError, KeyError, ValueError) as error:
            said = getattr(error, "stderr", None) or str(error)
            print(f"{output.name}: {str(said).strip()[-600:]}", file=sys.stderr, flush=True)
            return
        with self.lock:
            self.rows[output.name] = row
            self.asked.results.write_text(json.dumps(self.rows, indent=1) + "\n")
        print(json.dumps({output.name: row}), flush=True)
        if self.asked.keep is None:
            shutil.rmtree(folder)

    def _run(self, *command: object) -> str:
        done = subprocess.run(
            list(map(str, command)),
            capture_output=True,
            text=True,
            check=True,
            timeout=self.asked.timeout,
        )
        return done.stdout

    def _peer(self, output: Output, folder: Path) -> dict[str, Any]:
        make, command = Path(__file__).with_name("make.py"), (output.package, output.size)
        python = sys.executable if output.package in CLOSED else self.asked.python
        self._run(python, make, *command, self.asked.model, self.ids, folder)
        about = dict(json.loads((folder / "peer.json").read_text()))
        return about | {"command": "make.py " + " ".join(command)}

    def _ours(self, output: Output, folder: Path) -> dict[str, Any]:
        text = ["--samples", self.asked.samples, "--seq-len", self.asked.seq_len, "--seed", output.seed]
        form = list(map(str, (*output.options, *text, "--text", self.asked.calibration, "--force")))
        fitted = folder.with_name(folder.name + ".fitted") if output.heal else folder
        start = time.perf_counter()
        said = self._run(
            *BLR, "compress", self.asked.model, *form, "-o", fitted, "--format", "json", "--quiet"
        )
        command = "blr compress " + " ".join(form)
        if output.heal:
            heal = [*output.heal, "--seed", str(output.seed), "--text", self.asked.heal_text, "--force"]
            self._run(
                *BLR, "heal", fitted, *heal, "--teacher", self.asked.model, "-o", folder, "--quiet"
            )
            shutil.rmtree(fitted)
            command += "; blr heal " + " ".join(heal)
        seconds = time.perf_counter() - start  # with libraries, the check and the loss
        return {"package": "blr", "version": "0.2.0", "bits": json.loads(said)["bits"]} | {
            "seconds": seconds,
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
            "tokens": torch.load(self.ids).numel(),
            "command": " ".join(Path(part).name if "/" in part else part for part in command.split()),
        }

    def judged(self, folder: Path) -> dict[str, Any]:
        """What `blr eval --against` finds on each text."""
        texts = [part for text in self.asked.text for part in ("--text", text)]
        given = ["--max-tokens", self.asked.max_tokens, "--keep-dense", self.work / "dense"]
        said = self._run(
            *BLR, "eval", folder, "--against", self.asked.model, *texts, *given, "--format", "json", "-q"
        )
        return {
            Path(text["text"]).stem: {
                "kl": text["against"]["kl"]["mean"],
                "kl_error": text["against"]["kl"]["error"],
                "agreement": text["against"]["agreement"],
                "perplexity": text["against"]["perplexities"]["output"],
                "tokens": text["against"]["kl"]["tokens"],
            }
            for text in json.loads(said)["texts"]
        }


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("python")
    parser.add_argument("results", type=Path)
    parser.add_argument("--calibration", required=True)
    parser.add_argument("--heal-text", required=True)
    parser.add_argument("--text", action="append", required=True)
    parser.add_argument("--only", default="", help="start of rows' names, apart by semicolons")
    parser.add_argument("--keep", type=Path, help="leave the outputs in this folder")
    for name, value in {
        "samples": 128,
        "seq-len": 512,
        "max-tokens": 65536,
        "jobs": 1,
        "timeout": 1800,
    }.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    return parser.parse_args()


def main() -> None:
    asked = parsed()
    os.environ["HF_HUB_OFFLINE"] = "1"
    only = tuple(filter(None, asked.only.split(";")))
    with tempfile.TemporaryDirectory() as work, ThreadPoolExecutor(asked.jobs) as pool:
        bench = Bench(asked, Path(work))
        bench.judged(asked.model)  # keeps the dense model's states for the outputs
        lacking = [output for output in OUTPUTS if output.name not in bench.rows]
        list(pool.map(bench.add, [o for o in lacking if not only or o.name.startswith(only)]))


if __name__ == "__main__":
    main()
