"""Block hashes in plain Python: the oracle of `kvpager.hashing`. Slow, and short enough to be read."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvpager.errors import ConfigError, InvalidRequestError
from kvpager.extra_keys import ExtraKey
from kvpager.hashing import MAX_TOKEN_ID, root_hash


def hash_blocks(
    token_ids: Any,
    *,
    block_size: int,
    parent: bytes | None = None,
    extra_keys: Sequence[Sequence[ExtraKey] | None] | None = None,
    algorithm: str = "sha256",
) -> list[bytes]:
    """The same as `kvpager.hashing.hash_blocks`, one block after the other with hashlib."""
    if type(block_size) is not int or not 1 <= block_size <= MAX_TOKEN_ID:
        raise ConfigError(f"bad hash block size {block_size!r}")
    last = root_hash(algorithm=algorithm) if parent is None else parent  # type: ignore[arg-type]
    if type(last) is not bytes or len(last) != 32:
        raise InvalidRequestError(f"parent must be a hash, got {last!r}")
    tokens = checked_tokens(token_ids)
    num_blocks = len(tokens) // block_size
    keys = checked_keys(extra_keys, num_blocks)
    hashes = []
    for index in range(num_blocks):
        block = tokens[index * block_size : (index + 1) * block_size]
        message = (
            canonical(last, block, keys[index]) if algorithm == "sha256" else cbor_message(last, block, keys[index])
        )
        last = hashlib.sha256(message).digest()
        hashes.append(last)
    return hashes


def checked_tokens(token_ids: Any) -> list[int]:
    """A list of ints in range, from a sequence or a buffer."""
    if isinstance(token_ids, Sequence) and not isinstance(token_ids, (str, bytes, memoryview)):
        items = list(token_ids)
    else:
        try:
            values = np.asarray(memoryview(token_ids))
        except (TypeError, ValueError) as error:
            raise InvalidRequestError(f"no token ids: {error}") from None
        if values.ndim != 1 or values.dtype.kind not in "iu":
            raise InvalidRequestError(f"no token ids: {values.dtype} {values.shape}")
        items = values.tolist()
    return [checked_token(index, item) for index, item in enumerate(items)]


def checked_token(index: int, item: Any) -> int:
    """One token id as an int."""
    if isinstance(item, (bool, np.bool_)) or not isinstance(item, (int, np.integer)):
        raise InvalidRequestError(f"token_ids[{index}] is {item!r}; token ids are integers")
    if not 0 <= item <= MAX_TOKEN_ID:
        raise InvalidRequestError(f"token_ids[{index}] is {int(item)}; token ids go from 0 to {MAX_TOKEN_ID}")
    return int(item)


def checked_keys(extra_keys: Any, num_blocks: int) -> list[Sequence[ExtraKey]]:
    """The extra keys of each block, empty where there are none."""
    if extra_keys is None:
        return [()] * num_blocks
    if len(extra_keys) != num_blocks:
        raise InvalidRequestError(f"extra_keys has {len(extra_keys)} entries for {num_blocks} full blocks")
    keys = [() if block_keys is None else block_keys for block_keys in extra_keys]
    if not all(isinstance(k, (tuple, list)) and all(isinstance(key, ExtraKey) for key in k) for k in keys):
        raise InvalidRequestError("extra_keys must hold ExtraKey objects")
    return keys


def canonical(parent: bytes, tokens: list[int], keys: Sequence[ExtraKey]) -> bytes:
    """The message of `sha256`."""
    fields = [struct.pack("<BI", key.kind, len(key.payload)) + key.payload for key in keys]
    return parent + struct.pack(f"<{len(tokens) + 2}I", len(tokens), *tokens, len(keys)) + b"".join(fields)


def cbor_message(parent: bytes, tokens: list[int], keys: Sequence[ExtraKey]) -> bytes:
    """The message of `sha256_cbor`."""
    return cbor([parent, tokens, [key.plain for key in keys] or None])


def cbor(value: Any) -> bytes:
    """Canonical CBOR of None, ints, bytes, text and arrays of them."""
    if value is None:
        return b"\xf6"
    if isinstance(value, bytes):
        return cbor_head(2, len(value)) + value
    if isinstance(value, str):
        return cbor_head(3, len(value.encode())) + value.encode()
    if isinstance(value, int):
        return cbor_head(0, value) if value >= 0 else cbor_head(1, -1 - value)
    return cbor_head(4, len(value)) + b"".join(cbor(item) for item in value)


def cbor_head(major: int, argument: int) -> bytes:
    """A type byte and its argument, as short as can be."""
    if argument < 24:
        return bytes([major * 32 + argument])
    size = next(size for size in (1, 2, 4, 8) if argument < 256**size)
    return bytes([major * 32 + 23 + size.bit_length()]) + argument.to_bytes(size, "big")
