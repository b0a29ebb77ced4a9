"""The `blr` command: thin commands over library functions."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from typing import Annotated, Any

import typer

from blr.compressor import __version__
from blr.compressor.cli import bench, commands, exporting, planning, tuning
from blr.compressor.cli.failure import report
from blr.compressor.errors import BlrError, CapabilityError, UsageError
from blr.kernels.common.mode import NO_TRITON, kernels_mode

app = typer.Typer(
    name="blr",
    help="Turn Hugging Face checkpoints into smaller, structured ones.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("compress")(commands.compress)
app.command("export")(exporting.export)
app.command("eval")(commands.evaluate)
app.command("inspect")(commands.inspect)
app.command("generate")(commands.generate)
app.command("verify")(commands.verify)
app.command("plan")(planning.plan)
app.command("tune")(tuning.tune)
app.add_typer(planning.recipes_app, name="recipes")
app.add_typer(bench.bench_app, name="bench")

_UsageException: Any = typer.BadParameter.__bases__[0]  # click's, wherever this typer keeps it


def _version(show: bool) -> None:
    if show:
        print(f"blr {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    _check_kernels()


def _check_kernels() -> None:
    """Refuse a BLR_KERNELS that cannot be followed before any work."""
    try:
        mode = kernels_mode()
    except RuntimeError as error:
        raise UsageError(str(error)) from error
    if mode == "triton" and find_spec("triton") is None:
        raise CapabilityError(NO_TRITON)


def main() -> None:
    """Entry point: runs a command and turns every outcome into an exit code.

    `BlrError` becomes its own code and one line; a bug becomes 1, with the traceback only under
    BLR_DEBUG=1; Ctrl-C becomes 130.
    """
    try:
        code = app(standalone_mode=False)
        _flush()
        sys.exit(code if isinstance(code, int) else 0)
    except BlrError as error:
        _fail(error, error.exit_code)
    except _UsageException as error:
        _fail(
            error,
            UsageError.exit_code,
            f"{error.format_message() or 'No command given.'} See `blr --help`.",
        )
    except KeyboardInterrupt:
        _fail(KeyboardInterrupt(), 130, "interrupted")
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + 13)
    except MemoryError as error:
        _fail(error, CapabilityError.exit_code, "out of memory; free some or take a larger machine")
    except Exception as error:
        message = f"{type(error).__name__}: {error}; this is a bug in blr, BLR_DEBUG=1 shows where"
        _fail(error, 1, message)


def _flush() -> None:
    sys.stdout.flush()


def _fail(error: BaseException, code: int, message: str | None = None) -> None:
    """Report on one line, after the traceback if BLR_DEBUG=1 asks for it, and exit."""
    if os.environ.get("BLR_DEBUG") == "1":
        import traceback

        traceback.print_exception(error)
    report(message or str(error), code)
    sys.exit(code)
