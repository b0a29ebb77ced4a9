"""How many CPU threads torch computes with: as many as this process has cores for, and none that spins.
Where threads of OpenMP share a core, one spins through the time that the other needs."""

import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Event

COUNTS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
SLEEP = {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0"}  # of the OpenMP of GCC, and of Intel's
ROOT = Path("/")


def use_threads(asked: int | None = None, sharing: int = 1) -> int:
    """Make torch compute with `asked` threads; by default OMP_NUM_THREADS, or the cores of this process
    over those `sharing` them. Returns the number, on which the last bits of results depend. Threads that
    wait sleep only if torch is imported after the first call."""
    torch = sys.modules.get("torch")
    if torch is None:
        number = asked or _from_environment() or max(1, available_cores() // sharing)
        os.environ.update(dict.fromkeys(COUNTS, str(number)))
        for name, value in SLEEP.items():
            os.environ.setdefault(name, value)
        return number
    number = asked or torch.get_num_threads()
    if asked is None and _from_environment() is None:
        number = min(number, max(1, available_cores() // sharing))
    torch.set_num_threads(number)
    return number


def on_one_thread(items: Sequence[str], compute: Callable[[str], None]) -> None:
    """Compute each item on one thread, as many at once as torch has threads: threads that share small
    products spend longer on waking each other. Behind an item that fails none begins; it raises."""
    import torch

    number, failed = torch.get_num_threads(), Event()

    def attempt(item: str) -> None:
        if failed.is_set():
            return
        try:
            compute(item)
        except BaseException:
            failed.set()
            raise

    torch.set_num_threads(1)  # also of threads that begin from here on
    try:
        with ThreadPoolExecutor(number) as pool:
            list(pool.map(attempt, items))
    finally:
        torch.set_num_threads(number)


def _from_environment() -> int | None:
    """What the user's environment asks for: "4", or "4,2" for nested regions."""
    for name in COUNTS:
        first = os.environ.get(name, "").split(",")[0].strip()
        if first.isascii() and first.isdigit() and int(first) > 0:
            return int(first)
    return None


def available_cores(root: Path = ROOT) -> int:
    """Physical cores that this process may keep busy, by affinity and CPU quotas of control groups."""
    if hasattr(os, "sched_getaffinity"):
        allowed = {_core(cpu, root) for cpu in os.sched_getaffinity(0)}
    else:
        allowed = set(map(str, range(os.cpu_count() or 1)))
    return max(1, int(min(len(allowed), *_quotas(root), math.inf)))


def _core(cpu: int, root: Path) -> str:
    """A name of the core that a logical CPU belongs to."""
    try:
        topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        return (topology / "thread_siblings_list").read_text().strip()
    except OSError:
        return str(cpu)


def _quotas(root: Path) -> Iterator[float]:
    """The quotas, in CPUs, of every control group that this process is in."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for controllers, path in (line.split(":", 2)[1:] for line in lines if line.count(":") > 1):
        if controllers == "" or "cpu" in controllers.split(","):
            yield from _along(root / "sys/fs/cgroup" / controllers, path)


def _along(base: Path, path: str) -> Iterator[float]:
    """The quotas of the group at `path` and those around it; a container may see its own at `base`."""
    parts = [part for part in path.split("/") if part]
    if ".." in parts:  # outside of what is visible here
        parts = []
    for depth in range(len(parts) + 1):
        with suppress(OSError, ValueError, ZeroDivisionError):  # no such group here, or no quota
            yield _quota(base.joinpath(*parts[:depth]))


def _quota(group: Path) -> float:
    if (group / "cpu.max").exists():
        quota, period = (group / "cpu.max").read_text().split()
    else:
        quota, period = ((group / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
    return math.inf if quota == "max" or int(quota) <= 0 else int(quota) / int(period)
