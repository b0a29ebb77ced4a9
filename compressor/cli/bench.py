"""`blr bench`: times of layers and kernels beside dense, torch.compile and other implementations."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from blr.compressor.cli import values
from blr.compressor.cli.bench_decode import decode
from blr.compressor.cli.bench_memory import memory
from blr.compressor.cli.bench_options import Seconds, counts, finish, words
from blr.compressor.cli.bench_prefill import prefill
from blr.compressor.cli.options import Device, Format, FormatOption, Quiet

bench_app = typer.Typer(
    help="Time layers and kernels against dense and other implementations.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

LARGE, SMALL = ("llama-7b", "1,1024,4096"), ("gpt2-s", "1,64")  # models and tokens, the latter on a CPU

PeerOption = Annotated[
    list[Path] | None,
    typer.Option(
        callback=values.place,
        help="Python file or package folder to time beside ours, run as a program: its function "
        "blr_peer() returns a dict of f(x, *factors) by structure (svd, monarch, blast, ks). "
        "Repeatable.",
    ),
]
OutputOption = Annotated[
    Path | None,
    typer.Option(
        *("--output", "-o"),
        callback=values.place,
        help="Folder for results.json, results.csv and plots.",
    ),
]
EnergyOption = Annotated[
    bool, typer.Option("--energy/--no-energy", help="Joules a call; half a second more for each arm.")
]


@bench_app.command("layers")
def layers(
    models: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated, of configs/bench-shapes.yaml.",
            show_default=f"{LARGE[0]}; {SMALL[0]} on a CPU",
        ),
    ] = None,
    structures: Annotated[str, typer.Option(help="Some of svd,monarch,blast,ks.")] = (
        "svd,monarch,blast,ks"
    ),
    n: Annotated[
        str | None,
        typer.Option(
            "--n",
            help="Tokens, comma-separated.",
            show_default=f"{LARGE[1]}; {SMALL[1]} on a CPU",
        ),
    ] = None,
    dtype: Annotated[str, typer.Option(help="float32, tf32, float16 or bfloat16.")] = "bfloat16",
    cf: Annotated[
        float | None,
        typer.Option(
            callback=values.factor,
            help="Compression factor.",
            show_default="the model's published one",
        ),
    ] = None,
    blocks: Annotated[
        str | None,
        typer.Option(help="Blocks of Monarch and BLAST.", show_default="published; BLAST also 4,8,16"),
    ] = None,
    peer: PeerOption = None,
    repeats: Annotated[
        int, typer.Option(min=1, callback=values.count, help="Samples of each arm.")
    ] = 10,
    seconds: Seconds = None,
    compiling: Annotated[
        bool | None,
        typer.Option(
            "--compile/--no-compile",
            help="torch.compile arms, at the smallest and the largest n.",
            show_default="compile on a GPU",
        ),
    ] = None,
    energy: EnergyOption = False,
    output: OutputOption = None,
    device: Device = "auto",
    quiet: Quiet = False,
    format: FormatOption = Format.text,
) -> None:
    """Layers of published models: dense, plain torch, torch.compile, ours and peers, interleaved."""
    from blr.compressor.bench.peers import load_peers
    from blr.compressor.bench.plots import draw
    from blr.compressor.bench.precision import find_precision
    from blr.compressor.bench.results import Report, check_output, save
    from blr.compressor.bench.shapes import check_structures, find_layers, specs_for
    from blr.compressor.bench.summary import layers_summary, layers_text

    wanted, precision = words(structures), find_precision(dtype)
    grids = counts("--blocks", blocks) if blocks else ()
    check_structures(wanted)

    def chosen(usual: tuple[str, str]) -> tuple[list[str], list[int], list[Any]]:
        names, sizes = words(usual[0] if models is None else models), usual[1] if n is None else n
        layers = find_layers(names)
        return names, counts("--n", sizes), [(one, specs_for(one, wanted, grids, cf)) for one in layers]

    chosen(LARGE)  # whatever is wrong is told before torch is imported
    peers = load_peers(peer or ())
    if output is not None:
        check_output(output)
    from blr.compressor.base.progress import Progress

    progress = Progress(quiet)
    progress.loading()
    from blr.compressor.bench.session import Options, run_session

    options = Options(device, repeats, seconds, energy, compiling)
    names, tokens, found = chosen(SMALL if options.pick().type == "cpu" else LARGE)
    settings = {
        **{"models": names, "structures": wanted, "n": tokens, "dtype": dtype, "cf": cf},
        **{"blocks": grids, "repeats": repeats, "peers": [p.name for p in peers]},
    }
    report = Report("bench layers", settings)
    from blr.compressor.bench.layers import LayerBench

    def cases(runner: Any) -> list[Any]:
        compiled = {min(tokens), max(tokens)} if runner.compiling else ()
        bench = LayerBench(precision, runner, peers, sorted(compiled))
        return [bench.case(layer, specs, n) for layer, specs in found for n in tokens]

    code = run_session(report, options, [precision], cases, progress)
    finish(report, code, layers_summary(report.rows), layers_text, save, draw, output, format)


@bench_app.command("kernels")
def kernels(
    dtypes: Annotated[
        str, typer.Option(help="Some of float32,tf32,float16,bfloat16.")
    ] = "float32,tf32,bfloat16",
    batch: Annotated[
        int,
        typer.Option(
            min=1, callback=values.count, help="Rows of the input; the default is the paper's."
        ),
    ] = 25088,
    sample: Annotated[
        int, typer.Option(min=1, callback=values.count, help="Patterns of the stratified sample.")
    ] = 60,
    every: Annotated[bool, typer.Option("--all", help="All patterns of the paper's grid.")] = False,
    patterns: Annotated[
        str | None, typer.Option(help="These in place of the grid: '(1,48,48,4)(2,64,256,1)'.")
    ] = None,
    batch_last: Annotated[
        bool,
        typer.Option("--batch-last", help="Inputs [features, batch], the batch contiguous."),
    ] = False,
    peer: PeerOption = None,
    repeats: Annotated[int, typer.Option(min=1, callback=values.count, help="Samples of each arm.")] = 7,
    seconds: Seconds = None,
    energy: EnergyOption = False,
    output: OutputOption = None,
    device: Device = "auto",
    quiet: Quiet = False,
    format: FormatOption = Format.text,
) -> None:
    """Kronecker-sparse factors of the published grid: bmm, einsum, bsr, dense, ours and peers."""
    from blr.compressor.bench.patterns import grid
    from blr.compressor.bench.patterns import sample as sampled
    from blr.compressor.bench.peers import load_peers
    from blr.compressor.bench.plots import draw
    from blr.compressor.bench.precision import find_precision
    from blr.compressor.bench.results import Report, check_output, save
    from blr.compressor.bench.summary import patterns_summary, patterns_text
    from blr.compressor.structures.patterns import parse_each

    precisions = [find_precision(name) for name in words(dtypes)]
    whole = grid(batch) if patterns is None else list(parse_each(patterns))
    chosen = whole if every or patterns is not None else sampled(whole, sample)
    peers = load_peers(peer or ())
    if output is not None:
        check_output(output)
    settings = {
        **{"dtypes": words(dtypes), "batch": batch, "patterns": len(chosen), "of": len(whole)},
        **{"layout": "batch-last" if batch_last else "batch-first", "repeats": repeats},
        "peers": [p.name for p in peers],
    }
    report = Report("bench kernels", settings)
    from blr.compressor.base.progress import Progress

    progress = Progress(quiet)
    progress.loading()
    from blr.compressor.bench.kronecker import PatternBench
    from blr.compressor.bench.session import Options, run_session

    def cases(runner: Any) -> list[Any]:
        bench = PatternBench(batch, batch_last, runner, peers)
        return [bench.case(pattern, precision) for pattern in chosen for precision in precisions]

    options = Options(device, repeats, seconds, energy, compiling=False)
    code = run_session(report, options, precisions, cases, progress)
    finish(report, code, patterns_summary(report.rows), patterns_text, save, draw, output, format)


bench_app.command("decode")(decode)
bench_app.command("prefill")(prefill)
bench_app.command("memory")(memory)
