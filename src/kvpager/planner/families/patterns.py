"""Which layer is of which kind, as configurations say it: each pattern is a function of the configuration.

A pattern answers with a kind for each layer, or with None where the file doesn't say it this way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby

from ..model_config import ModelConfig

__all__ = [
    "CHUNKED",
    "FULL",
    "LINEAR",
    "MAMBA",
    "SLIDING",
    "Pattern",
    "after",
    "every",
    "everywhere",
    "first_of",
    "in_turn",
    "indices",
    "letters",
    "listed",
    "marks",
    "period",
    "shown",
    "unless_off",
    "when",
]

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
LINEAR, MAMBA = "linear_attention", "mamba"

Kinds = tuple[str, ...]
Pattern = Callable[[ModelConfig, int], "Kinds | None"]


def everywhere(kind: str) -> Pattern:
    """All layers are alike."""
    return lambda config, num_layers: (kind,) * num_layers


def first_of(*patterns: Pattern) -> Pattern:
    """The first pattern that the file has an answer to."""

    def choose(config: ModelConfig, num_layers: int) -> Kinds | None:
        answers = (pattern(config, num_layers) for pattern in patterns)
        return next((kinds for kinds in answers if kinds is not None), None)

    return choose


def listed(*names: str, may_go_on: bool = False) -> Pattern:
    """A list of kinds; ``may_go_on``: published files of the family name drafting layers behind the others."""

    def read(config: ModelConfig, num_layers: int) -> Kinds | None:
        kinds = config.strings(*names)
        if kinds is not None and may_go_on:
            kinds = kinds[:num_layers]
        return _one_each(config, names[0], kinds, num_layers)

    return read


def marks(name: str, kinds: Mapping[int, str], *, empty_is_silent: bool = False) -> Pattern:
    """A list of numbers, each standing for a kind."""

    def read(config: ModelConfig, num_layers: int) -> Kinds | None:
        numbers = config.integers(name)
        if numbers is None or (empty_is_silent and not numbers):
            return None
        return _one_each(config, name, tuple(kinds.get(number, str(number)) for number in numbers), num_layers)

    return read


def letters(name: str, kinds: Mapping[str, str]) -> Pattern:
    """A string with a letter for each layer."""

    def read(config: ModelConfig, num_layers: int) -> Kinds | None:
        if not config.has(name):
            return None
        text = config.known(name)
        if not isinstance(text, str):
            raise config.error(name, f"must be a string with a letter for each layer, got {text!r}")
        return _one_each(config, name, tuple(kinds.get(letter, letter) for letter in text), num_layers)

    return read


def every(name: str, special: str, other: str) -> Pattern:
    """Each n-th layer is special."""

    def count(config: ModelConfig, num_layers: int) -> Kinds:
        interval = config.integer(name)
        return tuple(other if (index + 1) % interval else special for index in range(num_layers))

    return count


def in_turn(*kinds: str) -> Pattern:
    """The kinds take turns."""
    return lambda config, num_layers: tuple(kinds[index % len(kinds)] for index in range(num_layers))


def after(name: str, later: str, earlier: str) -> Pattern:
    """Layers from the n-th on are of another kind."""
    return lambda config, num_layers: tuple(
        later if index >= config.integer(name) else earlier for index in range(num_layers)
    )


def period(length: str, offset: str, special: str, other: str) -> Pattern:
    """In each run of ``length`` layers, the one at ``offset`` is special."""

    def count(config: ModelConfig, num_layers: int) -> Kinds:
        place = config.known(offset)
        if not isinstance(place, int):
            raise config.error(offset, f"must be an integer, got {place!r}")
        return tuple(special if index % config.integer(length) == place else other for index in range(num_layers))

    return count


def indices(name: str, inside: str, outside: str, *, first: int = 0) -> Pattern:
    """Layers at these indices are special; ``first`` is the index of the first layer."""

    def read(config: ModelConfig, num_layers: int) -> Kinds | None:
        where = config.integers(name)
        if where is None:
            return None
        if beyond := [index for index in where if not first <= index < first + num_layers]:
            raise config.error(name, f"names layers {beyond}, but the model has {num_layers}, the first being {first}")
        return tuple(inside if index + first in where else outside for index in range(num_layers))

    return read


def when(name: str, then: Pattern, otherwise: Pattern) -> Pattern:
    """One or the other pattern: is the field known to be something else than null or false?"""
    return lambda config, num_layers: (then if config.known(name) else otherwise)(config, num_layers)


def unless_off(name: str, then: Pattern, otherwise: Pattern) -> Pattern:
    """The other pattern where the file says that the field is false."""
    return lambda config, num_layers: (otherwise if config.has(name) and not config.flag(name) else then)(
        config, num_layers
    )


def shown(kinds: Sequence[str]) -> str:
    """A pattern for people: ``3x sliding_attention, full_attention``."""
    runs = [(kind, len(list(same))) for kind, same in groupby(kinds)]
    return ", ".join(f"{count}x {kind}" if count > 1 else kind for kind, count in runs)


def _one_each(config: ModelConfig, name: str, kinds: Kinds | None, num_layers: int) -> Kinds | None:
    if kinds is not None and len(kinds) != num_layers:
        raise config.error(name, f"names {len(kinds)} layers, but the model has {num_layers}: {shown(kinds)}")
    return kinds
