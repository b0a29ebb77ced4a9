"""Spreads tasks over processes, and outlives those that a task ends or breaks."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

Task = Callable[[], Iterator[Any]]
Outcome = tuple[Task, list[Any], str]  # what it was, what it gave, why it ended early if it did


def serve(connection: Connection, setup: Callable[[], None]) -> None:
    """Run tasks that come until None does, or one raises: the process may then be unusable (a kernel
    that breaks the device's context breaks it for the process)."""
    setup()
    while (task := connection.recv()) is not None:
        found: list[Any] = []
        broken = ""
        try:
            for each in task():
                found.append(each)
        except Exception as error:
            broken = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        connection.send((found, broken))
        if broken:
            return


def run_tasks(tasks: Sequence[Task], processes: int, setup: Callable[[], None]) -> Iterator[Outcome]:
    """Outcomes of all tasks as they come; each process is replaced when a task ends it.

    Args:
        tasks: picklable. setup: called first in every process.
    """
    context = multiprocessing.get_context("spawn")
    waiting, working = list(tasks), {}

    def hire() -> None:
        ours, theirs = context.Pipe()
        process = context.Process(target=serve, args=(theirs, setup), daemon=True)
        process.start()
        theirs.close()
        give(ours, process)

    def give(connection: Connection, process: Any) -> None:
        task = waiting.pop(0) if waiting else None
        connection.send(task)
        if task is not None:
            working[connection] = (process, task)

    for _ in range(min(processes, len(waiting))):
        hire()
    while working:
        for connection in wait(list(working)):
            process, task = working.pop(connection)
            try:
                found, broken = connection.recv()
            except EOFError:
                process.join()
                found, broken = [], f"the process ended with code {process.exitcode}"
            yield task, found, broken
            if not broken:
                give(connection, process)
            elif waiting:
                hire()
