"""Random operations for a twin, and the smallest list of them that still fails."""

from __future__ import annotations

import random
from collections.abc import Callable

from .layouts import Layout
from .twin import Op, Twin

WEIGHTS = {
    "new": 10,
    "look": 3,
    "admit": 20,
    "step": 38,
    "decode": 6,
    "loaded": 4,
    "rush": 1,
    "preempt": 3,
    "finish": 3,
    "pop": 2,
    "give_back": 3,
    "evict": 2,
    "reset": 1,
    "new_step": 10,
    "release": 2,
    "ask": 2,
    "drain": 1,
}
"""How often each operation is tried; ``drain`` ends all requests, so that a reset can succeed."""
STATUS = {
    "admit": ("waiting", "preempted"),
    "look": ("waiting", "preempted"),
    "loaded": ("loading",),
    "rush": ("loading",),
    "step": ("running",),
    "preempt": ("running",),
    "ask": ("running",),
}
"""Whom an operation is for; anybody, if it is not here."""
MOST_LIVE = 7


class Walk:
    """Operations for one twin, drawn from one seed."""

    def __init__(self, layout: Layout, seed: int) -> None:
        self.rng = random.Random(f"{layout.name}/{seed}")
        self.layout = layout
        self._stems = [self._tokens(48) for _ in range(3)]
        self._made = 0

    def next(self, twin: Twin) -> list[Op]:
        """The next operation, or a burst of them."""
        name = self.rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
        if name in ("new", "drain"):
            return getattr(self, f"_{name}")(twin)
        if name in ("decode", "give_back", "evict", "reset", "new_step"):
            return [{"op": name, **self._arguments(name, twin)}]
        able = [live.rid for live in twin.live.values() if live.status in STATUS.get(name, (live.status,))]
        return [{"op": name, "rid": self.rng.choice(able), **self._arguments(name, twin)}] if able else []

    def _tokens(self, count: int) -> list[int]:
        return self.rng.choices(range(3), k=count)

    def _new(self, twin: Twin) -> list[Op]:
        if len(twin.live) >= MOST_LIVE:
            return []
        self._made += 1
        rng, longest = self.rng, self.layout.max_model_len - 8
        stem = rng.choice(twin.finished[-5:] or self._stems) if rng.random() < 0.5 else rng.choice(self._stems)
        prompt = (stem[: rng.randint(0, longest - 4)] + self._tokens(rng.randint(1, 10)))[:longest]
        room = self.layout.max_model_len - len(prompt)
        extras: Op = {"skip": True} if rng.random() < 0.05 else {}
        if rng.random() < 0.1:
            extras["salt"] = rng.choice(("pepper", "thyme"))
        if rng.random() < 0.1:
            extras["lora"] = rng.choice(("poet", "clerk"))
        return [{"op": "new", "rid": f"r{self._made}", "prompt": prompt, "max_tokens": rng.randint(1, room), **extras}]

    def _drain(self, twin: Twin) -> list[Op]:
        if self.rng.random() < 0.8:
            return []
        ends: list[Op] = [{"op": "finish", "rid": rid} for rid in twin.live]
        return [*ends, *({"op": "give_back", "which": 0} for _ in twin.popped), {"op": "reset"}]

    def _arguments(self, name: str, twin: Twin) -> Op:
        make: Callable[[Twin], Op] = getattr(self, f"_for_{name}", lambda twin: {})
        return make(twin)

    def _for_admit(self, twin: Twin) -> Op:
        rng = self.rng
        external = rng.random() < 0.2
        size = rng.randint(1, 40)
        if rng.random() < 0.7:
            size = max(1, size // self.layout.alignment) * self.layout.alignment
        return {
            "budget": rng.randint(1, self.layout.step),
            "token": rng.randrange(3),
            "lookahead": rng.choice((0, self.layout.lookahead)),
            "external": size if external else 0,
            "delay": rng.random() < 0.6,
            "gate": rng.random() < 0.5,
            "reserved": rng.choice((0, 0, 0, rng.randint(0, 6))),
            "scheduled": rng.random() < 0.7,
            "aligned": rng.random() < 0.9,
        }

    def _for_step(self, twin: Twin) -> Op:
        rng = self.rng
        drafts = rng.randint(0, self.layout.drafts)
        return {
            "budget": rng.randint(1, self.layout.step),
            "tokens": self._tokens(rng.randint(1, 1 + drafts)),
            "lookahead": rng.choice((0, self.layout.lookahead)),
            "drafts": drafts,
            "aligned": rng.random() < 0.9,
        }

    def _for_decode(self, twin: Twin) -> Op:
        return {"token": self.rng.randrange(3), "lookahead": self.rng.choice((0, self.layout.lookahead))}

    def _for_rush(self, twin: Twin) -> Op:
        return {"token": self.rng.randrange(3)}

    def _for_give_back(self, twin: Twin) -> Op:
        return {"which": self.rng.randrange(8)}

    def _for_evict(self, twin: Twin) -> Op:
        return {"ids": sorted(self.rng.sample(range(twin.num_blocks), self.rng.randint(1, 5)))}

    def _for_ask(self, twin: Twin) -> Op:
        return {"num_tokens": self.rng.randint(1, self.layout.max_model_len)}


def run(layout: Layout, seed: int, num_steps: int, history: list[Op] | None = None) -> Twin:
    """Walk until ``num_steps`` operations have been carried out; ``history`` collects them."""
    twin, walk, done = make_twin(layout, seed), Walk(layout, seed), 0
    while done < num_steps:
        for op in walk.next(twin):
            if history is not None:
                history.append(op)
            done += twin.apply(op)
            if done % 64 == 0:
                twin.pager.check()
    twin.close()
    return twin


def make_twin(layout: Layout, seed: int) -> Twin:
    """The twin of a seed: pool sizes and watermarks take turns."""
    sizes = layout.num_blocks
    return Twin(layout, sizes[seed % len(sizes)], watermark=(0.0, 0.0, 0.08)[seed % 3])


def failure(layout: Layout, seed: int, ops: list[Op]) -> str | None:
    """What goes wrong with these operations, if anything does."""
    twin = make_twin(layout, seed)
    try:
        for op in ops:
            twin.apply(op)
            twin.pager.check()
        twin.close()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def shrink(layout: Layout, seed: int, ops: list[Op], most_tries: int = 3000) -> list[Op]:
    """Fewer operations that fail in the same way, by leaving out ever smaller pieces."""
    first = failure(layout, seed, ops)
    kind = (first or "")[:24]
    size, tries = max(1, len(ops) // 2), 0
    while size and tries < most_tries:
        start = 0
        while start < len(ops) and tries < most_tries:
            fewer = ops[:start] + ops[start + size :]
            tries += 1
            if (failure(layout, seed, fewer) or "")[:24] == kind:
                ops = fewer
            else:
                start += size
        size //= 2
    return ops
