"""Every failure `blr` reports on purpose, one exit code each. A message is one line: what was found
(file, key or tensor), what was expected and what to do. Anything else that escapes is a bug (1)."""


class BlrError(Exception):
    """Base of all errors meant for the user; `exit_code` is what the command returns."""

    exit_code = 1

    def __init_subclass__(cls, code: int | None = None) -> None:
        cls.exit_code = cls.exit_code if code is None else code


class UsageError(BlrError, code=2):
    """The command line asks for something that does not exist or does not fit together."""


class RecipeError(BlrError, code=3):
    """A recipe that cannot be read or does not describe a valid compression."""


class InputError(BlrError, code=4):
    """The source checkpoint, text or data set is missing, malformed or hostile."""


class OutputError(BlrError, code=5):
    """The output folder, its lock or its journal cannot be used."""


class StorageError(BlrError, code=6):
    """The disk is full or fails."""


class NumericsError(BlrError, code=7):
    """NaN, Inf, a decomposition that fails, or a loss of over one nat a token without --force."""


class HubError(BlrError, code=8):
    """The model hub cannot be reached or refuses."""


class CapabilityError(BlrError, code=9):
    """This machine lacks the memory, device or software for what was asked."""


class LostProcess(CapabilityError):
    """Another process of the run is gone, or does not answer."""


class VerifyError(BlrError, code=10):
    """An output does not match its manifest."""


def kind_of_error(code: int) -> type[BlrError]:
    """The kind of error that another process of `blr` ended with, CapabilityError for any other code."""
    kinds: list[type[BlrError]] = [*BlrError.__subclasses__(), BlrError]
    known = {kind.exit_code: kind for kind in kinds}
    return known.get(code, CapabilityError)
