"""Block hashes: a chain over a prompt's full blocks, so that equal hashes mean equal prefixes.

The bytes that go into each hash are written down in `docs/hashing.md`.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import numpy.typing as npt

from . import _native
from ._native import BlockHashes
from .config import CacheConfig
from .counts import as_count
from .errors import ConfigError, InvalidRequestError
from .extra_keys import ExtraKey

__all__ = [
    "HASH_BYTES",
    "MAX_TOKEN_ID",
    "Algorithm",
    "BlockHasher",
    "BlockHashes",
    "TokenIds",
    "hash_blocks",
    "root_hash",
    "token_list",
]

HASH_BYTES = 32
MAX_TOKEN_ID = 2**32 - 1

Algorithm = Literal["sha256", "sha256_cbor"]
_ALGORITHMS: tuple[Algorithm, ...] = ("sha256", "sha256_cbor")
TokenIds: TypeAlias = Sequence[int] | npt.NDArray[Any] | memoryview
"""A list or tuple of ints, or anything with the buffer protocol: `array`, NumPy, memoryview."""

ExtraKeysPerBlock: TypeAlias = Sequence[Sequence[ExtraKey] | None]

Sequence.register(BlockHashes)

_ROOT_MAGIC = b"kvpager block hash\x01"  # the last byte is the format version


def hash_blocks(
    token_ids: TokenIds,
    *,
    block_size: int,
    parent: bytes | None = None,
    extra_keys: ExtraKeysPerBlock | None = None,
    algorithm: Algorithm = "sha256",
) -> BlockHashes:
    """The hash (32 bytes) of every full block of ``token_ids``; a partial block at the end has none.

    ``parent`` is the hash of the block in front of the first one, or a `root_hash`; None stands for the
    root without namespace and seed. ``extra_keys`` has one entry for each full block (None: no keys).
    Raises ``InvalidRequestError`` for token ids that aren't integers from 0 to 2**32 - 1 and for
    whatever else doesn't fit. O(tokens).
    """
    block_size = _checked_size("block_size", block_size)
    cbor = _check_algorithm(algorithm) == "sha256_cbor"
    first = root_hash(algorithm=algorithm) if parent is None else _check_parent(parent)
    hashes = BlockHashes(block_size, first, cbor)
    hashes.extend(token_ids, _suffixes(extra_keys, cbor))
    return hashes


def token_list(token_ids: TokenIds) -> list[int]:
    """Token ids as a new list of ints, checked. Raises ``InvalidRequestError``; O(tokens)."""
    return _native.token_list(token_ids)


def root_hash(*, namespace: str = "", seed: str | bytes | None = None, algorithm: Algorithm = "sha256") -> bytes:
    """What stands in the place of the first block's parent.

    ``sha256``: format version, ``namespace`` (whatever changes K/V for equal tokens) and an optional
    secret ``seed``: with one, nobody who lacks it can compute or guess hashes. ``sha256_cbor``: made of the
    ``seed`` string alone, or 32 random bytes without one (two calls then never agree); it has no
    place for a namespace. Raises ``ConfigError``.
    """
    if _check_algorithm(algorithm) == "sha256_cbor":
        return _cbor_root(namespace, seed)
    if not isinstance(namespace, str):
        raise ConfigError(f"namespace must be a string, got {namespace!r}")
    message = _ROOT_MAGIC + _prefixed(_encode_option("namespace", namespace))
    if seed is not None:
        message += _prefixed(_encode_option("seed", seed))
    return hashlib.sha256(message).digest()


@dataclass(frozen=True)
class BlockHasher:
    """How requests of one cache are hashed: block size, root and algorithm.

    Requests that shall share blocks need the same hasher, or equal ones with ``sha256`` or a seed.
    """

    hash_size: int
    namespace: str = ""
    seed: str | bytes | None = field(default=None, repr=False)
    algorithm: Algorithm = "sha256"
    root: bytes = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "hash_size", _checked_size("hash_size", self.hash_size))
        root = root_hash(namespace=self.namespace, seed=self.seed, algorithm=self.algorithm)
        object.__setattr__(self, "root", root)

    @classmethod
    def for_config(
        cls, config: CacheConfig, seed: str | bytes | None = None, algorithm: Algorithm = "sha256"
    ) -> BlockHasher:
        """The hasher that fits a cache: its hash block size and its namespace."""
        if not isinstance(config, CacheConfig):
            raise ConfigError(f"config must be a CacheConfig, got {config!r}")
        return cls(config.hash_size, config.namespace, seed, algorithm)

    def start(self) -> BlockHashes:
        """The hashes of a sequence that has no full block yet."""
        return BlockHashes(self.hash_size, self.root, self.algorithm == "sha256_cbor")

    def extend(
        self, block_hashes: BlockHashes, token_ids: TokenIds, extra_keys: ExtraKeysPerBlock | None = None
    ) -> None:
        """Append the hashes of the blocks of ``token_ids``, the whole sequence, that have become full.

        ``extra_keys`` has one entry for each of these. O(new tokens). Raises as `hash_blocks`.
        """
        block_hashes.extend(token_ids, _suffixes(extra_keys, self.algorithm == "sha256_cbor"))


def _suffix(keys: Sequence[ExtraKey], cbor: bool) -> bytes:
    """What stands behind a block's tokens in its message: the extra keys, encoded."""
    if cbor:
        return _cbor([key.plain for key in keys]) if keys else b"\xf6"  # null
    fields = (struct.pack("<B", key.kind) + _prefixed(key.payload) for key in keys)
    return struct.pack("<I", len(keys)) + b"".join(fields)


def _prefixed(payload: bytes) -> bytes:
    return struct.pack("<I", len(payload)) + payload


def _cbor(value: object) -> bytes:
    """Canonical CBOR of the few shapes that a block hash is made of."""
    if isinstance(value, bytes):
        return _cbor_head(2, len(value)) + value
    if isinstance(value, str):
        return _cbor_head(3, len(value.encode())) + value.encode()
    if isinstance(value, int):
        return _cbor_head(0, value) if value >= 0 else _cbor_head(1, -1 - value)
    assert isinstance(value, (list, tuple)), value
    return _cbor_head(4, len(value)) + b"".join(map(_cbor, value))


def _cbor_head(major: int, argument: int) -> bytes:
    """A type byte and its argument in as few bytes as hold it (RFC 8949, section 4.2.1)."""
    if argument < 24:
        return bytes((major << 5 | argument,))
    for info, size in ((24, 1), (25, 2), (26, 4)):
        if argument < 1 << 8 * size:
            return bytes((major << 5 | info,)) + argument.to_bytes(size, "big")
    return bytes((major << 5 | 27,)) + argument.to_bytes(8, "big")


def _cbor_root(namespace: str, seed: object) -> bytes:
    if namespace:
        raise ConfigError(
            f"sha256_cbor has no place for a namespace, got {namespace!r}; leave it out and keep one index for each "
            f"model, or use sha256"
        )
    if seed is None:
        return os.urandom(HASH_BYTES)
    if not isinstance(seed, str):
        raise ConfigError(f"the seed of sha256_cbor must be a string, got {type(seed).__name__}")
    _encode_option("seed", seed)
    return hashlib.sha256(_cbor(seed)).digest()


def _encode_option(name: str, value: object) -> bytes:
    if isinstance(value, bytes):
        return value
    try:
        if isinstance(value, str):
            return value.encode()
    except UnicodeEncodeError:
        pass
    raise ConfigError(f"{name} must be text that UTF-8 can encode, or bytes for a seed, got {value!r}")


def _checked_size(name: str, num_tokens: object) -> int:
    return as_count(num_tokens, f"{name} of a hash", 1, at_most=MAX_TOKEN_ID)


def _check_algorithm(algorithm: Algorithm) -> Algorithm:
    if algorithm not in _ALGORITHMS:
        raise ConfigError(f"unknown hash algorithm {algorithm!r}; there are {', '.join(_ALGORITHMS)}")
    return algorithm


def _check_parent(parent: object) -> bytes:
    if not isinstance(parent, bytes) or len(parent) != HASH_BYTES:
        raise InvalidRequestError(f"parent must be a block hash or a root_hash, {HASH_BYTES} bytes, got {parent!r}")
    return parent


def _suffixes(extra_keys: ExtraKeysPerBlock | None, cbor: bool) -> list[bytes] | None:
    if extra_keys is None:
        return None
    if not isinstance(extra_keys, Sequence):
        raise InvalidRequestError(f"extra_keys must be a sequence with one entry for each block, got {extra_keys!r}")
    suffixes: list[bytes] = []
    last: Sequence[ExtraKey] | None = None
    for index, keys in enumerate(extra_keys):
        if suffixes and keys is last:  # a LoRA's blocks share one tuple
            suffixes.append(suffixes[-1])
            continue
        if keys is not None and not (isinstance(keys, (tuple, list)) and all(isinstance(k, ExtraKey) for k in keys)):
            raise InvalidRequestError(
                f"extra_keys[{index}] must hold ExtraKey objects, got {keys!r}; make them with LoRA, "
                f"MultiModalItem, PromptEmbeds or cache_salt_key"
            )
        suffixes.append(_suffix(keys or (), cbor))
        last = keys
    return suffixes
