"""Chat sessions and shared prompts on a hybrid model: what stays when the pool is full.

One full-attention group and five sliding windows of 1,024 tokens share 10,000 blocks of 16 tokens.
Sessions of 8,192 tokens take turns, round robin; each turn is 256 tokens longer. What a session
leaves behind is mostly window blocks that no later turn reads; whether those or other sessions'
prefixes are evicted first decides the hit rate.

``python -m benchmarks.hybrid_sessions`` prints the numbers and draws docs/hybrid-sessions.png.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Literal

from kvpager.attention import FullAttention, SlidingWindow
from kvpager.config import CacheConfig
from kvpager.hashing import BlockHasher
from kvpager.manager import KVCacheManager
from kvpager.request import Request

Order = Literal["dead_first", "recency"]
ORDERS: tuple[Order, ...] = ("dead_first", "recency")
BLOCK = 16
WINDOW = 1024
NUM_WINDOW_GROUPS = 5
NUM_BLOCKS = 10_000
STEP = 2048
FIRST_LENGTH = 8192
MORE_EACH_TURN = 256
TURNS = range(2, 7)
SESSIONS = range(2, 15)


@dataclass(frozen=True, kw_only=True)
class Variant:
    """How a turn is computed: prefill steps of at most ``step`` tokens, then ``num_decoded`` tokens."""

    name: str
    step: int = STEP
    num_decoded: int = 0


VARIANTS = (
    Variant(name=f"steps of {STEP:,}"),
    Variant(name="one step", step=1 << 20),
    Variant(name="64 decoded tokens a turn", num_decoded=64),
)


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One turn of one session: what it could have hit, what it did, and how full the pool had to be for all."""

    turn: int
    num_previous: int  # tokens of the turn before that were computed
    num_tokens: int
    num_hit: int
    demand: float  # of the pool: what the next turns of all sessions need

    @property
    def best(self) -> int:
        """Tokens of the turn before in whole blocks."""
        return self.num_previous // BLOCK * BLOCK


def new_manager(order: Order) -> KVCacheManager:
    """The cache of both scenarios."""
    window = SlidingWindow(block_size=BLOCK, window=WINDOW)
    config = CacheConfig.uniform(NUM_BLOCKS, [FullAttention(block_size=BLOCK), *[window] * NUM_WINDOW_GROUPS])
    return KVCacheManager(config, max_model_len=1 << 15, max_num_batched_tokens=STEP, eviction_order=order)


def serve(manager: KVCacheManager, request: Request, variant: Variant = VARIANTS[0]) -> int:
    """One request from admission to its end, alone; the tokens it hit."""
    manager.new_step_starts()
    blocks, num_hit = manager.get_computed_blocks(request)
    num_new = min(variant.step, request.num_tokens - num_hit)
    if manager.allocate_slots(request, num_new, num_hit, blocks) is None:
        raise RuntimeError(f"{request.request_id} does not fit")
    request.num_computed_tokens = num_hit + num_new
    for num_new in remaining_steps(request, variant):
        manager.new_step_starts()
        if manager.allocate_slots(request, num_new) is None:
            raise RuntimeError(f"{request.request_id} does not fit")
        request.num_computed_tokens += num_new
    manager.free(request)
    return num_hit


def remaining_steps(request: Request, variant: Variant) -> Iterator[int]:
    """Token counts of the steps after the first; sampled tokens are appended as it goes."""
    while request.num_computed_tokens < request.num_tokens:
        yield min(variant.step, request.num_tokens - request.num_computed_tokens)
    for i in range(variant.num_decoded):
        request.append_output_token_ids(decoded_token(i))
        if i + 1 < variant.num_decoded:  # the last one sampled is never computed
            yield 1


def decoded_token(i: int) -> int:
    """What the model says, i-th."""
    return 1_000_000 + i


def sessions(order: Order, num_sessions: int, variant: Variant) -> list[Turn]:
    """All turns but the first of ``num_sessions`` sessions, round robin."""
    manager = new_manager(order)
    hasher = BlockHasher.for_config(manager.kv_cache_config)
    histories = [[s * 100_000 + i for i in range(FIRST_LENGTH)] for s in range(num_sessions)]
    computed = [0] * num_sessions
    turns = []
    for turn in range(1, TURNS.stop):
        for s, tokens in enumerate(histories):
            request = Request(f"session {s} turn {turn}", tokens, block_hasher=hasher)
            demand = sum(num_needed(n) for n in computed) / NUM_BLOCKS
            num_hit = serve(manager, request, variant)
            if turn in TURNS:
                turns.append(
                    Turn(
                        turn=turn,
                        num_previous=computed[s],
                        num_tokens=len(tokens),
                        num_hit=num_hit,
                        demand=demand,
                    )
                )
            computed[s] = request.num_computed_tokens
            tokens += [decoded_token(i) for i in range(variant.num_decoded)]
            start = s * 100_000 + 50_000 + turn * 1000
            tokens += range(start, start + MORE_EACH_TURN - variant.num_decoded)
    return turns


def num_needed(num_computed: int) -> int:
    """Blocks that the next turn of a session reads: its whole prefix, and each window's tail."""
    full = num_computed // BLOCK
    return full + NUM_WINDOW_GROUPS * min(full, -(-(WINDOW - 1) // BLOCK))


def num_held_at_most(num_tokens: int, variant: Variant) -> int:
    """Blocks that a prompt without a hit holds at most on its way."""
    full = -(-num_tokens // BLOCK)
    return full + NUM_WINDOW_GROUPS * min(full, -(-(WINDOW - 1 + variant.step) // BLOCK) + 1)


def hit_rate(turns: Sequence[Turn]) -> float:
    """Tokens hit, of those that could be: all but the last of each prompt, in whole blocks."""
    return sum(t.num_hit for t in turns) / sum((t.num_tokens - 1) // BLOCK * BLOCK for t in turns)


def best_rate(turns: Sequence[Turn]) -> float:
    """The hit rate if nothing that the next turn needs is ever evicted."""
    return sum(t.best for t in turns) / sum((t.num_tokens - 1) // BLOCK * BLOCK for t in turns)


NUM_SHARED, NUM_OWN = 4096, 1024
NUM_FILLERS = 60


def shared_prompts(order: Order, *, one_shots: int, together: bool, num_rounds: int = 8) -> list[int]:
    """Tokens hit on the shared part, visit by visit.

    Two prompts share 4,096 tokens and have 1,024 of their own. ``one_shots`` prompts that nobody
    repeats come between two visits (``together``: between two visits of both), on a pool that 60
    of them have filled before.
    """
    manager = new_manager(order)
    hasher = BlockHasher.for_config(manager.kv_cache_config)
    strangers = (
        Request(f"one-shot {i}", range(i * 10_000, i * 10_000 + NUM_SHARED + NUM_OWN), block_hasher=hasher)
        for i in count(1)
    )
    for _ in range(NUM_FILLERS):
        serve(manager, next(strangers))
    shared = range(900_000_000, 900_000_000 + NUM_SHARED)
    hits = []
    for visit in range(2 * num_rounds):
        own = range(910_000_000 + visit % 2 * 10_000, 910_000_000 + visit % 2 * 10_000 + NUM_OWN)
        request = Request(f"visit {visit}", [*shared, *own], block_hasher=hasher)
        hits.append(min(NUM_SHARED, serve(manager, request)))
        if not together or visit % 2:
            for _ in range(one_shots):
                serve(manager, next(strangers))
    return hits


def draw(rates: dict[tuple[str, str], list[float]], path: Path) -> None:
    """Hit rate against the number of sessions, a panel per variant."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(VARIANTS), figsize=(12, 3.8), sharey=True, layout="constrained")
    for axis, variant in zip(axes, VARIANTS, strict=True):
        axis.plot(
            SESSIONS,
            rates[variant.name, "best"],
            color="0.75",
            lw=6,
            solid_capstyle="round",
            label="nothing useful evicted",
        )
        axis.plot(
            SESSIONS, rates[variant.name, "dead_first"], color="C0", marker="o", ms=4, label="dead first (default)"
        )
        axis.plot(SESSIONS, rates[variant.name, "recency"], color="C3", marker="s", ms=4, label="recency (one queue)")
        axis.set(title=variant.name, xlabel="sessions taking turns", ylim=(-0.03, 1.05), xticks=list(SESSIONS)[::2])
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("hit rate, turns 2 to 6")
    axes[-1].legend(loc="center", fontsize="small")
    figure.suptitle(
        f"1 full + {NUM_WINDOW_GROUPS} window groups (window {WINDOW:,}, blocks of {BLOCK}), "
        f"{NUM_BLOCKS:,} blocks, sessions from {FIRST_LENGTH:,} tokens",
        fontsize="medium",
    )
    figure.savefig(path, dpi=150)


def main() -> int:
    """Print both scenarios and draw the first."""
    rates: dict[tuple[str, str], list[float]] = {}
    for variant in VARIANTS:
        print(f"hit rate by number of sessions, {variant.name}:")
        for order in ORDERS:
            runs = [sessions(order, n, variant) for n in SESSIONS]
            rates[variant.name, order] = [hit_rate(turns) for turns in runs]
            rates[variant.name, "best"] = [best_rate(turns) for turns in runs]
            row = zip(SESSIONS, rates[variant.name, order], strict=True)
            print(f"  {order:10}", " ".join(f"{n}:{rate:.3f}" for n, rate in row))
    for together in (True, False):
        for one_shots in (1, 2, 4, 6, 8, 12, 14):
            hits = [sum(shared_prompts(o, one_shots=one_shots, together=together)) for o in ORDERS]
            how = "both prompts" if together else "one prompt"
            both = ", ".join(f"{n} ({order})" for order, n in zip(ORDERS, hits, strict=True))
            print(f"shared tokens hit, {how}, then {one_shots} one-shots: {both}")
    path = Path(__file__).parent.parent / "docs" / "hybrid-sessions.png"
    draw(rates, path)
    print(f"drawn: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
