"""Virtual tensors: what every physical block holds, so that a wrong text cannot hide.

A slot of an attention block holds the prefix that ends at its token, a state block the prefix
that the state has seen, both as nodes of ``Prefixes``, with the weights they were computed
under; and with the prompt's length where a reference window made that matter. Steps run in the
order in which they were scheduled, one batch at a time, through the tables they were scheduled
with. A step may read only what a kernel would find right: every token that is not dead, of exactly
its own prefix.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from .naive import NULL, Group, NaiveManager, Prefixes

__all__ = ["Device", "Item", "Tensors", "WrongText"]

GARBAGE = (-1, -1)


class WrongText(AssertionError):
    """A step read, or the index offers, something else than the request's own prefix."""


@dataclass
class Device:
    """What the device knows of a request: tokens so far, and how many of them are computed."""

    tokens: list[int]
    root: int  # of its prefixes: differs with the salt
    num_prompt_tokens: int
    weights: int
    num_encoder_tokens: int = 0
    processed: int = 0
    encoded: bool = False


@dataclass
class Item:
    """One request's share of a batch: ``count`` tokens, the last ``drafts`` of them guesses."""

    device: Device
    name: str
    tables: list[list[int]]
    start: int  # where the scheduler thought it starts
    count: int
    drafts: tuple[int, ...] = ()
    num_accepted: int = 0  # how many guesses turn out right
    next_token: int = 0  # sampled, if the step reaches the end of what is known
    load: range = range(0)  # tokens loaded by a connector before the step
    failed: frozenset[int] = frozenset()  # blocks of it whose load fails
    sampled: list[int] = field(default_factory=list)
    garbage: bool = False
    done: bool = False

    def blocks_written(self, groups: Sequence[Group]) -> set[int]:
        """Blocks that may not hold yet what the index says of them; rejected guesses before it move the
        step to the left of where it was scheduled."""
        spans = [range(min(self.start, self.device.processed), self.start + self.count), self.load]
        blocks: set[int] = set()
        for group in groups:
            table = self.tables[group.index]
            for span in spans:
                blocks |= {table[p // group.size] for p in span if p // group.size < len(table)}
            if group.kind in ("mamba", "cross_attention"):
                blocks |= set(table)
        return blocks - {NULL}


class Tensors:
    """The memory of the pool and the one way to change it: ``run`` a batch."""

    def __init__(self, groups: Sequence[Group], prefixes: Prefixes) -> None:
        self.groups = list(groups)
        self.prefixes = prefixes
        self.memory: dict[int, dict[int, tuple[Any, int]]] = {}  # block -> slot -> (content, weights)
        self.written_by: dict[int, int] = {}  # state block -> batch
        self.num_batches = 0
        self.garbage_allowed = False

    def run(self, batch: Iterable[Item]) -> None:
        """One forward pass: loads arrive, states are read, everything is written, attention reads."""
        items = list(batch)
        self.num_batches += 1
        for item in items:
            if item.load:
                self.load(item.device, item.tables, item.load, item.failed)
        for item in items:
            self._read_states(item)
        plans = [(item, item.device.processed, self._advance(item)) for item in items]
        for item, start, nodes in plans:
            self._write(item, start, nodes)
        for item, start, nodes in plans:
            self._read_tokens(item, start, nodes)
            if item.garbage:  # garbage in, garbage out, for later items of this pass already
                self._write(item, start, nodes)
            item.done = True

    def load(self, device: Device, tables: Sequence[Sequence[int]], span: range, failed: Iterable[int]) -> None:
        """A connector's data arrives in the blocks of the tokens in ``span``, but not in failed ones."""
        nodes = self._nodes(device, device.tokens)
        failed = set(failed)
        for group in self.groups:
            table = tables[group.index]
            if group.kind == "cross_attention":
                continue
            if group.kind == "mamba":
                block = table[0 if group.mode == "none" else (span.stop - 1) // group.size]
                good = (self._left(device, nodes, span.stop), device.weights)
                self.memory[block] = {0: GARBAGE if block in failed else good}
                self.written_by[block] = 0
                continue
            for p in span:
                block = table[p // group.size]
                if block != NULL:
                    good = (self._left(device, nodes, p + 1), device.weights)
                    self._put(block, p % group.size, GARBAGE if block in failed else good)
        device.processed = span.stop

    def spoil(self, device: Device, tables: Sequence[Sequence[int]], span: range) -> None:
        """The tokens in ``span`` did not arrive after all; a state that comes with them did not either."""
        for group in self.groups:
            table = tables[group.index]
            if not span or group.kind == "cross_attention":
                continue
            if group.kind == "mamba":
                self.memory[table[0 if group.mode == "none" else (span.stop - 1) // group.size]] = {0: GARBAGE}
                continue
            for p in span:
                if table[p // group.size] != NULL:
                    self._put(table[p // group.size], p % group.size, GARBAGE)

    # -- one item -------------------------------------------------------------------------------

    def _nodes(self, device: Device, tokens: Sequence[int]) -> list[int]:
        nodes = [device.root]
        for token in tokens:
            nodes.append(self.prefixes.child(nodes[-1], token))
        return nodes

    def _left(self, device: Device, nodes: Sequence[int], end: int) -> Any:
        """What ``end`` tokens leave: their prefix, and with a reference window also where the prompt ended."""
        prompt = device.num_prompt_tokens
        if end == 0 or all(group.is_shareable(end - 1, prompt) for group in self.groups):
            return nodes[end]
        return nodes[end], prompt

    def _advance(self, item: Item) -> list[int]:
        """Feed the tokens, sample; the nodes of everything fed, guesses included."""
        device, start = item.device, item.device.processed
        sure = item.count - len(item.drafts)
        fed = device.tokens[: start + sure]
        if len(fed) != start + sure:
            raise AssertionError(f"driver: {item.name} was scheduled beyond its tokens")
        nodes = self._nodes(device, [*fed, *item.drafts])
        if start + sure == len(device.tokens):
            item.sampled = [*item.drafts[: item.num_accepted], item.next_token]
            device.tokens += item.sampled
            device.processed = start + sure + item.num_accepted
        else:
            device.processed = start + sure
        return nodes

    def _read_states(self, item: Item) -> None:
        n = item.device.processed
        nodes = self._nodes(item.device, item.device.tokens[:n])
        for group in self.groups:
            if group.kind != "mamba" or n == 0:
                continue
            block = item.tables[group.index][0 if group.mode == "none" else (n - 1) // group.size]
            self._expect(
                item, block, 0, self._left(item.device, nodes, n), f"state after {n} tokens of group {group.index}"
            )
            if not item.garbage and self.written_by.get(block, 0) >= self.num_batches:
                raise WrongText(f"{item.name}: state block {block} is computed by this very step")

    def _write(self, item: Item, start: int, nodes: list[int]) -> None:
        for group in self.groups:
            table = item.tables[group.index]
            if group.kind == "cross_attention":
                self._encode(item, group, table)
            elif group.kind == "mamba":
                self._write_states(item, group, table, start, nodes)
            else:
                for p in range(start, start + item.count):
                    if p // group.size >= len(table) or table[p // group.size] == NULL:
                        raise WrongText(f"{item.name}: token {p} of group {group.index} has no slot in {table}")
                    left = self._left(item.device, nodes, p + 1)
                    value = GARBAGE if item.garbage else (left, item.device.weights)
                    self._put(table[p // group.size], p % group.size, value)

    def _write_states(self, item: Item, group: Group, table: Sequence[int], start: int, nodes: list[int]) -> None:
        end = item.device.processed
        ends = {end}
        if group.mode == "all":
            ends |= {n for n in range(start + 1, end + 1) if n % group.size == 0}
        for n in sorted(ends):
            block = table[0 if group.mode == "none" else (n - 1) // group.size]
            if block == NULL:
                raise WrongText(f"{item.name}: state after {n} tokens of group {group.index} has no block in {table}")
            left = self._left(item.device, nodes, n)
            self.memory[block] = {0: GARBAGE if item.garbage else (left, item.device.weights)}
            self.written_by[block] = self.num_batches

    def _encode(self, item: Item, group: Group, table: Sequence[int]) -> None:
        wanted = -(-item.device.num_encoder_tokens // group.size)
        if len(table) != wanted or NULL in table:
            raise WrongText(f"{item.name}: {item.device.num_encoder_tokens} encoder tokens, but blocks {table}")
        for j, block in enumerate(table):
            content = (id(item.device), j)
            if not item.device.encoded:
                self.memory[block] = {0: (content, 0)}
            elif self.memory[block] != {0: (content, 0)}:
                raise WrongText(f"{item.name}: block {block} no longer holds the encoder's output")
        item.device.encoded = True

    def _read_tokens(self, item: Item, start: int, nodes: list[int]) -> None:
        for group in self.groups:
            if group.kind in ("mamba", "cross_attention"):
                continue
            table = item.tables[group.index]
            dead = group.dead_tokens(start, item.device.num_prompt_tokens)
            for p in range(start):
                if p not in dead:
                    what = f"token {p} of group {group.index} (computing from {start})"
                    left = self._left(item.device, nodes, p + 1)
                    self._expect(item, table[p // group.size], p % group.size, left, what)

    def _expect(self, item: Item, block: int, slot: int, left: Any, what: str) -> None:
        got = self.memory.get(block, {}).get(slot) if block != NULL else None
        if got == GARBAGE and self.garbage_allowed:
            item.garbage = True
        elif got != (left, item.device.weights):
            raise WrongText(f"{item.name}: {what} should be in block {block} slot {slot}: {left}, found {got}")

    def _put(self, block: int, slot: int, value: tuple[Any, int]) -> None:
        self.memory.setdefault(block, {})[slot] = value

    # -- the index ------------------------------------------------------------------------------

    def check_index(self, model: NaiveManager, pending: set[int], weights: int) -> None:
        """Invariant 4: a block in the index has the content its hash says."""
        for (node, index), blocks in model.index.items():
            group = self.groups[index]
            for block in blocks:
                if block not in pending:
                    self._check_block(block, group, node, weights)

    def _check_block(self, block: int, group: Group, node: int, weights: int) -> None:
        memory = self.memory.get(block, {})
        if group.kind == "mamba":
            wanted = {0: (node, weights)}
            found = {0: memory.get(0)}
        else:
            wanted, found = {}, {}
            for slot in range(group.size - 1, -1, -1):
                wanted[slot] = (node, weights)
                found[slot] = memory.get(slot)
                node = self.prefixes.parent[node]
        if wanted != found:
            raise WrongText(f"the index says that block {block} of group {group.index} holds {wanted}, found {found}")
