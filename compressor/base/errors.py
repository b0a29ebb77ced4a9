"""Every failure `blr` reports on purpose, one exit code each.

A message is one line that says what was found (naming the file, key or tensor), what was
expected and what to do about it. Anything else that escapes is a bug in `blr` (exit code 1).
"""

from __future__ import annotations


class BlrError(Exception):
    """Base of all errors meant for the user; `exit_code` is what the command returns."""

    exit_code = 1


class UsageError(BlrError):
    """The command line asks for something that does not exist or does not fit together."""

    exit_code = 2


class RecipeError(BlrError):
    """A recipe that cannot be read or does not describe a valid compression."""

    exit_code = 3


class InputError(BlrError):
    """The source checkpoint, text or data set is missing, malformed or hostile."""

    exit_code = 4


class OutputError(BlrError):
    """The output folder, its lock or its journal cannot be used."""

    exit_code = 5


class StorageError(BlrError):
    """The disk is full or fails."""

    exit_code = 6


class NumericsError(BlrError):
    """NaN, Inf, a decomposition that fails, or a loss of over one nat a token without --force."""

    exit_code = 7


class HubError(BlrError):
    """The model hub cannot be reached or refuses."""

    exit_code = 8


class CapabilityError(BlrError):
    """This machine lacks the memory, device or software for what was asked."""

    exit_code = 9


class LostProcess(CapabilityError):
    """Another process of the run is gone, or does not answer."""


class VerifyError(BlrError):
    """An output does not match its manifest."""

    exit_code = 10


def kind_of_error(code: int) -> type[BlrError]:
    """The kind of error that another process of `blr` ended with, CapabilityError for any other code."""
    kinds = (BlrError, UsageError, RecipeError, InputError, OutputError, StorageError, NumericsError)
    known = {kind.exit_code: kind for kind in (*kinds, HubError, VerifyError)}
    return known.get(code, CapabilityError)
