"""Numbers that callers give, as plain ints and floats: NumPy's and the like convert, booleans and the rest don't."""

from __future__ import annotations

import math
import operator
from numbers import Real
from typing import Any

from .errors import ConfigError, KVPagerError

__all__ = ["MAX_BYTES", "MAX_COUNT", "as_count", "as_integer", "as_number"]

MAX_COUNT = 2**40
"""Every size and count is at most this: no sum or product of some of them overflows in the compiled part."""
MAX_BYTES = 2**62
"""The same for an amount of memory."""


def as_integer(value: Any, name: str, *, at_least: int | None = None, error: type[KVPagerError] = ConfigError) -> int:
    """``value`` as an int (of at least ``at_least``). Raises ``error``, which names it, for anything else."""
    try:
        if not isinstance(value, bool) and (at_least is None or operator.index(value) >= at_least):
            return operator.index(value)
    except TypeError:
        pass
    least = "" if at_least is None else f" of at least {at_least}"
    raise error(f"{name} must be an integer{least}, got {value!r}")


def as_count(
    value: Any, name: str, at_least: int = 0, *, at_most: int = MAX_COUNT, error: type[KVPagerError] = ConfigError
) -> int:
    """``value`` as an int of [at_least, at_most]. Raises ``error``, which names it, for anything else."""
    count = as_integer(value, f"{name}", at_least=at_least, error=error)
    if count > at_most:
        raise error(f"{name} must be an integer of at most {at_most} (2**{at_most.bit_length() - 1}), got {value!r}")
    return count


def as_number(value: Any, name: str, at_least: float = -math.inf, *, error: type[KVPagerError] = ConfigError) -> float:
    """``value`` as a finite float of at least ``at_least``. Raises ``error``, which names it, for anything else."""
    try:
        number = math.nan if isinstance(value, bool) or not isinstance(value, Real) else float(value)
    except OverflowError:  # an int beyond all floats
        number = math.inf
    if math.isfinite(number) and number >= at_least:
        return number
    least = "" if at_least == -math.inf else f" of at least {at_least:g}"
    raise error(f"{name} must be a finite number{least}, got {value!r}")
