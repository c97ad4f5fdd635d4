"""What besides token ids decides a block's K/V: adapter, pictures, salt, embeddings.

Each becomes an `ExtraKey` that knows its kind, so that two kinds with equal text never
make the same hash (`docs/hashing.md` has the bytes).
"""

from __future__ import annotations

import hashlib
import struct
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .counts import as_count
from .errors import InvalidRequestError

__all__ = [
    "ContentKeys",
    "ExtraKey",
    "ExtraKind",
    "LoRA",
    "MultiModalItem",
    "PlainKey",
    "PromptEmbeds",
    "cache_salt_key",
]

PlainKey = str | bytes | tuple[str, int]
"""An extra key without its kind, as events and the `sha256_cbor` algorithm know it."""


class ExtraKind(IntEnum):
    """The tag byte of an extra key in the `sha256` layout. Never renumber: it is part of the format."""

    LORA_VERSION = 1
    LORA_DIGEST = 2
    LORA_ID = 3
    MULTIMODAL = 4
    CACHE_SALT = 5
    PROMPT_EMBEDS = 6


class ExtraKey(NamedTuple):
    """One extra key of one block: the tagged ``payload`` for `sha256`, the ``plain`` value for the rest."""

    kind: ExtraKind
    payload: bytes
    plain: PlainKey


@dataclass(frozen=True, kw_only=True)
class LoRA:
    """An adapter. Its identity is the content ``digest``, else ``name`` and ``version``, else ``name`` and ``id``.

    Give a digest or a version: an id means something to one process only, so with neither,
    hashes don't agree between processes. Raises ``InvalidRequestError`` when nothing identifies it.
    """

    name: str
    version: str | None = None
    digest: bytes | None = None
    id: int | None = None

    def __post_init__(self) -> None:
        encode_text("LoRA.name", self.name)
        if self.version is not None:
            encode_text("LoRA.version", self.version)
        if self.digest is not None and (not isinstance(self.digest, bytes) or not self.digest):
            raise InvalidRequestError(f"LoRA.digest must be non-empty bytes, got {self.digest!r}")
        if self.id is not None:
            adapter_id = as_count(self.id, "LoRA.id", at_most=2**63 - 1, error=InvalidRequestError)
            object.__setattr__(self, "id", adapter_id)
        if self.version is None and self.digest is None and self.id is None:
            raise InvalidRequestError(
                f"LoRA {self.name!r} has neither version nor digest nor id, so another adapter of that name "
                f"could not be told from it; give a version or a content digest"
            )

    @cached_property
    def extra_key(self) -> ExtraKey:
        """The key that every block of a request with this adapter carries."""
        name = encode_text("LoRA.name", self.name)
        if self.digest is not None:
            return ExtraKey(kind=ExtraKind.LORA_DIGEST, payload=self.digest, plain=self.name)
        if self.version is not None:
            payload = struct.pack("<I", len(name)) + name + encode_text("LoRA.version", self.version)
            return ExtraKey(kind=ExtraKind.LORA_VERSION, payload=payload, plain=self.name)
        return ExtraKey(kind=ExtraKind.LORA_ID, payload=struct.pack("<Q", self.id) + name, plain=self.name)


@dataclass(frozen=True, kw_only=True)
class MultiModalItem:
    """One picture, sound or the like: ``identifier`` names its content, and it fills the placeholder
    tokens ``[offset, offset + length)`` of the prompt."""

    identifier: str
    offset: int
    length: int

    def __post_init__(self) -> None:
        encode_text("MultiModalItem.identifier", self.identifier)
        for name, least in (("offset", 0), ("length", 1)):
            count = as_count(getattr(self, name), f"MultiModalItem.{name}", least, error=InvalidRequestError)
            object.__setattr__(self, name, count)

    @cached_property
    def _identifier(self) -> bytes:
        return encode_text("MultiModalItem.identifier", self.identifier)

    @property
    def end(self) -> int:
        """The first token behind the item."""
        return self.offset + self.length

    def extra_key(self, block_start: int) -> ExtraKey:
        """The key for the block that starts at token ``block_start``: the same item at another
        place in otherwise equal placeholder tokens is another content."""
        offset = self.offset - block_start
        payload = struct.pack("<q", offset) + self._identifier
        return ExtraKey(kind=ExtraKind.MULTIMODAL, payload=payload, plain=(self.identifier, offset))


@dataclass(frozen=True, kw_only=True, eq=False)
class PromptEmbeds:
    """A prompt given as vectors: ``values`` [num_prompt_tokens, width], any fixed-size dtype.

    ``mask`` [num_prompt_tokens] is True where the vector counts and False where the token id does;
    None: the vector counts everywhere. Neither may change afterwards (they are hashed, not copied).
    A dtype that NumPy lacks (bfloat16) comes as an unsigned view of the same width.
    """

    values: npt.NDArray[np.generic]
    mask: npt.NDArray[np.bool_] | None = None

    def __post_init__(self) -> None:
        values = self.values
        if not isinstance(values, np.ndarray) or values.ndim != 2 or values.dtype.hasobject:
            got = f"{values.dtype} {values.shape}" if isinstance(values, np.ndarray) else type(values).__name__
            raise InvalidRequestError(
                f"PromptEmbeds.values must be a NumPy array [num_prompt_tokens, width] of numbers, got {got}"
            )
        if self.mask is None:
            return
        mask = np.asarray(self.mask)
        if mask.dtype != np.bool_ or mask.shape != (len(values),):
            raise InvalidRequestError(
                f"PromptEmbeds.mask must be {len(values)} booleans, one a row, got {mask.dtype} {mask.shape}"
            )
        object.__setattr__(self, "mask", mask)

    def __len__(self) -> int:
        return len(self.values)

    def extra_key(self, start: int, stop: int) -> ExtraKey:
        """The key of rows ``[start, stop)``: their bytes with dtype and shape, and the mask's. O(bytes)."""
        rows = np.ascontiguousarray(self.values[start:stop])
        # Byte order is part of a dtype's name, so that equal bytes of two orders stay two contents.
        head = f"{rows.dtype.str}:{rows.shape[0]}:{rows.shape[1]}\0".encode()
        mask = np.ones(len(rows), np.bool_) if self.mask is None else self.mask[start:stop]
        data = rows.tobytes()
        payload = hashlib.sha256(head + data).digest() + hashlib.sha256(mask.tobytes()).digest()
        return ExtraKey(kind=ExtraKind.PROMPT_EMBEDS, payload=payload, plain=hashlib.sha256(data).digest())


def cache_salt_key(salt: str) -> ExtraKey:
    """The key of a cache salt; it goes into a request's first block."""
    return ExtraKey(kind=ExtraKind.CACHE_SALT, payload=encode_text("cache_salt", salt), plain=salt)


@dataclass(frozen=True, kw_only=True)
class ContentKeys:
    """Everything besides token ids that a request's blocks depend on.

    Multimodal items come sorted by offset and don't overlap. Raises ``InvalidRequestError``.
    """

    lora: LoRA | None = None
    multimodal: Sequence[MultiModalItem] = ()
    cache_salt: str | None = None
    prompt_embeds: PromptEmbeds | None = None
    _ends: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._check_types()
        object.__setattr__(self, "multimodal", tuple(self.multimodal))
        end = 0
        for index, item in enumerate(self.multimodal):
            if item.offset < end:
                raise InvalidRequestError(
                    f"multimodal[{index}] starts at token {item.offset}, before the item in front of it ends ({end}); "
                    f"give the items in the order of their offsets, without overlap"
                )
            end = item.end
        object.__setattr__(self, "_ends", tuple(item.end for item in self.multimodal))

    def __bool__(self) -> bool:
        return bool(self.lora or self.multimodal or self.cache_salt or self.prompt_embeds is not None)

    def for_block(self, start: int, stop: int) -> tuple[ExtraKey, ...]:
        """The extra keys of the block of tokens ``[start, stop)``, always in the same order of kinds.

        O(log items + items in the block), and the bytes of its embeddings.
        """
        keys = [self.lora.extra_key] if self.lora else []
        for index in range(bisect_right(self._ends, start), len(self.multimodal)):
            item = self.multimodal[index]
            if item.offset >= stop:
                break
            keys.append(item.extra_key(start))
        if self.cache_salt is not None and start == 0:
            keys.append(cache_salt_key(self.cache_salt))
        if self.prompt_embeds is not None:  # behind the prompt too, as zero rows
            keys.append(self.prompt_embeds.extra_key(start, stop))
        return tuple(keys)

    def for_blocks(self, first_block: int, num_blocks: int, block_size: int) -> list[tuple[ExtraKey, ...]] | None:
        """`for_block` of a run of blocks; None when there is nothing besides tokens."""
        if not self:
            return None
        # Most blocks have the adapter at most; they share one tuple, which is then encoded once.
        keys: list[tuple[ExtraKey, ...]] = [(self.lora.extra_key,) if self.lora else ()] * num_blocks
        for block in self._special_blocks(first_block, num_blocks, block_size):
            keys[block - first_block] = self.for_block(block * block_size, (block + 1) * block_size)
        return keys

    def _special_blocks(self, first_block: int, num_blocks: int, block_size: int) -> Iterable[int]:
        """Blocks of a run that may have more keys than the adapter's."""
        last_block = first_block + num_blocks
        if self.prompt_embeds is not None:
            return range(first_block, last_block)
        blocks = {0} if self.cache_salt is not None and first_block == 0 < num_blocks else set()
        for item in self.multimodal[bisect_right(self._ends, first_block * block_size) :]:
            if item.offset >= last_block * block_size:
                break
            blocks.update(
                range(max(item.offset // block_size, first_block), min(-(-item.end // block_size), last_block))
            )
        return blocks

    def _check_types(self) -> None:
        if self.lora is not None and not isinstance(self.lora, LoRA):
            raise InvalidRequestError(f"lora must be a LoRA or None, got {self.lora!r}")
        if not isinstance(self.multimodal, (list, tuple)):
            raise InvalidRequestError(f"multimodal must be a list or tuple of MultiModalItem, got {self.multimodal!r}")
        for index, item in enumerate(self.multimodal):
            if not isinstance(item, MultiModalItem):
                raise InvalidRequestError(f"multimodal[{index}] must be a MultiModalItem, got {item!r}")
        if self.cache_salt is not None:
            encode_text("cache_salt", self.cache_salt)
        if self.prompt_embeds is not None and not isinstance(self.prompt_embeds, PromptEmbeds):
            raise InvalidRequestError(f"prompt_embeds must be PromptEmbeds or None, got {type(self.prompt_embeds)!r}")


def encode_text(name: str, text: object) -> bytes:
    """UTF-8 of a non-empty string; ``InvalidRequestError`` names the argument otherwise."""
    if not isinstance(text, str) or not text:
        raise InvalidRequestError(f"{name} must be a non-empty string, got {text!r}")
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(f"{name} must be text that UTF-8 can encode, got {text!r}: {error.reason}") from None
