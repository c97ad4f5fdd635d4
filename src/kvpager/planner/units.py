"""Sizes as people write them: ``80GiB``, ``128k`` tokens; and back."""

from __future__ import annotations

import re

from ..errors import ConfigError

__all__ = ["format_bytes", "format_tokens", "parse_bytes", "parse_tokens"]

_BYTE_UNITS = {
    "": 1, "b": 1,
    "k": 1024, "ki": 1024, "kib": 1024, "m": 1024**2, "mi": 1024**2, "mib": 1024**2,
    "g": 1024**3, "gi": 1024**3, "gib": 1024**3, "t": 1024**4, "ti": 1024**4, "tib": 1024**4,
    "kb": 1000, "mb": 1000**2, "gb": 1000**3, "tb": 1000**4,
}  # fmt: skip
_TOKEN_UNITS = {"": 1, "k": 1024, "m": 1024**2}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*")


def parse_bytes(text: str) -> int:
    """Bytes in ``80GiB`` or ``80Gi`` (2**30 each), ``80GB`` (10**9 each) or a plain number. Raises ``ConfigError``."""
    return _parse(text, _BYTE_UNITS, "a size such as 80GiB, 500MB or a number of bytes")


def parse_tokens(text: str) -> int:
    """Tokens in ``8k`` (1024 each), ``1m`` or a plain number. Raises ``ConfigError``."""
    return _parse(text, _TOKEN_UNITS, "a length such as 8k, 1m or a number of tokens")


def _parse(text: str, units: dict[str, int], wanted: str) -> int:
    match = _SIZE.fullmatch(text)
    unit = units.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise ConfigError(f"{text!r} is not {wanted}")
    return int(float(match[1]) * unit) if "." in match[1] else int(match[1]) * unit


def format_bytes(num_bytes: float) -> str:
    """Bytes for people: ``128 KiB``, ``72.5 GiB``; below a KiB as they are."""
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:,.4g} TiB"


def format_tokens(num_tokens: int) -> str:
    """Tokens for people: ``8k`` where it is exact, ``12,345`` elsewhere."""
    if num_tokens >= 1024 and num_tokens % 1024 == 0:
        return f"{num_tokens // 1024}k"
    return f"{num_tokens:,}"
