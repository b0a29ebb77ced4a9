"""The errors of the decoder. Each message has one line: found, expected, what to do."""

import threading

MODES = ("auto", "graph", "eager", "token")
OPS = ("triton", "torch")
CACHES = ("whole", "int8")  # what is kept of keys and values


class DecoderError(ValueError):
    """Base of the decoder's errors."""


class UnsupportedError(DecoderError):
    """The model, the device or the mode is not one that the decoder runs."""


class ContextError(DecoderError):
    """More tokens than the cache has slots for."""


class BatchError(DecoderError):
    """More rows than the decoder was made for, or rows of a shape it does not take."""


class BusyError(DecoderError):
    """A call from inside another one, whose caches it would overwrite."""


class StalledError(DecoderError):
    """A kernel whose programs wait for one another gave up."""


class Turn:
    """A lock that one thread holds as a context while others wait. Copies and pickles get their own.
    Raises BusyError where a thread enters it again, which would wait forever."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holder: int | None = None

    def __enter__(self) -> None:
        me = threading.get_ident()
        if self._holder == me:
            raise BusyError(
                "asked for another sequence while a token of one is handed on: expected one at a time; "
                "generate it before or after"
            )
        self._lock.acquire()
        self._holder = me

    def __exit__(self, *error: object) -> None:
        self._holder = None
        self._lock.release()

    def __reduce__(self) -> tuple[object, ...]:
        return Turn, ()
