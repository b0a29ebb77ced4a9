"""Compresses one model by blr and by other packages at the same bits, and judges every output alike.

Usage: python run.py MODEL PYTHON RESULTS --calibration TEXT --text TEXT --text TEXT [--only NAME,NAME]
with `python` of the environment that has blr, and PYTHON of the one that has the peers. RESULTS is a
JSON file: rows that it has are not made again.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from blr.compressor.text.reading import read_calibration

PEERS = ("autoround", "awq", "gptq", "llamacpp", "hqq", "torchao")  # the slowest first
BITS = (2, 3, 4)
SEEDS = (0, 1)
RANK = 16
GROUP = "64"
BLR = (sys.executable, "-m", "blr.compressor")


@dataclass(frozen=True)
class Output:
    """What is made: by a peer's `package`, or by blr at a `rank` and `seed` (0 and 0 for a peer)."""

    package: str
    bits: int
    rank: int = 0
    seed: int = 0

    @property
    def name(self) -> str:
        """What names the row, as "blr-3-16-0"."""
        return "-".join(map(str, (self.package, self.bits, *self.ours)))

    @property
    def ours(self) -> tuple[int, ...]:
        """The rank and the seed of an output of blr; of a peer nothing."""
        return (self.rank, self.seed) if self.package == "blr" else ()


OURS = [Output("blr", bits, rank, seed) for bits in BITS for rank in (0, RANK) for seed in SEEDS]
OUTPUTS = [*(Output(package, bits) for package in PEERS for bits in BITS), *OURS]


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
        folder = self.work / output.name
        try:
            about = self._ours(output, folder) if output.ours else self._peer(output, folder)
            row = about | {"texts": self.judged(folder)}
        except (subprocess.SubprocessError, OSError, KeyError, ValueError) as error:
            said = getattr(error, "stderr", None) or str(error)
            print(f"{output.name}: {str(said).strip()[-600:]}", file=sys.stderr, flush=True)
            return
        with self.lock:
            self.rows[output.name] = row
            self.asked.results.write_text(json.dumps(self.rows, indent=1) + "\n")
        found = " ".join(f"{text['kl']:.4f}" for text in row["texts"].values())
        print(f"{output.name:16} {row['bits']:.3f} bits, KL {found}, {row['seconds']:.0f} s", flush=True)

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
        make = Path(__file__).with_name("make.py")
        self._run(
            self.asked.python, make, output.package, output.bits, self.asked.model, self.ids, folder
        )
        return dict(json.loads((folder / "peer.json").read_text()))

    def _ours(self, output: Output, folder: Path) -> dict[str, Any]:
        form = ["--quantize", f"int{output.bits}"]
        if output.rank:
            form = ["--base", f"int{output.bits}", "--method", "svd", "--rank", str(output.rank)]
        text = ["--text", self.asked.calibration, "--samples", self.asked.samples]
        text += ["--seq-len", self.asked.seq_len, "--seed", output.seed, "--group", GROUP, "--force"]
        start = time.perf_counter()
        said = self._run(
            *BLR, "compress", self.asked.model, *form, *text, "-o", folder, "--format", "json", "--quiet"
        )
        seconds = time.perf_counter() - start  # with libraries, the check and the loss
        return {"package": "blr", "version": "0.2.0", "bits": json.loads(said)["bits"]} | {
            "seconds": seconds,
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
            "tokens": torch.load(self.ids).numel(),
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
    parser.add_argument("--text", action="append", required=True)
    parser.add_argument("--only", default="")
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
    only = tuple(filter(None, asked.only.split(",")))
    with tempfile.TemporaryDirectory() as work, ThreadPoolExecutor(asked.jobs) as pool:
        bench = Bench(asked, Path(work))
        bench.judged(asked.model)  # keeps the dense model's states for the outputs
        lacking = [output for output in OUTPUTS if output.name not in bench.rows]
        list(pool.map(bench.add, [o for o in lacking if not only or o.name.startswith(only)]))


if __name__ == "__main__":
    main()
