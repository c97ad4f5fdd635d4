"""The compiled part: what is touched per token or per block. Not public; use the modules above it."""

from collections.abc import Sequence
from typing import Any

def hash_chain(
    token_ids: Any, block_size: int, parent: bytes, suffixes: Sequence[bytes] | None, cbor: bool
) -> list[bytes]:
    """The hash of every full block; suffixes (one a block, or None) go behind its tokens in the message."""

def token_list(token_ids: Any) -> list[int]:
    """A new list of checked token ids."""
