"""How a replay went over simulated time, in a bounded number of samples."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Sample", "Timeline"]

_MAX_SAMPLES = 4096


class Sample(NamedTuple):
    """The state after one step. ``hit_rate`` is that of all requests admitted so far."""

    seconds: float
    usage: float
    num_running: int
    num_waiting: int
    hit_rate: float


class Timeline:
    """Samples at even numbers of steps: when there are too many, every other one goes."""

    def __init__(self) -> None:
        self.samples: list[Sample] = []
        self._stride = 1

    def wants(self, step: int) -> bool:
        """Whether the step of this number is to be added. O(1)."""
        return step % self._stride == 0

    def add(self, sample: Sample) -> None:
        """O(1) amortised."""
        self.samples.append(sample)
        if len(self.samples) == _MAX_SAMPLES:
            del self.samples[1::2]
            self._stride *= 2
