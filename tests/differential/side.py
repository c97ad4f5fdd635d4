"""What the harness asks of either manager."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True, kw_only=True)
class Extras:
    """What else a request may come with."""

    skip: bool = False
    """Never hit."""
    salt: str | None = None
    lora: str | None = None


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """The arguments of one allocation, hits included."""

    num_new: int
    num_hit: int = 0
    hit_blocks: Any = None
    """The side's own blocks object; each side gets its own."""
    num_lookahead: int = 0
    num_external: int = 0
    delay: bool = False
    gate: bool = False
    reserved: int = 0
    scheduled: bool = True


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What a side would say to an allocation. Needs are None where the side does not tell them."""

    accepts: bool
    gate_need: int | None = None
    step_need: int | None = None
    never: bool = False
    next_step: bool = False
    at_gate: bool = False
    """Whether a refusal came from the full-sequence check."""


@dataclass(frozen=True, kw_only=True)
class State:
    """Everything that later decisions depend on."""

    free: list[int]
    index: dict[tuple[bytes, int], list[int]]
    refs: list[int]
    usage: float


@dataclass(kw_only=True)
class Events:
    """A stretch of the event stream, per block."""

    stored: list[tuple[bytes, int, tuple[Any, ...] | None]] = field(default_factory=list)
    """(hash, group, what the event says of the block; None where tokens and hashes do not pair up)."""
    removed: list[tuple[bytes, int]] = field(default_factory=list)
    order: list[tuple[str, bytes, int]] = field(default_factory=list)


class Side(Protocol):
    """One manager with its requests, by request id."""

    name: str

    def new(self, rid: str, prompt: list[int], max_tokens: int, extras: Extras) -> None: ...
    def forget(self, rid: str) -> None: ...
    def hashes(self, rid: str) -> list[bytes]: ...
    def append(self, rid: str, tokens: list[int]) -> None: ...
    def set_computed(self, rid: str, num_tokens: int) -> None: ...
    def set_status(self, rid: str, status: str) -> None: ...
    def hit(self, rid: str) -> tuple[Any, int, list[list[int]]]: ...
    def verdict(self, rid: str, allocation: Allocation) -> Verdict: ...
    def allocate(self, rid: str, allocation: Allocation) -> list[list[int]] | None: ...
    def decode(self, rids: list[str], lookahead: int) -> tuple[list[list[list[int]]], int | None]: ...
    def table(self, rid: str) -> list[list[int]]: ...
    def clipped(self, rid: str, num_tokens: int) -> list[list[int]]: ...
    def common(self, rid: str) -> list[int]: ...
    def release_dead(self, rid: str, num_tokens: int, num_prompt: int) -> None: ...
    def commit(self, rid: str, num_tokens: int) -> None: ...
    def free(self, rid: str) -> None: ...
    def pop(self, rid: str) -> list[int]: ...
    def give_back(self, ids: list[int]) -> None: ...
    def evict(self, ids: set[int]) -> None: ...
    def reset(self) -> bool: ...
    def new_step(self) -> None: ...
    def new_ids(self) -> list[int]: ...
    def events(self) -> list[Any]: ...
    def stats(self) -> tuple[int, int, int]: ...
    def state(self) -> State: ...
    def check(self) -> None: ...
