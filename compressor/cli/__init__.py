"""The `blr` command: thin commands over library functions."""

from __future__ import annotations

import io
import os
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import redirect_stdout, suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from blr.compressor import __version__
from blr.compressor.base import process_environment as environment
from blr.compressor.base.errors import BlrError, CapabilityError, InputError, StorageError, UsageError
from blr.compressor.base.exhaustion import is_panic, raise_exhausted, unforeseen
from blr.compressor.base.variables import check_variables, wrong_variable
from blr.compressor.cli import making, models, outputs, planning, streams, timing
from blr.compressor.cli.options import OptionalValues
from blr.compressor.cli.signals import end_member
from blr.compressor.cli.streams import report
from blr.compressor.cli.sweep import sweep
from blr.compressor.runtime.failures import MODES
from blr.compressor.workspace.ownership import absolute
from blr.kernels.common.mode import NO_TRITON, kernels_mode, setting

FIRST_SAYS = 2.0  # seconds
HARMLESS = "Attempting to run cuBLAS, but there was no current CUDA context"  # torch's, in a thread that
# computes gradients and has launched kernels of ours only: it then sets the context, as it should

START = """blr makes Hugging Face checkpoints smaller. Three commands to start with:

  blr compress MODEL --text TEXT -o small     make it smaller; TEXT is like what it will read
  blr heal small --text TEXT -o healed        train it to answer as the dense model does
  blr eval healed --text OTHER                measure its perplexity on a text

Then: blr export healed -o fast. All commands: blr --help. Guides: recipes/guides/."""

app = typer.Typer(
    name="blr",
    help="Turn Hugging Face checkpoints into smaller, structured ones.",
    invoke_without_command=True,
    add_completion=True,
    rich_markup_mode="rich",  # help in panels; a help text may have no square brackets, its markup
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("compress", cls=OptionalValues)(making.compress)
app.command("heal")(making.heal)
app.command("export")(making.export)
app.command("eval")(models.evaluate)
app.command("inspect")(outputs.inspect)
app.command("generate")(models.generate)
app.command("verify")(outputs.verify)
app.command("push")(outputs.push)
app.command("plan", cls=OptionalValues)(planning.plan)
app.command("sweep")(sweep)
app.command("tune")(timing.tune)
app.add_typer(planning.recipes_app, name="recipes")
app.add_typer(timing.bench_app, name="bench")

_UsageException: Any = typer.BadParameter.__bases__[0]  # click's, wherever this typer keeps it


def _version(show: bool) -> None:
    if show:
        print(f"blr {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        print(START, file=sys.stderr)
        raise typer.Exit(UsageError.exit_code)
    check_variables()
    _check_kernels()
    absolute(Path())  # MKL ends without a word of blr where the current folder was removed
    named = os.path.expanduser(os.environ.get("BLR_TEXT_DIR") or "/")
    if named != "off" and not os.path.isabs(named):
        raise UsageError(f"BLR_TEXT_DIR is {named!r}: expected the whole path of a folder, or off")


@cache
def command() -> Callable[..., object]:
    """The command with the options of all its commands, which take a while to collect."""
    return typer.main.get_command(app)


def _check_kernels() -> None:
    """Refuse a BLR_KERNELS or BLR_DECODE that cannot be followed before any work."""
    try:
        mode = kernels_mode()
        setting("BLR_DECODE", MODES)
        if {"BLR_TRANSIENT", "BLR_COMPILED"} & os.environ.keys():  # what reads them imports torch
            from blr.kernels.common.inlining import compiled_form
            from blr.kernels.common.transient import transient_bytes

            transient_bytes()
            compiled_form()
    except RuntimeError as error:
        raise UsageError(str(error)) from error
    if mode == "triton" and find_spec("triton") is None:
        raise CapabilityError(NO_TRITON)


def main() -> None:
    """Entry point: runs a command and turns every outcome into an exit code. `BlrError` becomes its own
    code and one line, a bug 1 (traceback under BLR_DEBUG=1), Ctrl-C 130, a reader that left 141."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    warnings.filterwarnings("ignore", message=HARMLESS)
    try:
        streams.prepare()
        code = command()(prog_name="blr", standalone_mode=False)
        sys.stdout.flush()
        sys.exit(code if isinstance(code, int) else 0)
    except BlrError as error:
        _fail_of_variable(error)
        _fail(error, error.exit_code)
    except _UsageException as error:
        if error.ctx is not None and error.message.startswith("Missing command"):
            with redirect_stdout(sys.stderr):
                error.ctx.get_help()
            sys.exit(UsageError.exit_code)
        said = error.format_message().rstrip(".?") or "No command given"
        called = "blr" if error.ctx is None else error.ctx.command_path
        _fail(error, UsageError.exit_code, f"{said}; see `{called} --help`")
    except KeyboardInterrupt:
        _fail(KeyboardInterrupt(), 130, "interrupted")
    except (streams.ReaderGone, BrokenPipeError):
        streams.silence_results()
        streams.let_go()
        sys.exit(128 + 13)
    except Exception as error:
        _fail_unforeseen(error)
    except BaseException as error:
        if not is_panic(error):
            raise
        reason = "the tokenizer gave up in the middle of a text"
        _fail(error, InputError.exit_code, f"{reason} ({error}); take the one of the model's repository")


def _fail_unforeseen(error: Exception) -> NoReturn:
    """Report an error that no code of blr raises: want of memory, a library's variable, or a bug."""
    try:
        raise_exhausted(error)
    except CapabilityError as lack:
        _fail(error, lack.exit_code, str(lack))
    if isinstance(error, OSError) and (found := unforeseen(error)):
        _fail(error, found.exit_code, str(found))
    _fail_of_variable(error)
    message = f"{type(error).__name__}: {error}; this is a bug in blr, BLR_DEBUG=1 shows where"
    _fail(error, 1, message)


def _fail_of_variable(error: BaseException) -> None:
    """Report a variable of the environment that a library could not read, if that is the cause."""
    if said := wrong_variable(error, isinstance(error, BlrError)):
        _fail(error, UsageError.exit_code, said)


def _fail(error: BaseException, code: int, message: str | None = None) -> NoReturn:
    """Report on one line, after the traceback if BLR_DEBUG=1 asks for it, and exit."""
    if os.environ.get("BLR_DEBUG") == "1":
        import traceback

        traceback.print_exception(error)
    streams.let_go()
    if not environment.is_first() and not environment.is_started_by_us():
        time.sleep(FIRST_SAYS)
    with suppress(streams.ReaderGone, StorageError, OSError):
        report(message or str(error), code)
        sys.stdout.flush()
    streams.let_go()
    end_member(code)
    sys.exit(code)
