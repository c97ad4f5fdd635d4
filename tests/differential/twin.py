"""Both managers under the same operations, compared after each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from . import reference
from .differences import DIFFERENCES
from .kvpager_side import KvpagerSide
from .layouts import Layout
from .reference import Ask, Index
from .side import Allocation, Extras, State, Verdict
from .vllm_side import VllmSide

Op = dict[str, Any]
"""An operation: its name under ``op`` and the arguments of the method of that name."""


@dataclass(kw_only=True)
class Live:
    """A request as the driver sees it."""

    rid: str
    num_prompt: int
    max_tokens: int
    skip: bool
    status: str = "waiting"
    computed: int = 0
    is_loaded: bool = False
    """Waits with blocks that a load has filled."""
    tokens: list[int]
    junction: int = 0
    """Where its prompt parts from another's, as kvpager's look-up told."""
    ends: set[int] = field(default_factory=set)
    """Token counts that a step, a hit or a load ended at."""


class Change(NamedTuple):
    """One change of the index, as an event tells it."""

    verb: str
    block_hash: bytes
    group: int
    facts: tuple[Any, ...] | None = None
    """What a BlockStored says of this block; None where tokens and hashes do not pair up."""


ALLOCATING = ("admit", "step", "decode")
NAMED_IN_EVENTS = {"reference_window": "full_attention"}
"""vLLM's events have no name of their own for the kind."""


class Twin:
    """kvpager and vLLM side by side.

    Every public method whose name an operation can carry does the same thing to both and returns whether
    it applied. ``counts`` tells what happened, ``differences`` how often each named difference did.
    """

    def __init__(self, layout: Layout, num_blocks: int, watermark: float = 0.0) -> None:
        self.layout = layout
        self.kinds = layout.flagged
        self.num_blocks = num_blocks
        self.watermark = int(watermark * num_blocks)
        self.vllm = VllmSide(layout, num_blocks, watermark=watermark)
        self.pager = KvpagerSide(layout, num_blocks, watermark=watermark)
        self.live: dict[str, Live] = {}
        self.popped: list[tuple[list[int], list[int]]] = []
        self.finished: list[list[int]] = []
        self.counts: Counter[str] = Counter()
        self.differences: Counter[str] = Counter()
        self.state = self.vllm.state()
        self._copies: Counter[tuple[bytes, int]] = Counter()
        self._index: set[tuple[bytes, int]] = set()
        self._steered = False
        self._fresh: set[int] = set()
        self._stored: Counter[tuple[bytes, int]] = Counter()
        self._admitted = [0, 0, 0]
        self._looked_up = 0

    # -- running operations ---------------------------------------------------------------------

    def apply(self, op: Op) -> bool:
        """Carry out one operation on both sides and compare. False: it does not apply now."""
        arguments = dict(op)
        name = arguments.pop("op")
        if "rid" in arguments and name != "new" and arguments["rid"] not in self.live:
            return False
        self._steered = False
        applied = bool(getattr(self, name)(**arguments))
        if applied:
            self.counts[name] += 1
            before = self.state.index
            self.compare()
            self._watch_index(name, before)
        return applied

    def compare(self) -> None:
        """Everything that later decisions depend on is equal, and the events tell it."""
        vllm, pager = self.vllm.state(), self.pager.state()
        _same("free queue", vllm.free, pager.free)
        _same("index", vllm.index, pager.index)
        _same("reference counts", vllm.refs, pager.refs)
        assert abs(vllm.usage - pager.usage) < 1e-9, f"usage: vLLM {vllm.usage}, kvpager {pager.usage}"
        for rid in self.live:
            _same(f"table of {rid}", self.vllm.table(rid), self.pager.table(rid))
            _same(f"hashes of {rid}", self.vllm.hashes(rid), self.pager.hashes(rid))
        _same("blocks to zero", sorted(set(self.vllm.new_ids())), sorted(set(self.pager.new_ids())))
        self._compare_events(vllm.index)
        self.state = vllm

    def close(self) -> None:
        """End of a run: free everything, compare the statistics."""
        for vllm, pager in self.popped:
            self._return(vllm, pager)
        self.popped.clear()
        for rid in list(self.live):
            self.apply({"op": "finish", "rid": rid})
        assert self.pager.reset() and self.vllm.reset()
        self.compare()
        self._compare_stats()

    # -- operations: requests -------------------------------------------------------------------

    def new(self, rid: str, prompt: list[int], max_tokens: int, **extras: Any) -> bool:
        """A request arrives."""
        if rid in self.live:
            return False
        for side in (self.vllm, self.pager):
            side.new(rid, prompt, max_tokens, Extras(**extras))
        skip = extras.get("skip", False) or not self.layout.caching
        self.live[rid] = Live(rid=rid, num_prompt=len(prompt), max_tokens=max_tokens, skip=skip, tokens=list(prompt))
        return True

    def look(self, rid: str) -> bool:
        """A look-up whose answer nobody uses."""
        live = self.live[rid]
        return live.status in ("waiting", "preempted") and not live.is_loaded and bool(self._hit(rid))

    def admit(
        self,
        rid: str,
        budget: int,
        token: int,
        lookahead: int = 0,
        external: int = 0,
        delay: bool = False,
        gate: bool = False,
        reserved: int = 0,
        scheduled: bool = True,
        aligned: bool = True,
    ) -> bool:
        """A waiting, preempted or loaded request gets its first blocks for this run."""
        live = self.live[rid]
        if live.status not in ("waiting", "preempted"):
            return False
        resumes = live.is_loaded
        (vllm_blocks, pager_blocks, hit, ids) = (None, None, 0, self._no_hits()) if resumes else self._hit(rid)
        known = live.computed + hit
        external = 0 if resumes else max(0, min(external, self._most_external(live, delay) - known))
        loads = delay and external > 0
        new = 0 if loads else self._step_end(live, known + external, budget, aligned)
        if new == 0 and not loads:
            return False
        allocation = Allocation(
            num_new=new,
            num_hit=hit,
            num_lookahead=0 if loads else lookahead,
            num_external=external,
            delay=loads,
            gate=gate,
            reserved=reserved,
            scheduled=scheduled,
        )
        if not self._allocate(live, allocation, ids, (vllm_blocks, pager_blocks)):
            self.counts["refused admissions"] += 1
            return True
        self.counts["hits"] += hit > 0
        self.counts["external"] += external > 0
        self._count_admission(live, hit, resumes)
        live.is_loaded = False
        live.ends |= {known, known + external}
        self._set_computed(live, known + external)
        self._set_status(live, "loading" if loads else "running")
        if not loads:
            self._computed(live, new, [token])
        return True

    def step(
        self, rid: str, budget: int, tokens: list[int], lookahead: int = 0, drafts: int = 0, aligned: bool = True
    ) -> bool:
        """A running request computes a chunk of its prompt, or decodes: ``tokens`` are the accepted ones."""
        live = self.live[rid]
        if live.status != "running":
            return False
        left = len(live.tokens) - live.computed
        if left > 1:
            new, accepted = self._step_end(live, live.computed, budget, aligned), tokens[:1]
        else:
            drafts = min(drafts, self.layout.max_model_len - len(live.tokens) - 1)
            drafts = max(0, min(drafts, live.num_prompt + live.max_tokens - len(live.tokens) - 1))
            new, accepted = 1 + drafts, tokens[: 1 + drafts]
            self.counts["drafts rejected"] += drafts + 1 - len(accepted)
        if new == 0:
            return False
        allocation = Allocation(num_new=new, num_lookahead=lookahead)
        if not self._allocate(live, allocation, self._no_hits()):
            self.counts["refused steps"] += 1
            return True
        self._computed(live, min(new, left), accepted)
        return True

    def decode(self, token: int, lookahead: int = 0) -> bool:
        """All decoding requests compute one token: one call of kvpager's beside a loop over vLLM's."""
        batch = [
            live for live in self.live.values() if live.status == "running" and live.computed + 1 == len(live.tokens)
        ]
        if not batch:
            return False
        rids = [live.rid for live in batch]
        vllm, pager = self.vllm.decode(rids, lookahead), self.pager.decode(rids, lookahead)
        _same("decode batch", vllm, pager)
        served, refused = vllm
        self.counts["decoded in batches"] += len(served)
        self.counts["refused steps"] += refused is not None
        for live, _ in zip(batch, served, strict=False):
            live.ends.add(live.computed + 1)
            self._take_back_align_commits(live)
            self._take_back_what_the_prompt_decides(live)
            self._take_back_junctions(live)
            self._computed(live, 1, [token])
        return True

    def loaded(self, rid: str) -> bool:
        """An external load is complete: its tokens may be committed."""
        live = self.live[rid]
        if live.status != "loading":
            return False
        for side in (self.vllm, self.pager):
            side.commit(rid, live.computed)
        if live.computed == len(live.tokens):
            self._set_computed(live, live.computed - 1)
        self._set_status(live, "waiting")
        live.is_loaded = True
        self._take_back_align_commits(live)
        self._take_back_what_the_prompt_decides(live)
        self._take_back_junctions(live)
        return True

    def rush(self, rid: str, token: int) -> bool:
        """An ordinary call while the load is under way: what it commits may not have arrived."""
        live = self.live[rid]
        if live.status != "loading" or live.computed >= len(live.tokens):
            return False
        before = self._hashed(self.vllm.state(), live)
        if not self._allocate(live, Allocation(num_new=1), self._no_hits(), steer_commits=False):
            return True
        false_hits = self._hashed(self.vllm.state(), live) - self._hashed(self.pager.state(), live)
        _same("commits of kvpager under a load", self._hashed(self.pager.state(), live), before)
        if false_hits:
            self._difference("delayed tokens")
            self._uncommit(false_hits)
        return self.finish(rid)

    def preempt(self, rid: str) -> bool:
        """A running request gives everything back and waits again."""
        live = self.live[rid]
        if live.status != "running" or not self.layout.preempts:
            return False
        self._free(rid)
        self._set_computed(live, 0)
        self._set_status(live, "preempted")
        live.ends.clear()
        return True

    def finish(self, rid: str) -> bool:
        """A request ends or is aborted, in any state."""
        self._free(rid)
        self._forget(rid)
        return True

    def pop(self, rid: str) -> bool:
        """A request ends, but somebody still reads its blocks."""
        vllm, pager = self.vllm.pop(rid), self.pager.pop(rid)
        if 0 in vllm:
            self._difference("nulls in popped blocks")
        _same("popped blocks", [block for block in vllm if block], pager)
        self.popped.append((vllm, pager))
        self._forget(rid)
        return True

    def give_back(self, which: int) -> bool:
        """Popped blocks return."""
        if not self.popped:
            return False
        self._return(*self.popped.pop(which % len(self.popped)))
        return True

    # -- operations: the cache ------------------------------------------------------------------

    def evict(self, ids: list[int]) -> bool:
        """Blocks are taken out of the index."""
        for side in (self.vllm, self.pager):
            side.evict({block for block in ids if block < self.num_blocks})
        return True

    def reset(self) -> bool:
        """The prefix cache is emptied, if nothing is in use."""
        vllm, pager = self.vllm.reset(), self.pager.reset()
        _same("reset", vllm, pager)
        self.counts["resets done"] += vllm
        return True

    def new_step(self) -> bool:
        """The scheduler starts a step."""
        for side in (self.vllm, self.pager):
            side.new_step()
        self._fresh.clear()
        return True

    def release(self, rid: str) -> bool:
        """Dead blocks are released without an allocation."""
        live = self.live[rid]
        self._release_dead(live, live.computed)
        return True

    def ask(self, rid: str, num_tokens: int) -> bool:
        """Questions that change nothing."""
        if self.live[rid].status != "running":
            return False
        _same("clipped table", self.vllm.clipped(rid, num_tokens), self.pager.clipped(rid, num_tokens))
        if not self.popped and self.layout.caching:
            vllm, pager = self.vllm.common(rid), self.pager.common(rid)
            full = [i for i, kind in enumerate(self.kinds) if kind.name == "full"]
            _same("common prefix", [vllm[i] for i in full], [pager[i] for i in full])
        return True

    # -- hits -----------------------------------------------------------------------------------

    def _no_hits(self) -> list[list[int]]:
        return [[] for _ in self.kinds]

    def _hit(self, rid: str) -> tuple[Any, Any, int, list[list[int]]]:
        """Both sides' blocks, and the hit that both go on with."""
        live = self.live[rid]
        vllm_blocks, vllm_hit, vllm_ids = self.vllm.hit(rid)
        pager_blocks, hit, ids = self.pager.hit(rid)
        self._looked_up += not live.skip
        live.junction = pager_blocks.junction
        expected = 0 if live.skip else self._longest_hit(rid, self.state.index, len(live.tokens) - 1)
        assert hit == expected, f"hit of {rid}: kvpager {hit}, by definition {expected}, vLLM {vllm_hit}"
        assert not hit or reference.covers(self.kinds, ids, hit), f"hit of {rid}: {hit} tokens, kvpager's blocks {ids}"
        if vllm_hit == hit and (not hit or reference.covers(self.kinds, vllm_ids, hit)):
            _same(f"blocks of {rid}'s hit", vllm_ids if hit else self._no_hits(), ids if hit else self._no_hits())
            return vllm_blocks, pager_blocks, hit, ids
        self._difference("hit thrown away" if vllm_hit < hit else "hit not covered")
        assert any(kind.eagle for kind in self.kinds), f"hit of {rid}: vLLM {vllm_hit} {vllm_ids}, kvpager {hit} {ids}"
        return self.vllm.blocks_of(ids), pager_blocks, hit, ids

    def _longest_hit(self, rid: str, index: Index, cap: int) -> int:
        return reference.longest_hit(self.kinds, index, self.vllm.hashes(rid), cap)

    # -- allocation -----------------------------------------------------------------------------

    def _allocate(
        self,
        live: Live,
        allocation: Allocation,
        ids: list[list[int]],
        blocks: tuple[Any, Any] = (None, None),
        steer_commits: bool = True,
    ) -> bool:
        """The same allocation on both sides; where a named difference makes one refuse, both do."""
        for_vllm = Allocation(**{**allocation.__dict__, "hit_blocks": blocks[0]})
        for_pager = Allocation(**{**allocation.__dict__, "hit_blocks": blocks[1]})
        pager = self.pager.verdict(live.rid, allocation)
        asked = self._ask(live, allocation, ids)
        vllm = self.vllm.verdict(live.rid, for_vllm)
        expected = self._expected(live, allocation, asked, ids)
        assert pager.accepts == expected.accepts, f"kvpager {pager}, by definition {expected}, vLLM {vllm}, {asked}"
        if vllm.accepts and pager.accepts:
            self._really_allocate(live, for_vllm, for_pager, expected, steer_commits)
            return True
        if not pager.accepts:
            assert self.pager.allocate(live.rid, for_pager) is None, f"the probe said {pager}, kvpager allocated"
        if vllm.accepts != pager.accepts:
            self._difference(self._reason(allocation, asked, vllm, expected))
        self._release_dead(live, live.computed + allocation.num_hit + allocation.num_external)
        return False

    def _really_allocate(
        self, live: Live, for_vllm: Allocation, for_pager: Allocation, expected: Verdict, steer_commits: bool
    ) -> None:
        free = len(self.vllm.state().free)
        vllm, pager = self.vllm.allocate(live.rid, for_vllm), self.pager.allocate(live.rid, for_pager)
        assert pager is not None, "the probe said that it fits, kvpager refused"
        _same(f"new blocks of {live.rid}", vllm, pager)
        _same("blocks taken and blocks needed", free - len(self.vllm.state().free), expected.step_need)
        live.ends.add(live.computed + for_vllm.num_hit + for_vllm.num_external + for_vllm.num_new)
        if steer_commits:
            live.ends |= {live.computed + for_vllm.num_hit + for_vllm.num_external}
            self._take_back_align_commits(live)
            self._take_back_what_the_prompt_decides(live)
            self._take_back_junctions(live)

    def _ask(self, live: Live, allocation: Allocation, ids: list[list[int]]) -> Ask:
        return Ask(
            num_local=live.computed + allocation.num_hit,
            num_external=allocation.num_external,
            num_new=allocation.num_new,
            num_lookahead=allocation.num_lookahead,
            max_model_len=self.layout.max_model_len,
            num_prompt=live.num_prompt,
            num_request_tokens=len(live.tokens),
            step=self.layout.step,
            tables=self.vllm.table(live.rid),
            hits=ids,
            refs=self.vllm.state().refs,
            has_running_state=self.vllm.running_state(live.rid),
        )

    def _expected(self, live: Live, allocation: Allocation, before: Ask, ids: list[list[int]]) -> Verdict:
        """What is right, by definition. Dead blocks have been released since ``before``."""
        watermark = self.watermark if allocation.scheduled and live.status in ("waiting", "preempted") else 0
        supply = len(self.state.free) - allocation.reserved - watermark
        gate = reference.gate_need(self.kinds, before) if allocation.gate else 0
        now = self._ask(live, allocation, ids)
        need = reference.step_need(self.kinds, now)
        fits = need <= len(self.vllm.state().free) - allocation.reserved - watermark
        never = not any(now.tables) and self._never(live, allocation)
        next_step = self._is_fresh(ids)
        at_gate = gate > supply
        return Verdict(
            accepts=fits and not (at_gate or never or next_step),
            gate_need=gate,
            step_need=need,
            never=never,
            next_step=next_step,
            at_gate=at_gate,
        )

    def _never(self, live: Live, allocation: Allocation) -> bool:
        most = min(live.num_prompt + live.max_tokens + allocation.num_lookahead, self.layout.max_model_len)
        step = self.layout.step + allocation.num_lookahead
        return reference.whole_life(self.kinds, live.num_prompt, most, step) > self.num_blocks - 1

    def _is_fresh(self, ids: list[list[int]]) -> bool:
        """Whether a Mamba hit starts from a state that this very step computes."""
        return any(
            kind.is_mamba and bool(hits) and hits[-1] in self._fresh for kind, hits in zip(self.kinds, ids, strict=True)
        )

    def _reason(self, allocation: Allocation, asked: Ask, vllm: Verdict, expected: Verdict) -> str:
        """The name of the difference between two verdicts, its direction asserted."""
        if expected.accepts:
            if vllm.next_step:
                return "older copy of a state"
            if vllm.at_gate:
                assert (vllm.gate_need or 0) > (expected.gate_need or 0), (vllm, expected)
                return "gate: over-counted"
            assert (vllm.step_need or 0) > (expected.step_need or 0), (vllm, expected)
            return "step: over-counted"
        if expected.never:
            return "never fits"
        if expected.at_gate:
            bare = reference.gate_need(self.kinds, asked, num_lookahead=0)
            if bare <= (vllm.gate_need or 0):
                assert allocation.reserved or allocation.num_lookahead, (vllm, expected)
                return "gate: lookahead and reserved"
            assert (vllm.gate_need or 0) < (expected.gate_need or 0), (vllm, expected)
            return "gate: under-counted"
        assert not expected.next_step and (vllm.step_need or 0) < (expected.step_need or 0), (vllm, expected)
        return "step: under-counted"

    def _take_back_align_commits(self, live: Live) -> None:
        """vLLM may commit a state that no step ended at: assert just that, and take it back."""
        off_boundary: set[int] = set()
        vllm, pager = self.vllm.state(), self.pager.state()
        hashed = {block for ids in vllm.index.values() for block in ids}
        ours = {block for ids in pager.index.values() for block in ids}
        for kind, table in zip(self.kinds, self.vllm.table(live.rid), strict=True):
            if kind.name == "mamba-align":
                off_boundary |= {
                    block
                    for position, block in enumerate(table)
                    if block in hashed and block not in ours and (position + 1) * kind.block not in live.ends
                }
        if off_boundary:
            self._difference("align commit")
            self._uncommit(off_boundary)

    def _take_back_what_the_prompt_decides(self, live: Live) -> None:
        """vLLM commits decoded tokens that no longer read all before them: assert just that, and take it back."""
        kept = [kind.kept for kind in self.kinds if kind.kept]
        if not kept:
            return
        theirs, ours, inexact = _keys(self.vllm.state().index), _keys(self.pager.state().index), set()
        for kind, table in zip(self.kinds, self.vllm.table(live.rid), strict=True):
            first = (live.num_prompt + min(kept) + 1) // kind.block
            inexact |= {block for block in table[first:] if block in theirs and block not in ours}
        if inexact:
            self._difference("reference window commit")
            self._uncommit(inexact)

    def _take_back_junctions(self, live: Live) -> None:
        """With sparse retention kvpager keeps what a hit at the junction needs: assert just that, and take it back."""
        if self.layout.retention is None:
            return
        theirs, ours, extra = _keys(self.vllm.state().index), _keys(self.pager.state().index), set()
        for kind, table in zip(self.kinds, self.pager.table(live.rid), strict=True):
            needed = range(kind.dead_blocks(live.junction), (live.junction + kind.eagle * kind.block) // kind.block)
            extra |= {table[i] for i in needed if i < len(table) and table[i] in ours and table[i] not in theirs}
        if extra:
            self._difference("junctions")
            self.pager.evict(extra)

    def _uncommit(self, blocks: set[int]) -> None:
        keys = _keys(self.vllm.state().index)
        self._stored.subtract(keys[block] for block in blocks)
        self.vllm.uncommit(blocks, {keys[block] for block in self._fresh & set(keys)})

    # -- what both sides do alike -----------------------------------------------------------------

    def _step_end(self, live: Live, start: int, budget: int, aligned: bool) -> int:
        """Tokens of the next step; for Mamba `align` it ends at a block boundary where it can."""
        new = max(0, min(budget, self.layout.step, len(live.tokens) - start))
        if not (aligned and self.layout.aligns_steps) or start >= max(live.num_prompt, len(live.tokens) - 1):
            return new
        block = self.layout.alignment
        last = max(0, len(live.tokens) // block * block - (block if self.layout.use_eagle else 0))
        if start + new < last:
            return (start + new) // block * block - start if (start + new) // block * block > start else new
        return last - start if start < last < start + new else new

    def _most_external(self, live: Live, delay: bool) -> int:
        """A load may cover the whole prompt only where its last token can be computed again."""
        whole = delay and all(kind.name == "full" for kind in self.kinds)
        return len(live.tokens) - (0 if whole else 1)

    def _computed(self, live: Live, num_tokens: int, sampled: list[int]) -> None:
        """A step's result: all of the request's tokens computed means that it samples."""
        self._set_computed(live, live.computed + num_tokens)
        live.ends.add(live.computed)
        if live.computed < len(live.tokens):
            return
        room = min(live.num_prompt + live.max_tokens, self.layout.max_model_len) - len(live.tokens)
        sampled = sampled[: max(0, room)]
        if not sampled:
            self.finish(live.rid)
            return
        self._set_computed(live, live.computed + len(sampled) - 1)
        live.tokens += sampled
        for side in (self.vllm, self.pager):
            side.append(live.rid, sampled)

    def _set_computed(self, live: Live, num_tokens: int) -> None:
        live.computed = num_tokens
        for side in (self.vllm, self.pager):
            side.set_computed(live.rid, num_tokens)

    def _set_status(self, live: Live, status: str) -> None:
        live.status = status
        for side in (self.vllm, self.pager):
            side.set_status(live.rid, status)

    def _release_dead(self, live: Live, num_tokens: int) -> None:
        for side in (self.vllm, self.pager):
            side.release_dead(live.rid, num_tokens, live.num_prompt)

    def _free(self, rid: str) -> None:
        for side in (self.vllm, self.pager):
            side.free(rid)

    def _forget(self, rid: str) -> None:
        self.finished.append(self.live.pop(rid).tokens)
        for side in (self.vllm, self.pager):
            side.forget(rid)

    def _return(self, vllm: list[int], pager: list[int]) -> None:
        self.vllm.give_back(vllm[::-1])
        self.pager.give_back(pager[::-1])

    # -- comparisons ------------------------------------------------------------------------------

    def _difference(self, name: str) -> None:
        assert name in DIFFERENCES, name
        self.differences[name] += 1
        self._steered = True

    def _hashed(self, state: State, live: Live) -> set[int]:
        hashed = {block for ids in state.index.values() for block in ids}
        return {block for table in self.vllm.table(live.rid) for block in table if block in hashed}

    def _watch_index(self, name: str, before: Index) -> None:
        """Count evictions, and remember what was committed since the step began."""
        old, new = _keys(before), _keys(self.state.index)
        self.counts["evictions"] += sum(old[block] != new.get(block) for block in old) if name in ALLOCATING else 0
        for key, times in (+self._stored).items():
            self._fresh |= set(self.state.index[key][-times:])
        self._stored.clear()

    def _compare_events(self, index: Index) -> None:
        vllm = self._first_and_last(self.vllm.events())
        pager = [change for event in self.pager.events() for change in _changes(event)]
        for change in pager:
            _apply(self._index, change)
        _same("index by kvpager's events", self._index, set(index))
        _same("index by vLLM's events", {key for key, copies in self._copies.items() if copies}, set(index))
        if not self._steered:
            _same("changes told", [change[:3] for change in vllm], [change[:3] for change in pager])
            for theirs, ours in zip(vllm, pager, strict=True):
                assert theirs.facts in (None, ours.facts), f"event: vLLM {_short(theirs)}, kvpager {_short(ours)}"

    def _first_and_last(self, events: Sequence[Any]) -> list[Change]:
        """vLLM's changes without those that leave the index as it is: further copies of a hash."""
        kept = []
        for event in events:
            if (
                type(event).__name__ == "BlockStored"
                and len(event.token_ids) != len(event.block_hashes) * event.block_size
            ):
                assert len(event.token_ids) > len(event.block_hashes) * event.block_size
                self.differences["event tokens"] += 1
            for change in _changes(event):
                key = (change.block_hash, change.group)
                if change.verb == "clear":
                    self._copies.clear()
                self._copies[key] += {"stored": 1, "removed": -1}.get(change.verb, 0)
                self._stored[key] += change.verb == "stored"
                if change.verb == "clear" or self._copies[key] == (change.verb == "stored"):
                    kept.append(change)
                else:
                    self.differences["one BlockStored per hash"] += 1
        return kept

    def _count_admission(self, live: Live, hit: int, resumes: bool) -> None:
        if not (resumes or live.skip):
            self._admitted = [a + b for a, b in zip(self._admitted, (1, len(live.tokens), hit), strict=True)]

    def _compare_stats(self) -> None:
        vllm, pager = self.vllm.stats(), self.pager.stats()
        _same("statistics of admitted requests", tuple(self._admitted), pager)
        _same("look-ups counted by vLLM", vllm[0], self._looked_up)
        assert vllm[0] >= pager[0] and vllm[1] >= pager[1]
        self.differences["statistics per retry"] += vllm[0] - pager[0]


def _keys(index: Index) -> dict[int, tuple[bytes, int]]:
    return {block: key for key, ids in index.items() for block in ids}


def _changes(event: Any) -> list[Change]:
    """One event as changes of single hashes."""
    if type(event).__name__ == "AllBlocksCleared":
        return [Change("clear", b"", -1)]
    if type(event).__name__ == "BlockRemoved":
        return [Change("removed", bytes(block_hash), event.group_idx) for block_hash in event.block_hashes]
    size, hashes = event.block_size, [bytes(block_hash) for block_hash in event.block_hashes]
    pairs_up = len(event.token_ids) == len(hashes) * size
    parents = [event.parent_block_hash, *hashes]
    return [
        Change("stored", block_hash, event.group_idx, _facts(event, i, parents[i]) if pairs_up else None)
        for i, block_hash in enumerate(hashes)
    ]


def _facts(event: Any, i: int, parent: bytes | None) -> tuple[Any, ...]:
    size = event.block_size
    return (
        parent,
        tuple(event.token_ids[i * size : (i + 1) * size]),
        size,
        event.lora_id,
        event.medium,
        event.lora_name,
        event.extra_keys[i],
        NAMED_IN_EVENTS.get(event.kv_cache_spec_kind, event.kv_cache_spec_kind),
        event.kv_cache_spec_sliding_window,
    )


def _apply(index: set[tuple[bytes, int]], change: Change) -> None:
    if change.verb == "clear":
        index.clear()
    elif change.verb == "stored":
        index.add((change.block_hash, change.group))
    else:
        index.discard((change.block_hash, change.group))


def _same(what: str, vllm: Any, pager: Any) -> None:
    if vllm != pager:
        if isinstance(vllm, set):
            vllm, pager = vllm - pager, pager - vllm
        if isinstance(vllm, dict):
            vllm, pager = _only(vllm, pager), _only(pager, vllm)
        raise AssertionError(f"{what}:\n    vLLM    {_short(vllm)}\n    kvpager {_short(pager)}")


def _only(mine: dict[Any, Any], other: dict[Any, Any]) -> dict[Any, Any]:
    return {key: value for key, value in mine.items() if other.get(key) != value}


def _short(value: Any) -> Any:
    """Hashes by their first digits, so that a failure can be read."""
    if isinstance(value, bytes):
        return value.hex()[:6]
    if isinstance(value, dict):
        return {_short(key): _short(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set)):
        return tuple(_short(item) for item in value)
    return value
