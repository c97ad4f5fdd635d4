"""Requests: what the manager reads of one, and a ready implementation."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from enum import Enum, auto
from typing import Protocol, cast

from .counts import as_count, as_integer, as_number
from .errors import InvalidRequestError
from .extra_keys import ContentKeys, LoRA, MultiModalItem, PlainKey, PromptEmbeds
from .hashing import HASH_BYTES, MAX_TOKEN_ID, BlockHasher, BlockHashes, TokenIds, token_list

__all__ = ["EventSource", "Request", "RequestLike", "RequestStatus"]


class RequestStatus(Enum):
    """Where a request is in its life."""

    WAITING = auto()
    RUNNING = auto()
    PREEMPTED = auto()
    WAITING_FOR_LOAD = auto()
    FINISHED_STOPPED = auto()
    FINISHED_LENGTH = auto()
    FINISHED_ABORTED = auto()

    @property
    def is_finished(self) -> bool:
        """Whether the request is over."""
        return self in _FINISHED


_FINISHED = frozenset({RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH, RequestStatus.FINISHED_ABORTED})


class _Named(Protocol):
    @property
    def name(self) -> str: ...


class RequestLike(Protocol):
    """All that the manager reads of a request; any object with these attributes will do.

    ``num_in_flight_tokens`` (0) and ``max_tokens`` (None) may be missing. ``all_token_ids`` is read for
    events only.
    """

    @property
    def request_id(self) -> str:
        """Unique among live requests."""

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens so far."""

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""

    @property
    def num_computed_tokens(self) -> int:
        """Tokens whose K/V is in blocks the request holds; the scheduler advances it."""

    @property
    def block_hashes(self) -> Sequence[bytes]:
        """Hashes of the full hash blocks so far."""

    @property
    def status(self) -> _Named:
        """An enum member; only its ``name`` is read."""

    @property
    def num_preemptions(self) -> int:
        """How often it was preempted."""

    @property
    def skip_reading_prefix_cache(self) -> bool:
        """Never hit (but still commit)."""

    @property
    def all_token_ids(self) -> Sequence[int]:
        """Prompt and output tokens; empty if they are not known."""


class EventSource(Protocol):
    """What events tell of a request beside its tokens and hashes."""

    @property
    def lora_id(self) -> int | None:
        """The adapter's id in this engine, if there is an adapter."""

    @property
    def lora_name(self) -> str | None:
        """The adapter's name, if there is an adapter."""

    def extra_keys(self, block_start: int, block_end: int) -> tuple[object, ...] | None:
        """What else than tokens went into the hash of the block of tokens [block_start, block_end).

        None for the tokens of several blocks: nothing in any of them.
        """


class Request:
    """A prompt and what was generated from it, with its block hashes.

    ``prompt_token_ids`` is a list of ints, an array or a buffer of integers; None with ``prompt_embeds``
    stands for zeros. Without ``block_hasher`` there are no hashes: the request neither hits nor
    commits. Hashing happens here and in `append_output_token_ids`, once for each block.

    ``num_computed_tokens``, ``num_in_flight_tokens``, ``status`` and ``num_preemptions`` are the
    scheduler's to write; everything else is read only. Raises ``InvalidRequestError``.
    """

    # Slots: the compiled step reads them where they lie, and a misspelt attribute is an error.
    __slots__ = (
        "__weakref__",
        "_block_hasher",
        "_content",
        "all_token_ids",
        "arrival_time",
        "block_hashes",
        "max_tokens",
        "num_computed_tokens",
        "num_encoder_tokens",
        "num_in_flight_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "num_tokens",
        "priority",
        "request_id",
        "skip_reading_prefix_cache",
        "status",
    )

    all_token_ids: list[int]
    block_hashes: Sequence[bytes]

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: TokenIds | None,
        *,
        block_hasher: BlockHasher | None = None,
        max_tokens: int | None = None,
        priority: int = 0,
        arrival_time: float = 0.0,
        skip_reading_prefix_cache: bool = False,
        cache_salt: str | None = None,
        lora: LoRA | None = None,
        multimodal: Sequence[MultiModalItem] = (),
        prompt_embeds: PromptEmbeds | None = None,
    ) -> None:
        self._content = ContentKeys(
            lora=lora, multimodal=multimodal, cache_salt=cache_salt, prompt_embeds=prompt_embeds
        )
        self.all_token_ids = _prompt_tokens(request_id, prompt_token_ids, self._content)
        self._init(request_id, len(self.all_token_ids), max_tokens, priority, arrival_time)
        self.skip_reading_prefix_cache = skip_reading_prefix_cache
        if block_hasher is not None and not isinstance(block_hasher, BlockHasher):
            raise InvalidRequestError(f"block_hasher must be a BlockHasher or None, got {block_hasher!r}")
        self._block_hasher = block_hasher
        if block_hasher is not None:
            self.block_hashes = block_hasher.start()
            self._extend_block_hashes(block_hasher)

    @classmethod
    def from_hashes(
        cls,
        request_id: str,
        num_prompt_tokens: int,
        block_hashes: Sequence[bytes],
        *,
        max_tokens: int | None = None,
        priority: int = 0,
        arrival_time: float = 0.0,
    ) -> Request:
        """A request whose tokens aren't known, only their block hashes (32 bytes each).

        Output tokens are counted and never hashed; ``all_token_ids`` stays empty. O(hashes).
        """
        num_prompt_tokens = as_count(num_prompt_tokens, "num_prompt_tokens", 1, error=InvalidRequestError)
        hashes = _hash_list(request_id, block_hashes)
        if len(hashes) > num_prompt_tokens:
            raise InvalidRequestError(
                f"request {request_id!r} has {len(hashes)} block hashes for {num_prompt_tokens} tokens"
            )
        self = cls.__new__(cls)
        self._content = ContentKeys()
        self.all_token_ids = []
        self._init(request_id, num_prompt_tokens, max_tokens, priority, arrival_time)
        self.skip_reading_prefix_cache = False
        self._block_hasher = None
        self.block_hashes = hashes
        return self

    def _init(
        self, request_id: str, num_prompt_tokens: int, max_tokens: int | None, priority: int, arrival_time: float
    ) -> None:
        if not isinstance(request_id, str) or not request_id:
            raise InvalidRequestError(f"request_id must be a non-empty string, got {request_id!r}")
        if num_prompt_tokens < 1:
            raise InvalidRequestError(f"request {request_id!r} has no prompt tokens; give at least one")
        self.request_id = request_id
        self.num_prompt_tokens = num_prompt_tokens
        self.num_tokens = num_prompt_tokens
        of, error = f"of request {request_id!r}", InvalidRequestError
        self.max_tokens = None if max_tokens is None else as_count(max_tokens, f"max_tokens {of}", 1, error=error)
        self.priority = as_integer(priority, f"priority {of}", error=error)
        self.arrival_time = as_number(arrival_time, f"arrival_time {of}", error=error)
        self.block_hashes = []
        self.status = RequestStatus.WAITING
        self.num_computed_tokens = 0
        self.num_in_flight_tokens = 0
        self.num_preemptions = 0
        self.num_encoder_tokens = 0

    @property
    def has_token_ids(self) -> bool:
        """Whether the token ids are known (not so after `from_hashes`)."""
        return bool(self.all_token_ids)

    @property
    def is_hashed(self) -> bool:
        """Whether it brings block hashes; one without neither hits nor commits."""
        return self._block_hasher is not None or not self.has_token_ids

    @property
    def output_token_ids(self) -> list[int]:
        """The generated tokens, a copy; empty if the token ids are not known. O(output tokens)."""
        return self.all_token_ids[self.num_prompt_tokens :]

    @property
    def num_output_tokens(self) -> int:
        """How many tokens were generated."""
        return self.num_tokens - self.num_prompt_tokens

    @property
    def lora_id(self) -> int | None:
        """The adapter's id, for events."""
        return self._content.lora.id if self._content.lora else None

    @property
    def lora_name(self) -> str | None:
        """The adapter's name, for events."""
        return self._content.lora.name if self._content.lora else None

    def append_output_token_ids(self, token_ids: int | Sequence[int]) -> None:
        """Add generated tokens and the hashes of blocks that became full.

        O(tokens + new blocks). Raises ``InvalidRequestError`` and changes nothing for what is not
        a token id.
        """
        if type(token_ids) is int and 0 <= token_ids <= MAX_TOKEN_ID and self.all_token_ids:  # a decode step's call
            self.all_token_ids.append(token_ids)
            self.num_tokens = num_tokens = self.num_tokens + 1
            hasher = self._block_hasher
            if hasher is not None and num_tokens % hasher.hash_size == 0:
                self._extend_block_hashes(hasher)
            return
        tokens = token_list(cast(TokenIds, [token_ids] if _is_integer(token_ids) else token_ids))
        self.num_tokens += len(tokens)
        if self.has_token_ids:
            self.all_token_ids += tokens
            if self._block_hasher is not None:
                self._extend_block_hashes(self._block_hasher)

    def extra_keys(self, block_start: int, block_end: int) -> tuple[PlainKey, ...] | None:
        """What besides tokens goes into the block of tokens ``[block_start, block_end)``, for events.

        Flat: LoRA name, (multimodal identifier, offset in the block) pairs, salt, embedding digest.
        None: nothing.
        """
        if not self._content:  # nearly every request, and events ask for each of its blocks
            return None
        return tuple(key.plain for key in self._content.for_block(block_start, block_end)) or None

    def _extend_block_hashes(self, hasher: BlockHasher) -> None:
        hashes = cast(BlockHashes, self.block_hashes)
        first, size = len(hashes), hasher.hash_size
        hasher.extend(
            hashes, self.all_token_ids, self._content.for_blocks(first, self.num_tokens // size - first, size)
        )

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self.num_prompt_tokens} + {self.num_output_tokens} tokens, "
            f"{self.num_computed_tokens} computed, {self.status.name})"
        )


def _prompt_tokens(request_id: str, token_ids: TokenIds | None, content: ContentKeys) -> list[int]:
    embeds = content.prompt_embeds
    if token_ids is None:
        if embeds is None:
            raise InvalidRequestError(f"request {request_id!r} has neither prompt_token_ids nor prompt_embeds")
        return [0] * len(embeds)
    tokens: list[int] = token_list(token_ids)
    if embeds is not None and len(embeds) != len(tokens):
        raise InvalidRequestError(
            f"request {request_id!r} has {len(tokens)} prompt tokens, but {len(embeds)} prompt embeddings; "
            f"give one row for each token, with a mask for those that count as tokens"
        )
    if content.multimodal and content.multimodal[-1].end > len(tokens):
        raise InvalidRequestError(
            f"request {request_id!r} has {len(tokens)} prompt tokens, but a multimodal item ends at "
            f"{content.multimodal[-1].end}"
        )
    return tokens


def _hash_list(request_id: str, block_hashes: Sequence[bytes]) -> list[bytes]:
    if isinstance(block_hashes, Sequence):
        hashes = list(block_hashes)
        if set(map(type, hashes)) <= {bytes} and set(map(len, hashes)) <= {HASH_BYTES}:
            return hashes
    raise InvalidRequestError(
        f"block_hashes of request {request_id!r} must be a sequence of hashes, {HASH_BYTES} bytes each"
    )


def _is_integer(value: object) -> bool:
    if isinstance(value, bool):
        return False
    try:
        operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return False
    return True
