"""Python packages that only some commands need: a missing one is told before anything is imported."""

from __future__ import annotations

import sys
from importlib.util import find_spec

from blr.compressor.base.errors import CapabilityError


def is_missing(package: str) -> bool:
    """Whether `package` cannot be imported; nothing is."""
    if package in sys.modules:
        return sys.modules[package] is None
    return find_spec(package) is None


def check_packages(what: str, *packages: str, extra: str) -> None:
    """Raise CapabilityError where some of the `packages` that `what` needs are not installed. extra: of
    blr-compress, which installs them."""
    if missing := [package for package in packages if is_missing(package)]:
        is_ = "is" if len(missing) == 1 else "are"
        raise CapabilityError(
            f"{what}: {' and '.join(missing)} {is_} not installed; pip install 'blr-compress[{extra}]'"
        )
