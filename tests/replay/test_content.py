"""Block ids as hashes: the same hits as with made-up tokens, and the ideal counted by something simpler."""

from __future__ import annotations

import random

import pytest

from kvpager.replay import BlockIds, PromptMaker, TokenContent, TraceRequest

BLOCK = 8


def request(ids: list[int], num_tokens: int | None = None, block_size: int = BLOCK) -> TraceRequest:
    length = len(ids) * block_size if num_tokens is None else num_tokens
    return TraceRequest(0.0, length, 1, BlockIds(block_size, tuple((i, 1) for i in ids)))


def common_prefix(left: list[object], right: list[object]) -> int:
    return next((n for n, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))


def random_requests(seed: int) -> list[TraceRequest]:
    """Prompts that share prefixes; ids at several places, twice in a prompt, partly filled, missing at the end."""
    rng = random.Random(seed)
    prompts: list[list[int]] = [[]]
    made = []
    for _ in range(60):
        base = rng.choice(prompts)
        ids = base[: rng.randint(0, len(base))] + [rng.randint(0, 12) for _ in range(rng.randint(1, 4))]
        prompts.append(ids)
        made.append(request(ids, len(ids) * BLOCK + rng.choice([0, 0, -3, -7, 5])))
    return made


def spelled(record: TraceRequest, number: int) -> list[object]:
    """The prompt token by token; a token behind the ids is nobody else's."""
    assert isinstance(record.content, BlockIds)
    tokens: list[object] = [(first, i) for first, _ in record.content.runs for i in range(BLOCK)][
        : record.num_prompt_tokens
    ]
    return tokens + [("own", number, i) for i in range(record.num_prompt_tokens - len(tokens))]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("hash_size", [1, 4, 8, 16, 24, 3, 12])
def test_hashes_agree_exactly_where_prefixes_agree(seed: int, hash_size: int) -> None:
    """Both ways, against comparing the spelled-out prompts pair by pair."""
    records = random_requests(seed)
    texts = [spelled(record, number) for number, record in enumerate(records)]
    for expand in (False, True):
        maker = PromptMaker(hash_size, expand=expand)
        prompts = [maker.make(record) for record in records]
        for i, (text, prompt) in enumerate(zip(texts, prompts, strict=True)):
            assert len(prompt.block_hashes) == len(text) // hash_size
            assert {len(block_hash) for block_hash in prompt.block_hashes} <= {32}
            known = [common_prefix(text, earlier) for earlier in texts[:i]]
            assert prompt.num_known_tokens == max(known, default=0)
            for j, num_tokens in enumerate(known):
                shared = common_prefix(list(prompt.block_hashes), list(prompts[j].block_hashes))
                assert shared == num_tokens // hash_size
                assert not set(prompt.block_hashes[shared:]) & set(prompts[j].block_hashes[shared:])


def test_the_last_block_may_be_filled_further_by_a_later_prompt() -> None:
    maker = PromptMaker(4)
    assert maker.make(request([1, 2], 13)).num_known_tokens == 0
    assert maker.make(request([1, 2, 3])).num_known_tokens == 13
    assert maker.make(request([1, 2], 15)).num_known_tokens == 15


def test_block_sizes_of_a_trace_may_differ() -> None:
    maker = PromptMaker(4)
    small = maker.make(request([0, 1, 2, 3], block_size=4)).block_hashes
    large = maker.make(request([4, 5, 6, 7], block_size=8)).block_hashes
    assert len({*small, *large}) == 12


def test_token_prompts_are_known_in_whole_blocks() -> None:
    maker = PromptMaker(4)
    first = maker.make(TraceRequest(0.0, 10, 1, TokenContent(list(range(10)))))
    second = maker.make(TraceRequest(0.0, 9, 1, TokenContent([*range(8), 99])))
    assert (first.num_known_tokens, second.num_known_tokens) == (0, 8)
    assert first.block_hashes == second.block_hashes


def test_unknown_content_is_nobody_elses() -> None:
    maker = PromptMaker(4)
    first, second = (maker.make(TraceRequest(0.0, 11, 1, None)) for _ in range(2))
    assert len({*first.block_hashes, *second.block_hashes}) == 4
    assert second.num_known_tokens == 0
    assert maker.make(TraceRequest(0.0, 3, 1, None)).block_hashes == []
    assert maker.make(TraceRequest(0.0, 3, 1, BlockIds(8, ()))).block_hashes == []


def test_hashes_are_spread_evenly() -> None:
    """A hash table may take any bytes of them: neighbouring ids share no bucket more often than chance has it."""
    hashes = PromptMaker(BLOCK).make(request(list(range(4096)))).block_hashes
    for word in range(4):
        buckets = [int.from_bytes(h[8 * word : 8 * word + 8], "little") % 4096 for h in hashes]
        assert len(set(buckets)) > 0.6 * 4096  # chance: 1 - 1/e
