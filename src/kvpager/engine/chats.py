"""Prompts to try an engine with: support chats that share a long system prompt, or a file of prompts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Annotated, Any

import msgspec

from ..errors import TraceError
from .sampling import SamplingParams

__all__ = ["PromptLine", "default_prompts", "parse_prompts"]

_SYSTEM = """You are the support assistant of Fernwood Bicycles, a shop that sells, rents and repairs bicycles. \
Be friendly, answer in at most three sentences, and never promise anything that is not written here.

Opening hours: Monday to Friday from 9 in the morning to 6 in the evening, Saturday from 10 to 4. The shop is closed \
on Sundays and public holidays. The workshop takes its last bicycle one hour before the shop closes.

Repairs: a standard service costs 59 euros and takes two working days. It includes brakes, gears, bearings, wheel \
truing and a test ride. A flat tyre costs 15 euros and is done while you wait. A new chain costs 35 euros, a new \
chain with cassette 85 euros. Electric bicycles are serviced too, but batteries are not repaired; they are replaced \
by the maker, which takes about three weeks. Ask for a written estimate before any repair above 120 euros.

Rental: a city bicycle costs 14 euros a day, an electric bicycle 32 euros a day, a cargo bicycle 40 euros a day. \
Helmets and locks are free with every rental. A deposit of 100 euros is needed, and an identity card. Rentals are \
returned by half an hour before closing time; a late return costs 10 euros an hour. Children's seats can be added \
for 3 euros a day. A reservation can be cancelled free of charge until the evening before.

Sales: every new bicycle has a warranty of two years, and its first service after three months is free. Test rides \
take 20 minutes and need an identity card. A bicycle that has not been ridden can be returned within 14 days with \
the receipt. Used bicycles have a warranty of six months. We deliver within the city for 20 euros, and assemble what \
we deliver. Company bicycles can be leased through all common leasing partners."""

_QUESTIONS = (
    "Hi! Are you open on Sunday?",
    "How much is a standard service and how long does it take?",
    "I have a flat tyre. Can I wait while you fix it?",
    "The battery of my electric bike is dead. Can you repair it?",
    "What do I need to bring to rent a cargo bike tomorrow?",
    "Is a helmet included when I rent a bicycle?",
    "I bought a bike last week and have not ridden it. Can I bring it back?",
    "Do you deliver? I live in the city.",
    "My chain is worn out. What will a new one cost with the cassette?",
    "Until when can I bring my bicycle to the workshop on Saturday?",
    "I will be an hour late with my rental today. What happens?",
    "Is the first service of a new bicycle free?",
)


class Message(msgspec.Struct, forbid_unknown_fields=True):
    """One turn of a chat."""

    role: str
    content: str


class PromptLine(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """One line of a file of prompts: ``prompt`` (text as it is) or ``messages`` (a chat), and how to answer it.

    What a line doesn't say is taken from the command line.
    """

    prompt: str | None = None
    messages: list[Message] | None = None
    max_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0)] | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")

    @property
    def title(self) -> str:
        """What the prompt ends with: a chat's last turn."""
        return self.messages[-1].content if self.messages else self.prompt or ""

    def encoded(self, tokenizer: Any) -> str | list[int]:
        """The prompt as an engine takes it. Raises ``TraceError`` for a chat when the model is not made for chats."""
        if self.messages is None:
            return self.prompt or ""
        if getattr(tokenizer, "chat_template", None) is None:
            raise TraceError('the model has no chat template; give prompts as text: {"prompt": "…"}')
        turns = [msgspec.to_builtins(message) for message in self.messages]
        token_ids = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
        return list(token_ids)

    def params(self, defaults: SamplingParams) -> SamplingParams:
        """The line's sampling parameters."""
        given = {name: getattr(self, name) for name in ("max_tokens", "temperature", "top_p", "seed")}
        return replace(defaults, **{name: value for name, value in given.items() if value is not None})


def default_prompts() -> list[PromptLine]:
    """A dozen support chats with one system prompt."""
    return [PromptLine(messages=[Message("system", _SYSTEM), Message("user", question)]) for question in _QUESTIONS]


def parse_prompts(lines: Iterable[bytes], name: str) -> list[PromptLine]:
    """Prompts from JSON lines; empty lines are passed over. Raises ``TraceError`` with ``name`` and the line number."""
    prompts = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            prompts.append(msgspec.json.decode(line, type=PromptLine))
        except msgspec.DecodeError as error:
            raise TraceError(
                f'{name}, line {number}: {error}; expected {{"prompt": "…"}} or '
                f'{{"messages": [{{"role": "user", "content": "…"}}]}}'
            ) from None
    if not prompts:
        raise TraceError(f'{name} has no prompts; give one JSON object a line, like {{"prompt": "…"}}')
    return prompts
