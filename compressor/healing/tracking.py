"""`--track NAME`: logs a training to TensorBoard, Weights & Biases and others, by accelerate's
trackers."""

from collections.abc import Callable
from typing import Any

from blr.compressor.base.errors import CapabilityError, UsageError
from blr.compressor.base.exhaustion import is_missing
from blr.compressor.base.progress import Progress
from blr.compressor.base.quoting import first_line

NAMES = ("aim", "clearml", "comet_ml", "dvclive", "mlflow", "swanlab", "trackio", "wandb")
PACKAGES = {name: (name,) for name in NAMES} | {"tensorboard": ("tensorboard", "tensorboardX")}
FOLDER, PROJECT = "runs", "blr-heal"  # where trackers of files write; the project of those of servers


class Tracking:
    """Logs a run called `title` to the tracker `name` (of `check_tracker`); an empty name logs nothing.
    Raises CapabilityError for a tracker that does not start."""

    def __init__(self, name: str, title: str, progress: Progress) -> None:
        self.name, self.title, self.progress = name, title, progress
        self.tracker = self._made() if name else None

    def _made(self) -> object:
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS

        kind = LOGGER_TYPE_TO_CLASS[self.name]
        files = kind.requires_logging_directory
        tracker = kind(self.title, FOLDER) if files else kind(PROJECT)
        tracker.main_process_only = False  # only the first process has one
        try:
            tracker.start()
        except Exception as error:  # whatever a library of others does, without a network, say
            raise CapabilityError(
                f"--track {self.name}: does not start: {first_line(error, 200)}; set it up as its own "
                "documentation says, or leave --track out"
            ) from error
        return tracker

    def log(self, line: dict[str, Any]) -> None:
        """Log a line of metrics.jsonl."""
        self._tell(lambda tracker: tracker.log(dict(_flat(line)), step=line["step"]))

    def finish(self) -> None:
        """Let the tracker write what is left."""
        self._tell(lambda tracker: tracker.finish())

    def _tell(self, call: Callable[[Any], None]) -> None:
        """Call the tracker; after a failure it is not called again, and the run goes on."""
        try:
            if self.tracker is not None:
                call(self.tracker)
        except Exception as error:
            self.tracker = None
            self.progress.notes([f"--track {self.name} has failed: {first_line(error, 200)}"])


def check_installed(name: str) -> None:
    """Raise CapabilityError for a tracker of `PACKAGES` that is not installed, without importing it."""
    if name in PACKAGES and all(map(is_missing, PACKAGES[name])):
        raise CapabilityError(f"--track {name}: not installed; pip install {name}")


def check_tracker(name: str) -> None:
    """Raise UsageError for an unknown tracker, CapabilityError for one that is not installed."""
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers

    if name not in LOGGER_TYPE_TO_CLASS:
        raise UsageError(f"--track {name}: expected one of {', '.join(sorted(LOGGER_TYPE_TO_CLASS))}")
    if name not in [str(found) for found in get_available_trackers()]:
        raise CapabilityError(f"--track {name}: not installed; pip install {name}")


def _flat(line: dict[str, Any], prefix: str = "") -> Any:
    """The numbers of `line` under names like ``held/self/kl``."""
    for name, value in line.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}/")
        elif name != "step":
            yield f"{prefix}{name}", value
