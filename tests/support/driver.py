"""A driver that notes what it is asked to launch: how a launch is done shows without a GPU."""

from __future__ import annotations

from typing import Any


class Compiled:
    """What Triton compiles, as far as replays know it."""

    function, packed_metadata = "function", "metadata"

    def __init__(self) -> None:
        self.ran: list[tuple[Any, ...]] = []

    def run(self, *arguments: Any) -> None:
        self.ran.append(arguments)

    def __getitem__(self, grid: Any) -> Any:
        return self.run  # the way of Triton
