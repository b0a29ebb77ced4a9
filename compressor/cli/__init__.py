"""The `blr` command: thin commands over library functions."""

from __future__ import annotations

import json
import os
import sys
from itertools import pairwise
from typing import Annotated, Any

import typer

from blr.compressor import __version__
from blr.compressor.cli import commands
from blr.compressor.errors import BlrError, UsageError

app = typer.Typer(
    name="blr",
    help="Turn Hugging Face checkpoints into smaller, structured ones.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("compress")(commands.compress)
app.command("eval")(commands.evaluate)
app.command("inspect")(commands.inspect)
app.command("generate")(commands.generate)
app.command("verify")(commands.verify)

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
    pass


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
        _fail(error, UsageError.exit_code, f"{error.format_message()} See `blr --help`.")
    except KeyboardInterrupt:
        _fail(KeyboardInterrupt(), 130, "interrupted")
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + 13)
    except Exception as error:
        message = f"{type(error).__name__}: {error}; this is a bug in blr, BLR_DEBUG=1 shows where"
        _fail(error, 1, message)


def _flush() -> None:
    sys.stdout.flush()


def _fail(error: BaseException, code: int, message: str | None = None) -> None:
    """One line on standard error (JSON on standard output too if asked for), then exit."""
    line = " ".join((message or str(error)).split())
    if os.environ.get("BLR_DEBUG") == "1":
        import traceback

        traceback.print_exception(error)
    if _wants_json(sys.argv):
        print(json.dumps({"error": line, "exit_code": code}))
    print(f"blr: error: {line}", file=sys.stderr)
    sys.exit(code)


def _wants_json(arguments: list[str]) -> bool:
    return "--format=json" in arguments or ("--format", "json") in pairwise(arguments)
