"""Options that several commands share, and how results are printed."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from blr.compressor.base.quoting import printable_all
from blr.compressor.cli import values
from blr.compressor.output.loss_messages import told

WINDOW = 512  # tokens of a window that texts are judged in, where the model has so many positions


class Format(StrEnum):
    """How results are printed."""

    text = "text"
    json = "json"


Model = Annotated[
    str,
    typer.Argument(
        callback=values.name,
        help="A checkpoint folder, a hub id (owner/name) or a short name (llama-7b).",
    ),
]
Checkpoint = Annotated[
    str, typer.Argument(callback=values.name, help="A checkpoint folder or a hub id.")
]
Output = Annotated[str, typer.Argument(callback=values.name, help="A folder that blr wrote.")]
OutputFolder = Annotated[
    Path, typer.Option("--output", "-o", callback=values.place, help="Folder to write.")
]
FormatOption = Annotated[Format, typer.Option("--format", help="text, or one JSON object.")]
StoredDtype = Annotated[
    str | None, typer.Option(help="Stored dtype of the factors.", show_default="the weight's own")
]
Device = Annotated[str, typer.Option(callback=values.device, help="auto, cpu, cuda or cuda:N.")]
Threads = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=1024,
        help="CPU threads to compute with.",
        show_default="OMP_NUM_THREADS, or the cores that affinity and quota leave",
    ),
]
Gpus = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=64,
        help="Processes to start on this host, one a GPU (on a CPU: with --device cpu).",
        show_default="1",
    ),
]
EvalWindow = Annotated[
    int | None,
    typer.Option(
        min=2,
        callback=values.count,
        help="Tokens a window of the texts.",
        show_default=f"{WINDOW}, or the model's most",
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress on standard error.")]
Verify = Annotated[
    bool,
    typer.Option(
        "--verify/--no-verify", help="Hash what is read of an output of blr, against its manifest."
    ),
]
Offline = Annotated[bool, typer.Option("--offline", help="Never open a socket.")]
Trust = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run modeling code found in the checkpoint.")
]

MaxShardSize = Annotated[str, typer.Option(help="Largest shard, as 500MB or 5GB.")]
Revision = Annotated[
    str | None, typer.Option(help="Branch, tag or commit on the hub.", show_default="main")
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an output folder that blr wrote.")]
Restart = Annotated[bool, typer.Option("--restart", help="Discard what an interrupted run left.")]
Check = Annotated[
    bool,
    typer.Option(
        "--check/--no-check", help="Run what was written, and measure its loss, before it is committed."
    ),
]
Force = Annotated[
    bool, typer.Option("--force", help="Write what loses over 1 nat a token of a decoder, too.")
]
AllowPickle = Annotated[
    bool, typer.Option("--allow-pickle", help="Read pytorch_model.bin (weights only).")
]
# What recipes say as well; one that is given wins.
RecipeOption = Annotated[
    str | None, typer.Option("--recipe", "-r", help="Shipped name or YAML file; options win.")
]
Method = Annotated[
    str | None,
    typer.Option(
        *("--method", "-m"),
        help="svd, monarch, blast, ks (Kronecker-sparse); dense, to --quantize.",
        show_default="svd; dense for --quantize alone",
    ),
]
Cf = Annotated[
    float | None,
    typer.Option(
        help="Compression factor of the replaced layers, over 1.", show_default="2 of a structure"
    ),
]
Rank = Annotated[int | None, typer.Option(help="Fixed rank in place of --cf.")]
Blocks = Annotated[
    int | None,
    typer.Option(help="Blocks b of Monarch and BLAST.", show_default="4 for Monarch, 16 for BLAST"),
]
Pattern = Annotated[
    str | None,
    typer.Option(
        help="Kronecker-sparse chain: '(1,192,48,2)(2,48,192,1)' or butterfly.",
        show_default="the least predicted error",
    ),
]
Pivot = Annotated[
    bool | None,
    typer.Option(
        "--pivot/--no-pivot",
        help="svd held by rows of its own: the same function in r(o + i - r) numbers.",
        show_default="no-pivot",
    ),
]
Heads = Annotated[
    str | None,
    typer.Option(help="Attention by svd: whole, grouped:G, per-head or auto.", show_default="whole"),
]
KvRank = Annotated[
    int | None,
    typer.Option(
        help="Rank of k and v, of each group of heads; the cache of keys and values then holds ranks.",
        show_default="none",
    ),
]
KvCf = Annotated[
    float | None,
    typer.Option(
        help="The same by how much smaller the cache becomes; 1 with --kv-quantize.",
        show_default="none",
    ),
]
KvQuantize = Annotated[
    str | None,
    typer.Option(
        help="int8, or int4 for the lesser three quarters: what such a cache holds its ranks in.",
        show_default="none",
    ),
]
Quantize = Annotated[
    str | None,
    typer.Option(
        help="int8, int4, int3, int2 or fp8: what dense weights are stored in, or --method's factors.",
        show_default="none; int4 of a correction",
    ),
]
Group = Annotated[
    int | None,
    typer.Option(help="Numbers that share a scale: 128, 64, 32.", show_default="128; a row of fp8"),
]
Couplings = Annotated[
    str | None,
    typer.Option(help="BLAST's couplings in int8, or none.", show_default="int8 of a correction"),
]
Base = Annotated[
    str | None,
    typer.Option(
        help="int2, int3, int4 or int8: dense weights stored so, which --method corrects.",
        show_default="none",
    ),
]
Bpw = Annotated[
    float | None,
    typer.Option(help="Bits a weight in all, in place of --rank: of a --base and its correction."),
]
TokensPerSecond = Annotated[
    float | None,
    typer.Option(
        help="In place of sizes: the most bits that decode one sequence so fast on --gpu (predicted)."
    ),
]
Include = Annotated[list[str] | None, typer.Option(help="Only modules matching this glob; repeatable.")]
Exclude = Annotated[
    list[str] | None, typer.Option(help="Not the modules matching this glob; repeatable.")
]
HERE = "this machine's, else h200"  # of the GPU that something is for
Gpu = Annotated[
    str | None,
    typer.Option(help="GPU that times are predicted for, as configs/gpus.yaml.", show_default=HERE),
]


def check_text(found: dict[str, Any] | None) -> str:
    """What running an output showed (`output/check.py`), as lines of a summary."""
    if found is None:
        return "check: not run, perplexity not measured"
    lost = [f"perplexity: {told(found)}"] if "loss" in found or "unmeasured" in found else []
    distance = f"{found['distance']:.4f} relative difference from its source's outputs"
    check = f"check: loaded and run on {found['ran']}, {distance} (0 identical, 1 unrelated)"
    return "\n".join([*lost, check])


def healed_text(summary: dict[str, Any]) -> list[str]:
    """Lines on a training (`commands/heal.py`); none on no training."""
    if not summary.get("steps"):
        return []
    speed = summary["tokens"] / max(summary["trained_seconds"], 1e-9)
    best = f"best after step {summary['best_step']:,}"
    if summary["best_step"] == 0:
        best = "nothing better than the start was found, which is what is written"
    lines = [
        f"trained: {summary['parameters']:,} parameters, {summary['steps']:,} steps, "
        f"{summary['tokens']:,} tokens, {speed:,.0f} a second; {best}"
    ]
    for name, before in summary["before"].items():
        after = summary["after"][name]
        if "distance" in before:
            lines.append(
                f"held-back {name}: 1 - cosine of the embeddings {before['distance']:.4f} -> "
                f"{after['distance']:.4f}, error of the hidden states {before['states']:.4f} -> "
                f"{after['states']:.4f}"
            )
            continue
        lines.append(
            f"held-back {'own text' if name == 'self' else name}: KL {before['kl']:.4f} -> "
            f"{after['kl']:.4f}, loss {before['student']:.4f} -> {after['student']:.4f} "
            f"(dense {before['teacher']:.4f})"
        )
    return lines


def print_result(result: dict[str, Any], text: Any, format: Format) -> None:
    """One JSON object, or `text` of the result with names that a terminal might obey escaped."""
    print(json.dumps(result) if format is Format.json else text(printable_all(result)))
