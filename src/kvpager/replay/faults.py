"""What is wrong with a trace, collected and told together."""

from __future__ import annotations

import re

import msgspec

from ..errors import TraceError

__all__ = ["UNREADABLE", "Fault", "FaultList", "lines_before"]

UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What reading JSON or text raises where it can't."""

_MAX_LISTED = 10


class Fault(Exception):
    """What is wrong with one line; whoever catches it knows file and line number."""


class FaultList:
    """The faults of one file: collected, then raised together, the first ten with their lines."""

    def __init__(self, name: str, expected: str) -> None:
        self._name = name
        self._expected = expected
        self._faults: list[str] = []

    def __bool__(self) -> bool:
        return bool(self._faults)

    def add(self, line: int, fault: str) -> None:
        """Note a fault; the eleventh ends the reading.

        Raises ``TraceError`` then.
        """
        if len(self._faults) == _MAX_LISTED:
            self.raise_if_any(more=True)
        self._faults.append(f"line {line}: {fault}")

    def raise_if_any(self, *, more: bool = False) -> None:
        """Raises ``TraceError`` with the faults listed so far."""
        if not self._faults:
            return
        if len(self._faults) == 1:
            raise TraceError(f"{self._name}, {self._faults[0]}; expected {self._expected}")
        count = f"more than {_MAX_LISTED}" if more else str(len(self._faults))
        listed = "".join(f"\n  {fault}" for fault in self._faults)
        raise TraceError(f"{self._name} has {count} faulty places; expected {self._expected}{listed}")


def lines_before(text: bytes, error: Exception) -> int:
    """Line breaks before the place that a JSON error names: a byte, the text's end, or none (then 0)."""
    if "truncated" in str(error):
        return text.rstrip().count(b"\n")
    place = re.search(r"byte (\d+)", str(error))
    return text.count(b"\n", 0, int(place[1])) if place else 0
