"""From what a trace says of a prompt to block hashes, and the hits an infinite cache would have.

Block ids of a trace stand for content. The id of a block and the ids before it name a *node* of the
tree of all prompts so far, and a node names everything up to its end, as a chained block hash does.
So a node's number, spread over 32 bytes, serves as the hash: no token is made up, nothing is
hashed. That works where the cache's hash block divides the trace's block (each id stands for
several hashes) or is a multiple of it (every k-th node); elsewhere each id is expanded to its own
token ids, and those are hashed.

The tree also tells how many tokens of a prompt came before, in any earlier prompt: with a cache that
never forgets, exactly these would be hits. No manager is involved.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..counts import as_count
from ..hashing import HASH_BYTES, hash_blocks
from .records import BlockIds, TokenContent, TraceRequest

__all__ = ["Prompt", "PromptMaker"]

_Int64s = npt.NDArray[np.int64]
_UInt64s = npt.NDArray[np.uint64]

_PART_BITS = 20  # a node's hash blocks are numbered in the low bits of a key
_UNSHARED_KEY = 1 << 62  # keys of content that no other prompt has
_LAST_TOKEN_ID = 2**32 - 1
_MIXING_STEPS = (
    (np.uint64(32), np.uint64(0x9E3779B97F4A7C15)),
    (np.uint64(29), np.uint64(0xD6E8FEB86659FD93)),
)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt's block hashes, one for each full hash block, and how many of its leading tokens came before."""

    block_hashes: list[bytes]
    num_known_tokens: int


class PromptMaker:
    """Makes prompts, in order of arrival.

    ``hash_size`` is in tokens. With ``expand`` block ids are always expanded to token ids; the hits are
    the same. Holds a few numbers for each different block of the trace, nothing for a request.
    """

    def __init__(self, hash_size: int, *, expand: bool = False) -> None:
        self._hash_size = as_count(hash_size, "hash_size", 1)
        self._expand = expand
        self._tree = _PromptTree()
        self._seen: set[bytes] = set()
        self._num_prompts = 0

    def make(self, request: TraceRequest) -> Prompt:
        """The prompt of a request; it counts as seen from now on. O(hash blocks), or O(tokens) if they are hashed."""
        self._num_prompts += 1
        content = request.content
        if isinstance(content, BlockIds):
            return self._from_ids(content, request.num_prompt_tokens)
        if isinstance(content, TokenContent):
            return self._from_tokens(content)
        return Prompt(self._unshared(request.num_prompt_tokens // self._hash_size), 0)

    def _from_ids(self, content: BlockIds, num_tokens: int) -> Prompt:
        ids = _spell_out(content.runs)
        if not len(ids):
            return Prompt(self._unshared(num_tokens // self._hash_size), 0)
        num_last = min(content.block_size, num_tokens - (len(ids) - 1) * content.block_size)
        nodes, num_known = self._tree.visit(ids, content.block_size, num_last)
        keys = None if self._expand else _keys(nodes, content.block_size, self._hash_size)
        if keys is None:
            return Prompt(self._hash_expanded(ids, content.block_size, num_tokens), num_known)
        hashes = _digests(keys[: num_tokens // self._hash_size])
        return Prompt(hashes + self._unshared(num_tokens // self._hash_size - len(hashes)), num_known)

    def _hash_expanded(self, ids: _Int64s, block_size: int, num_tokens: int) -> list[bytes]:
        """Each id stands for ``block_size`` times itself; what is behind the last id, for this prompt's own token."""
        tokens = np.full(num_tokens, _LAST_TOKEN_ID - self._num_prompts, np.uint32)
        spelt = np.repeat(ids, block_size)[:num_tokens]
        tokens[: len(spelt)] = spelt
        return list(hash_blocks(tokens, block_size=self._hash_size))

    def _from_tokens(self, content: TokenContent) -> Prompt:
        hashes = list(hash_blocks(content.token_ids, block_size=self._hash_size))
        num_known = next((i for i, block_hash in enumerate(hashes) if block_hash not in self._seen), len(hashes))
        self._seen.update(hashes[num_known:])
        return Prompt(hashes, num_known * self._hash_size)

    def _unshared(self, num_hashes: int) -> list[bytes]:
        if not num_hashes:
            return []
        first = _UNSHARED_KEY + (self._num_prompts << _PART_BITS)
        return _digests(np.arange(first, first + num_hashes, dtype=np.int64))


class _PromptTree:
    """All prompts so far as a tree of block ids; nodes are numbered as they come up.

    Most traces give an id only ever behind the same ids, so that one look-up per id, in bulk, finds the nodes.
    Where an id comes up behind others than before, it gets one more node there, found one by one.
    """

    def __init__(self) -> None:
        self._node_of_id = np.full(1024, -1, np.int64)  # the node where an id came up first
        self._parent = np.empty(1024, np.int64)
        self._num_tokens = np.zeros(1024, np.int64)  # of the node's block, the most that any prompt had
        self._num_nodes = 0
        self._more_nodes: dict[tuple[int, int], int] = {}  # (parent, id): where an id came up elsewhere

    def visit(self, ids: _Int64s, block_size: int, num_last_tokens: int) -> tuple[_Int64s, int]:
        """Walk down ``ids``, adding what is new: the nodes, and how many leading tokens were there before.

        The last id stands for ``num_last_tokens``. O(ids).
        """
        first_new = self._num_nodes
        self._reserve(int(ids.max()) + 1, first_new + len(ids))
        nodes = self._walk_in_bulk(ids)
        if nodes is None:
            nodes = self._walk_singly(ids)
        num_known_nodes = int(np.count_nonzero(nodes < first_new))
        num_known = self._num_known_tokens(nodes, num_known_nodes, block_size, num_last_tokens)
        self._num_tokens[nodes[:-1]] = block_size
        self._num_tokens[nodes[-1]] = max(self._num_tokens[nodes[-1]], num_last_tokens)
        return nodes, num_known

    def _num_known_tokens(self, nodes: _Int64s, num_known_nodes: int, block_size: int, num_last_tokens: int) -> int:
        if not num_known_nodes:
            return 0
        of_prompt = num_last_tokens if num_known_nodes == len(nodes) else block_size
        in_tree = int(self._num_tokens[nodes[num_known_nodes - 1]])
        return (num_known_nodes - 1) * block_size + min(of_prompt, in_tree)

    def _walk_in_bulk(self, ids: _Int64s) -> _Int64s | None:
        """The nodes, if every id is where it first came up, or new and unlike the others; else None."""
        nodes = self._node_of_id[ids]
        num_known = int(np.count_nonzero(nodes >= 0))
        new = nodes[num_known:]
        if len(new) and (new.max() >= 0 or len(np.unique(ids[num_known:])) < len(new)):
            return None
        nodes[num_known:] = np.arange(self._num_nodes, self._num_nodes + len(new))
        parents = np.concatenate(([-1], nodes[:-1]))
        if not np.array_equal(self._parent[nodes[:num_known]], parents[:num_known]):
            return None
        self._parent[nodes[num_known:]] = parents[num_known:]
        self._node_of_id[ids[num_known:]] = nodes[num_known:]
        self._num_nodes += len(new)
        return nodes

    def _walk_singly(self, ids: _Int64s) -> _Int64s:
        nodes = np.empty(len(ids), np.int64)
        node = -1
        for position, block_id in enumerate(ids.tolist()):
            node = nodes[position] = self._child(node, block_id)
        return nodes

    def _child(self, parent: int, block_id: int) -> int:
        node = int(self._node_of_id[block_id])
        if node >= 0 and self._parent[node] != parent:
            node = self._more_nodes.setdefault((parent, block_id), self._num_nodes)
        elif node < 0:
            node = self._num_nodes
            self._node_of_id[block_id] = node
        if node == self._num_nodes:
            self._parent[node] = parent
            self._num_nodes += 1
        return node

    def _reserve(self, num_ids: int, num_nodes: int) -> None:
        self._node_of_id = _grown(self._node_of_id, num_ids, -1)
        self._parent = _grown(self._parent, num_nodes, -1)
        self._num_tokens = _grown(self._num_tokens, num_nodes, 0)


def _grown(array: _Int64s, size: int, fill: int) -> _Int64s:
    """The array, or a copy of at least ``size`` and twice the length."""
    if size <= len(array):
        return array
    larger = np.full(max(size, 2 * len(array)), fill, np.int64)
    larger[: len(array)] = array
    return larger


def _spell_out(runs: tuple[tuple[int, int], ...]) -> _Int64s:
    if not runs:
        return np.empty(0, np.int64)
    return np.concatenate([np.arange(first, first + count, dtype=np.int64) for first, count in runs])


def _keys(nodes: _Int64s, block_size: int, hash_size: int) -> _Int64s | None:
    """A number for each hash block, different for different content; None if the sizes don't allow it."""
    if hash_size % block_size == 0:
        per_hash = hash_size // block_size
        return nodes[per_hash - 1 :: per_hash] << _PART_BITS
    if block_size % hash_size == 0:
        parts = np.arange(block_size // hash_size)
        return ((nodes << _PART_BITS)[:, None] + parts).ravel()
    return None


def _digests(keys: _Int64s) -> list[bytes]:
    """32 bytes for each key, different for different keys and spread evenly (each step can be undone)."""
    words = np.empty((len(keys), HASH_BYTES // 8), np.uint64)
    mixed = keys.astype(np.uint64)
    for word in range(words.shape[1]):
        mixed = _mixed(mixed)
        words[:, word] = mixed
    joined = words.tobytes()
    return [joined[start : start + HASH_BYTES] for start in range(0, len(joined), HASH_BYTES)]


def _mixed(values: _UInt64s) -> _UInt64s:
    """A bijection of 64-bit numbers under which neighbours end up far apart: shifts and odd factors."""
    for shift, odd_factor in _MIXING_STEPS:
        values = (values ^ (values >> shift)) * odd_factor
    mixed: _UInt64s = values ^ (values >> np.uint64(32))
    return mixed
