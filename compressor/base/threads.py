"""How many CPU threads torch computes with: as many as this process has cores for, and none that spins.

Threads of OpenMP wait for each other by spinning. Where they share a core, with one another under a
container's quota or with other jobs, one spins through the time slice that the other needs: two
can be many times slower than one.
"""

import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

COUNTS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
SLEEP = {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0"}  # of the OpenMP of GCC, and of Intel's
ROOT = Path("/")


def use_threads(asked: int | None = None, sharing: int = 1) -> int:
    """Make torch compute with `asked` threads; by default OMP_NUM_THREADS, or the cores of this process
    over those `sharing` them. Returns the number, which the last bits of results depend on.

    Threads that wait sleep only if torch is imported after the first call.
    """
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
    """Compute each item on one thread, as many at once as torch has threads, which results do not
    depend on. Threads that share small products spend longer on waking each other. Behind an item that
    fails none begins, and its error is raised."""
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
    groups = [line.split(":", 2)[1:] for line in lines if line.count(":") > 1]
    for controllers, path in groups:
        base = root / "sys/fs/cgroup" / controllers
        if controllers == "":
            yield from _along(base, path, _quota2)
        elif "cpu" in controllers.split(","):
            yield from _along(base, path, _quota1)


def _along(base: Path, path: str, quota: Callable[[Path], float]) -> Iterator[float]:
    """The quotas of the group at `path` and those around it; a container may see its own at `base`."""
    parts = [part for part in path.split("/") if part]
    if ".." in parts:  # outside of what is visible here
        parts = []
    for depth in range(len(parts) + 1):
        try:
            yield quota(base.joinpath(*parts[:depth]))
        except (OSError, ValueError, ZeroDivisionError):
            continue  # no such group here, or none with a quota


def _quota2(folder: Path) -> float:
    quota, period = (folder / "cpu.max").read_text().split()
    return math.inf if quota == "max" else int(quota) / int(period)


def _quota1(folder: Path) -> float:
    quota = int((folder / "cpu.cfs_quota_us").read_text())
    return quota / int((folder / "cpu.cfs_period_us").read_text()) if quota > 0 else math.inf
