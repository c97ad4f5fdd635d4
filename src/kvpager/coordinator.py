"""KVCacheCoordinator: makes the groups agree on one hit length and one admission decision."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import cycle
from typing import NamedTuple

from .attention import CrossAttention
from .attention.base import UNBOUNDED
from .config import CacheConfig, check_eagle
from .errors import InvariantError
from .pool import BlockList, BlockPool
from .request import EventSource, RequestLike
from .single_type import SingleTypeKVCacheManager, TokenRanges

__all__ = ["KVCacheCoordinator", "Match"]


class Match(NamedTuple):
    """The longest prefix that every group has: ``num_tokens``, and each group's blocks for exactly that.

    ``junction``: the longest aligned length beyond it that the groups which need the whole prefix
    still have (0: none): some other request shares it, and only window or state blocks are missing.
    """

    num_tokens: int
    hits: tuple[BlockList, ...]
    junction: int = 0


class KVCacheCoordinator:
    """One manager per group over one pool. With any number of groups it is the same algorithm."""

    def __init__(
        self,
        config: CacheConfig,
        pool: BlockPool,
        *,
        max_num_batched_tokens: int,
        use_eagle: bool,
        caching: bool,
        event_source: Callable[[RequestLike], EventSource],
    ) -> None:
        flagged = frozenset(i for i, group in enumerate(config.groups) if group.is_eagle)
        eagle_groups = flagged or frozenset(range(len(config.groups)) if use_eagle else ())
        check_eagle(config.specs, eagle_groups)
        self.alignment = config.alignment
        self.block_pool = pool
        # Where one group's tokens depend on where the prompt ended, the other layers' do too.
        limits = [spec.shareable_decoded for spec in config.specs if spec.shareable_decoded is not None]
        self._shareable_decoded = min(limits, default=None)
        self.single_type_managers = tuple(
            SingleTypeKVCacheManager(
                group_id,
                spec,
                pool,
                stride=spec.block_size // config.hash_size,
                alignment=config.alignment,
                is_eagle=group_id in eagle_groups,
                shareable_decoded=self._shareable_decoded,
                retention_interval=config.retention_interval,
                event_source=event_source,
            )
            for group_id, spec in enumerate(config.specs)
        )
        self._block_sizes = [spec.block_size for spec in config.specs]
        self._hash_size = config.hash_size
        self._max_step = max_num_batched_tokens
        # A cache that can never hit commits nothing either: entries that nobody can hit only mislead.
        self.can_hit = caching and bool(config.specs) and all(spec.can_hit for spec in config.specs)
        self.has_align_group = any(group.is_align for group in self.single_type_managers)
        self.hit_margin = max((group.hit_margin for group in self.single_type_managers), default=0)
        self._lookups = self._same_spec_together()
        self._no_hits = tuple(BlockList() for _ in config.specs)

    def _same_spec_together(self) -> list[tuple[SingleTypeKVCacheManager, list[int]]]:
        """Groups that accept the same hits, those that need the whole prefix first: they shorten it at once."""
        kinds: dict[object, tuple[SingleTypeKVCacheManager, list[int]]] = {}
        for group in self.single_type_managers:
            kinds.setdefault((group.spec, group.hit_margin), (group, []))[1].append(group.group_id)
        return sorted(kinds.values(), key=lambda kind: not kind[0].spec.needs_whole_prefix)

    # -- one hit length ------------------------------------------------------------------------

    def match(self, hashes: Sequence[bytes], max_tokens: int) -> Match:
        """The longest hit of at most ``max_tokens`` (a multiple of the alignment). Read only. O(prefix)."""
        if not self.can_hit:
            return self.no_match()
        cap = min(max_tokens, len(hashes) * self._hash_size)
        prefixes: dict[int, BlockList] = {}
        for group, ids in self._lookups:
            if group.spec.needs_whole_prefix:
                found = self.block_pool.prefix(ids, hashes, group.stride, cap // group.block_size)
                prefixes.update(zip(ids, found, strict=True))
        length, shared, agreeing = cap // self.alignment * self.alignment, 0, 0
        for group, ids in cycle(self._lookups):
            limit = len(prefixes[ids[0]]) * group.block_size if ids[0] in prefixes else cap
            accepted = max(0, min(length, limit - group.hit_margin)) // self.alignment * self.alignment
            if ids[0] not in prefixes:
                shared = shared or length
                accepted = self._longest_run(group, ids, hashes, accepted)
            agreeing = agreeing + 1 if accepted == length else 1
            length = accepted
            if agreeing == len(self._lookups):
                break
        hits = tuple(
            prefixes[group.group_id].slice(0, length // group.block_size)
            if group.group_id in prefixes
            else group.lookup(hashes, length)
            for group in self.single_type_managers
        )
        return Match(length, hits, shared if prefixes and shared > length else 0)

    def match_each(self, hashes: Sequence[bytes], max_tokens: int) -> list[tuple[BlockList, int]]:
        """Each group's longest hit if it were alone, aligned all the same. Read only. O(groups x prefix)."""
        cap = min(max_tokens, len(hashes) * self._hash_size) if self.can_hit else 0
        found = []
        for group in self.single_type_managers:
            ids = [group.group_id]
            if group.spec.needs_whole_prefix:
                prefix = self.block_pool.prefix(ids, hashes, group.stride, cap // group.block_size)[0]
                limit = len(prefix) * group.block_size - group.hit_margin
                length = max(0, limit) // self.alignment * self.alignment
                found.append((prefix.slice(0, length // group.block_size), length))
            else:
                length = max(0, cap - group.hit_margin) // self.alignment * self.alignment
                length = self._longest_run(group, ids, hashes, length)
                found.append((group.lookup(hashes, length), length))
        return found

    def _longest_run(
        self, group: SingleTypeKVCacheManager, ids: list[int], hashes: Sequence[bytes], length: int
    ) -> int:
        """The longest aligned hit up to ``length`` for kinds that need only a tail of the prefix.

        The rightmost missing block rules out every length that needs it, so no block is looked up twice.
        """
        while length:
            needed = group.needed_for_hit(length)
            start = self.block_pool.run_start(ids, hashes, group.stride, needed.start, needed.stop)
            if start == needed.start:
                return length
            before_gap = (start - 1) * group.block_size - group.hit_margin
            length = max(0, before_gap) // self.alignment * self.alignment
        return 0

    def num_shareable(self, num_tokens: int, num_prompt_tokens: int) -> int:
        """How many of the tokens may be hit: the K/V of the others depends on where the prompt ended. O(1)."""
        limit = self._shareable_decoded
        return num_tokens if limit is None else min(num_tokens, num_prompt_tokens + limit)

    def no_match(self) -> Match:
        """The answer where nothing can be hit. O(1)."""
        return Match(0, self._no_hits)

    def check_covers(self, hits: Sequence[BlockList], num_tokens: int) -> None:
        """Every group's blocks must cover exactly the hit; anything else would be garbage under a right hash."""
        for group, blocks in zip(self.single_type_managers, hits, strict=True):
            if len(blocks) * group.block_size != num_tokens:
                raise InvariantError(
                    f"group {group.group_id} covers {len(blocks)} blocks x {group.block_size} tokens of a hit of "
                    f"{num_tokens} tokens"
                )

    def serves(self, hits: Sequence[BlockList], hashes: Sequence[bytes]) -> bool:
        """Whether a hit looked up earlier can still be taken. O(hit)."""
        pairs = zip(self.single_type_managers, hits, strict=True)
        return all(group.serves(blocks, hashes) for group, blocks in pairs)

    def are_computed(self, hits: Sequence[BlockList]) -> bool:
        """False if a state in the hit is only computed in this very step. O(groups)."""
        pairs = zip(self.single_type_managers, hits, strict=True)
        return all(group.is_computed(blocks) for group, blocks in pairs)

    # -- one plan ------------------------------------------------------------------------------

    def plan(self, request_id: str, hits: Sequence[BlockList], tokens: TokenRanges) -> list[int]:
        """Free blocks that ``apply`` will take, per group. Read only. O(groups + hits)."""
        pairs = zip(self.single_type_managers, hits, strict=True)
        return [group.need(request_id, blocks, tokens) for group, blocks in pairs]

    def plan_sequence(
        self, request_id: str, hits: Sequence[BlockList], tokens: TokenRanges, num_lookahead_tokens: int
    ) -> list[int]:
        """Free blocks that reaching ``num_slots`` takes at most on the way, per group. Read only.

        Each step has slots for up to ``max_num_batched_tokens`` and the lookahead on top.
        """
        max_step = self._max_step + num_lookahead_tokens
        pairs = zip(self.single_type_managers, hits, strict=True)
        return [group.need_of_sequence(request_id, blocks, tokens, max_step) for group, blocks in pairs]

    def plan_alone(self, tokens: TokenRanges, num_lookahead_tokens: int) -> int:
        """Blocks that a sequence takes at most when it has the cache for itself. O(groups)."""
        max_step = self._max_step + num_lookahead_tokens
        return sum(group.most_held(tokens, max_step) for group in self.single_type_managers)

    def releasable(self, request_id: str, num_processed: int, num_prompt_tokens: int) -> int:
        """Blocks that ``release`` would free. Read only. O(newly dead)."""
        return sum(
            group.releasable(request_id, num_processed, num_prompt_tokens) for group in self.single_type_managers
        )

    # -- the deed ------------------------------------------------------------------------------

    def apply(self, request_id: str, hits: Sequence[BlockList] | None, tokens: TokenRanges) -> list[BlockList]:
        """Take what the plan said; gives what was appended for new tokens, per group. O(blocks).

        ``hits`` start a request's tables (None: it has them). All groups' hits are touched before
        any group allocates, so that no allocation evicts another group's hit.
        """
        groups = self.single_type_managers
        if hits is not None:
            for group, blocks in zip(groups, hits, strict=True):
                group.adopt(request_id, blocks, tokens)
        if tokens.num_computed > tokens.num_local:
            for group in groups:
                group.extend_loaded(request_id, tokens)
        return [group.extend(request_id, tokens) for group in groups]

    def step_ends(self, request_id: str, num_tokens: int) -> None:
        """A step or a load leaves the state after ``num_tokens`` tokens. O(groups)."""
        for group in self.single_type_managers:
            group.step_ends(request_id, num_tokens)

    def commit(self, request: RequestLike, num_tokens: int, junction: int) -> None:
        """Offer every group's blocks up to ``num_tokens`` to the index. O(newly full blocks)."""
        for group in self.single_type_managers:
            group.commit(request, num_tokens, junction)

    def log_stored(self, request: RequestLike, group_id: int, run: range) -> None:
        """Tell that a group's blocks of these positions are in the index now. O(tokens of the run)."""
        self.single_type_managers[group_id].log_stored(request, run)

    def tables(self, request_id: str) -> list[BlockList]:
        """The request's tables themselves, one a group. O(groups)."""
        return [group.tables[request_id] for group in self.single_type_managers]

    def release(self, request_id: str, num_processed: int, num_prompt_tokens: int, junction: int) -> None:
        """Give back what no later token reads. O(groups + newly dead)."""
        for group in self.single_type_managers:
            group.release(request_id, num_processed, num_prompt_tokens, junction)

    def pop(self, request_id: str) -> list[int]:
        """Forget a request and hand its blocks out. O(blocks)."""
        tables = [group.pop_table(request_id) for group in self.single_type_managers]
        return self.block_pool.pop_tables(tables, self._block_sizes)

    def get_blocks(self, request_id: str) -> list[BlockList]:
        """Copies of the request's tables, sinks first (empty ones for an unknown request). O(blocks)."""
        return [group.whole_table(request_id) for group in self.single_type_managers]

    def get_num_common_prefix_blocks(self, request_id: str) -> list[int]:
        """Leading blocks that all requests hold, per group (0 where kernels cannot share them)."""
        return [
            self.block_pool.num_shared_by(group.tables[request_id], len(group.tables))
            if group.spec.shared_prefix and request_id in group.tables
            else 0
            for group in self.single_type_managers
        ]

    def new_step_starts(self) -> None:
        """What the step before was computing is computed now."""
        self.block_pool.new_step_starts()

    # -- bounds --------------------------------------------------------------------------------

    def num_slots(self, request_id: str) -> int:
        """Token slots that the request's tables have. O(groups)."""
        return min(
            (group.spec.num_slots(len(group.tables[request_id])) for group in self.single_type_managers),
            default=UNBOUNDED,
        )

    # -- loads that failed ---------------------------------------------------------------------

    def holders_of(self, block_ids: set[int]) -> dict[str, int]:
        """Which requests hold any of the blocks, and the first token of the first one. O(held blocks)."""
        first: dict[str, int] = {}
        for group in self.single_type_managers:
            for request_id, table in group.tables.items():
                for position, block_id in enumerate(table.ids()):
                    if block_id in block_ids:
                        token = group.first_token(position)
                        first[request_id] = min(first.get(request_id, token), token)
                        break
        return first

    def blocks_from(self, request_id: str, token: int) -> set[int]:
        """The blocks of a request that hold tokens or states from ``token`` on. O(blocks)."""
        return {
            block_id
            for group in self.single_type_managers
            if not isinstance(group.spec, CrossAttention)  # an encoder's blocks depend on no token
            for block_id in group.tables[request_id].ids(token // group.block_size)
            if block_id
        }

    def can_resume(self, request_id: str, token: int, num_prompt_tokens: int) -> bool:
        """Whether the request's blocks allow to compute it again from ``token`` on. O(blocks)."""
        return all(group.can_resume(request_id, token, num_prompt_tokens) for group in self.single_type_managers)

    def uncommit(self, request_id: str, token: int) -> None:
        """Tokens from ``token`` on will be computed and committed again. O(groups)."""
        for group in self.single_type_managers:
            group.uncommit(request_id, token // group.block_size)
