"""Drafters: ``mtp:3``, ``eagle:CONFIG``, ``draft:CONFIG:5``."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Literal

from ..errors import ConfigError
from .families import model_layers
from .memory import Layer, Rank
from .model_config import load_model_config

__all__ = ["Speculation", "draft_layers", "parse_speculative"]

DEFAULT_DRAFTED = 3
_FORMS = "mtp:TOKENS, eagle:CONFIG[:TOKENS] or draft:CONFIG[:TOKENS]"


@dataclass(frozen=True, kw_only=True)
class Speculation:
    """A drafter that proposes ``num_tokens`` a step.

    ``mtp``: the checkpoint's own drafting layers. ``eagle``, ``draft``: the model of the file or folder ``config``;
    an EAGLE head needs the last hidden state, like MTP, a draft model doesn't.
    """

    method: Literal["mtp", "eagle", "draft"]
    num_tokens: int
    config: str | None = None
    assumed: bool = False
    """Whether ``num_tokens`` is an assumption."""


def parse_speculative(text: str) -> Speculation:
    """A drafter as the command line names it. Raises ``ConfigError`` for anything else."""
    if match := re.fullmatch(r"mtp:(\d{1,4})", text):
        return Speculation(method="mtp", num_tokens=_at_least_one(text, match[1]))
    if match := re.fullmatch(r"(eagle|draft):(.+?)(?::(\d{1,4}))?", text):
        method: Literal["eagle", "draft"] = "eagle" if match[1] == "eagle" else "draft"
        tokens = DEFAULT_DRAFTED if match[3] is None else _at_least_one(text, match[3])
        return Speculation(method=method, num_tokens=tokens, config=match[2], assumed=match[3] is None)
    raise ConfigError(f"speculative {text!r} is not a drafter; give {_FORMS}")


def draft_layers(speculation: Speculation, rank: Rank, num_layers: int) -> tuple[tuple[Layer, ...], list[str]]:
    """The layers of a drafter that is a model of its own, behind the model's ``num_layers``; and notes on them.

    Raises ``ConfigError`` as for any model.
    """
    if speculation.config is None:
        return (), []
    config = load_model_config(speculation.config)
    found = model_layers(config, rank)
    layers = tuple(
        replace(layer, index=num_layers + layer.index, name=f"draft.{layer.name}", drafts=speculation.method == "eagle")
        for layer in found.layers
    )
    return layers, [f"drafter: {note}" for note in config.notes]


def _at_least_one(text: str, number: str) -> int:
    if int(number) < 1:
        raise ConfigError(f"speculative {text!r} drafts nothing; give a number of tokens of at least 1")
    return int(number)
