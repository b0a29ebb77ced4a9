"""Joules a call through NVML, where the driver has an energy counter."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from time import perf_counter
from typing import Any

import torch

SECONDS = 0.5  # the counter moves every 20 to 100 ms
QUEUED_MS = 20.0  # work queued before each wait, so that the GPU is not idle in between


class EnergyMeter:
    """The total energy counter of one GPU. `available` is False where there is none: no GPU, no
    `nvidia-ml-py`, or a driver without the counter."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.handle = device, None
        self.driver: str | None = None
        if device.type == "cuda":
            self._open()

    @property
    def available(self) -> bool:
        """Whether `joules` measures."""
        return self.handle is not None

    def joules(self, step: Callable[[], Any], calls: int, ms: float) -> float | None:
        """Energy of one call, the whole board's, or None where it cannot be measured.

        Args:
            step: runs `calls` calls of about `ms` milliseconds each; it is repeated for `SECONDS`.
        """
        if self.handle is None:
            return None
        torch.cuda.synchronize(self.device)
        before, started, steps = self._read(), perf_counter(), 0
        queued = max(int(QUEUED_MS / (ms * calls)), 1)
        while perf_counter() - started < SECONDS:
            for _ in range(queued):
                step()
            steps += queued
            torch.cuda.synchronize(self.device)
        return (self._read() - before) * 1e-3 / (steps * calls)

    def _open(self) -> None:
        with suppress(ImportError):
            import pynvml

            self.nvml = pynvml
            with suppress(pynvml.NVMLError):
                pynvml.nvmlInit()
                self.driver = str(pynvml.nvmlSystemGetDriverVersion())
                uuid = torch.cuda.get_device_properties(self.device).uuid
                handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
                pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
                self.handle = handle

    def _read(self) -> int:
        return self.nvml.nvmlDeviceGetTotalEnergyConsumption(self.handle)
