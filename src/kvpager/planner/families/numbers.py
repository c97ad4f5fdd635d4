"""Numbers of a model, as families name them: each is a function of the configuration."""

from __future__ import annotations

from collections.abc import Callable

from ..model_config import ModelConfig

__all__ = [
    "HEADS",
    "HIDDEN",
    "KV_HEADS",
    "Number",
    "field",
    "fixed",
    "flagged",
    "head_size",
    "if_told",
    "product",
    "ratio",
]

Number = Callable[[ModelConfig], int]


def field(*names: str) -> Number:
    """The first of these fields that is known."""
    return lambda config: config.integer(*names)


def fixed(number: int) -> Number:
    """The same in every model of the family."""
    return lambda config: number


def product(*numbers: Number) -> Number:
    """All of them multiplied."""

    def multiply(config: ModelConfig) -> int:
        result = 1
        for number in numbers:
            result *= number(config)
        return result

    return multiply


def flagged(name: str, then: Number, otherwise: Number) -> Number:
    """One or the other, as a flag says."""
    return lambda config: then(config) if config.flag(name) else otherwise(config)


def if_told(name: str, then: Number, otherwise: Number) -> Number:
    """One or the other: is the field there, or has the family a value for it?"""
    return lambda config: then(config) if config.told(name) else otherwise(config)


def ratio(missing: str, whole: str, parts: str) -> Number:
    """What stands in for a ``missing`` field: the whole shared out evenly. Raises ``ConfigError`` if it can't be."""

    def divide(config: ModelConfig) -> int:
        all_of_it, count = config.integer(whole), config.integer(parts)
        if all_of_it % count:
            raise config.error(missing, f"is missing, and {whole} {all_of_it} is not a multiple of {count} {parts}")
        return all_of_it // count

    return divide


def head_size(name: str = "head_dim", hidden: str = "hidden_size", heads: str = "num_attention_heads") -> Number:
    """The size of a head; where it is missing, the hidden size shared out among the heads."""
    return if_told(name, field(name), ratio(name, hidden, heads))


HIDDEN = field("hidden_size")
HEADS = field("num_attention_heads")
KV_HEADS = field("num_key_value_heads")
