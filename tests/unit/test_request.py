"""Requests: hashed once, extended by what is generated, and clear about bad arguments."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpager.errors import InvalidRequestError
from kvpager.extra_keys import LoRA, MultiModalItem, PromptEmbeds
from kvpager.hashing import BlockHasher, hash_blocks
from kvpager.request import Request, RequestLike, RequestStatus

HASHER = BlockHasher(4)


def test_a_new_request() -> None:
    request = Request("a", [1, 2, 3, 4, 5], block_hasher=HASHER, max_tokens=7, priority=-1, arrival_time=2.5)
    like: RequestLike = request
    assert (like.request_id, like.num_tokens, like.num_prompt_tokens, like.num_computed_tokens) == ("a", 5, 5, 0)
    assert (request.num_in_flight_tokens, request.num_preemptions, request.num_encoder_tokens) == (0, 0, 0)
    assert (request.max_tokens, request.priority, request.arrival_time) == (7, -1, 2.5)
    assert request.status is RequestStatus.WAITING
    assert not request.skip_reading_prefix_cache
    assert request.block_hashes == hash_blocks([1, 2, 3, 4], block_size=4)
    assert (request.all_token_ids, request.output_token_ids) == ([1, 2, 3, 4, 5], [])
    assert (request.lora_id, request.lora_name, request.extra_keys(0, 4)) == (None, None, None)
    assert "5 + 0 tokens" in repr(request)


@pytest.mark.parametrize("convert", [list, tuple, np.array, lambda tokens: array("q", tokens), bytes])
def test_prompts_of_every_kind(convert: Callable[[list[int]], Any]) -> None:
    request = Request("a", convert([1, 2, 3, 4, 5]), block_hasher=HASHER)
    assert request.all_token_ids == [1, 2, 3, 4, 5]
    assert all(type(token) is int for token in request.all_token_ids)
    assert request.block_hashes == hash_blocks([1, 2, 3, 4], block_size=4)


def test_the_callers_list_is_copied() -> None:
    tokens = [1, 2, 3]
    request = Request("a", tokens)
    tokens.append(4)
    request.append_output_token_ids(5)
    assert (tokens, request.all_token_ids) == ([1, 2, 3, 4], [1, 2, 3, 5])


@given(
    prompt=st.lists(st.integers(0, 9), min_size=1, max_size=20),
    steps=st.lists(st.integers(0, 9) | st.lists(st.integers(0, 9), max_size=9), max_size=9),
    salted=st.booleans(),
)
def test_appending_extends_the_chain(prompt: list[int], steps: list[int | list[int]], salted: bool) -> None:
    options: dict[str, Any] = {
        "block_hasher": HASHER,
        "cache_salt": "s" if salted else None,
        "multimodal": [MultiModalItem(identifier="i", offset=len(prompt) - 1, length=1)],
    }
    request = Request("a", prompt, **options)
    tokens = list(prompt)
    for step in steps:
        before = list(request.block_hashes)
        request.append_output_token_ids(step)
        tokens += [step] if isinstance(step, int) else step
        assert request.block_hashes[: len(before)] == before
        assert request.num_tokens == len(tokens) == request.num_prompt_tokens + request.num_output_tokens
    whole = Request("b", tokens, **options)
    assert request.block_hashes == whole.block_hashes
    assert request.output_token_ids == tokens[len(prompt) :]


def test_each_block_is_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed = []
    extend = BlockHasher.extend

    def counted(self: BlockHasher, hashes: Any, tokens: Any, keys: Any = None) -> None:
        before = len(hashes)
        extend(self, hashes, tokens, keys)
        hashed.append(len(hashes) - before)

    monkeypatch.setattr(BlockHasher, "extend", counted)
    request = Request("a", [0] * 9, block_hasher=HASHER)
    for token in range(10):
        request.append_output_token_ids(token)
    assert hashed == [2, 1, 1]
    assert len(request.block_hashes) == 4


def test_numpy_integers_are_tokens() -> None:
    request = Request("a", [1])
    request.append_output_token_ids(np.int64(7))  # type: ignore[arg-type]
    request.append_output_token_ids(np.array([8, 9]))  # type: ignore[arg-type]
    assert request.all_token_ids == [1, 7, 8, 9]


def test_without_a_hasher_there_are_no_hashes() -> None:
    request = Request("a", [1] * 100)
    request.append_output_token_ids([1] * 100)
    assert request.block_hashes == []


def test_what_makes_requests_differ() -> None:
    values = np.zeros((8, 2), np.float16)
    options: list[dict[str, Any]] = [
        {},
        {"cache_salt": "x"},
        {"lora": LoRA(name="x", version="x")},
        {"lora": LoRA(name="x", version="y")},
        {"multimodal": [MultiModalItem(identifier="x", offset=0, length=2)]},
        {"multimodal": [MultiModalItem(identifier="x", offset=1, length=2)]},
        {"prompt_embeds": PromptEmbeds(values=values)},
        {"prompt_embeds": PromptEmbeds(values=values + np.float16(1))},
        {"prompt_embeds": PromptEmbeds(values=values, mask=np.arange(8) % 2 == 0)},
    ]
    requests = [Request("a", [0] * 8, block_hasher=HASHER, **option) for option in options]
    for block in range(2):
        assert len({request.block_hashes[block] for request in requests}) == len(options)


def test_extra_keys_for_events() -> None:
    embeds = PromptEmbeds(values=np.zeros((8, 1), np.float16))
    request = Request(
        "a",
        [0] * 8,
        lora=LoRA(name="l", version="1", id=3),
        multimodal=[MultiModalItem(identifier="i", offset=3, length=2)],
        cache_salt="s",
        prompt_embeds=embeds,
    )
    assert (request.lora_id, request.lora_name) == (3, "l")
    assert request.extra_keys(0, 4) == ("l", ("i", 3), "s", embeds.extra_key(0, 4).plain)
    assert request.extra_keys(4, 8) == ("l", ("i", -1), embeds.extra_key(4, 8).plain)
    assert request.extra_keys(8, 12) == ("l", hashlib.sha256(b"").digest())


def test_embeddings_alone() -> None:
    request = Request("a", None, prompt_embeds=PromptEmbeds(values=np.ones((6, 2))), block_hasher=HASHER)
    request.append_output_token_ids([1, 2])
    assert request.all_token_ids == [0] * 6 + [1, 2]
    assert len(request.block_hashes) == 2


class TestFromHashes:
    HASHES = tuple(bytes([i]) * 32 for i in range(3))

    def test_it_never_extends(self) -> None:
        request = Request.from_hashes("a", 13, self.HASHES, max_tokens=50, priority=2, arrival_time=1.0)
        request.append_output_token_ids(5)
        request.append_output_token_ids([5] * 40)
        assert (request.num_prompt_tokens, request.num_tokens, request.num_output_tokens) == (13, 54, 41)
        assert request.block_hashes == list(self.HASHES)
        assert (request.all_token_ids, request.output_token_ids) == ([], [])
        assert not request.has_token_ids
        assert (request.max_tokens, request.priority, request.arrival_time) == (50, 2, 1.0)

    @pytest.mark.parametrize(
        ("num_tokens", "hashes", "says"),
        [
            (0, [], "num_prompt_tokens must be an integer of at least 1"),
            (1.5, [], "integer"),
            (5, [b"short"], "32 bytes"),
            (5, ["a" * 32], "32 bytes"),
            (5, [b"a" * 32, 7], "32 bytes"),
            (1, [b"a" * 32, b"b" * 32], "2 block hashes for 1 tokens"),
        ],
    )
    def test_refused(self, num_tokens: Any, hashes: Any, says: str) -> None:
        with pytest.raises(InvalidRequestError, match=says):
            Request.from_hashes("a", num_tokens, hashes)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"request_id": ""}, "request_id"),
        ({"request_id": 5}, "request_id"),
        ({"prompt_token_ids": []}, "no prompt tokens"),
        ({"prompt_token_ids": None}, "neither prompt_token_ids nor prompt_embeds"),
        ({"prompt_token_ids": [1, -1]}, r"token_ids\[1\]"),
        ({"prompt_token_ids": "text"}, "token_ids"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"priority": "high"}, "priority"),
        ({"arrival_time": float("nan")}, "arrival_time"),
        ({"arrival_time": "now"}, "arrival_time"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"lora": "sql"}, "lora"),
        ({"multimodal": [MultiModalItem(identifier="a", offset=1, length=2)]}, "multimodal item ends at 3"),
        ({"prompt_embeds": PromptEmbeds(values=np.zeros((3, 1)))}, "2 prompt tokens, but 3 prompt embeddings"),
        ({"block_hasher": 16}, "block_hasher"),
    ],
)
def test_refused(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidRequestError, match=says):
        Request(**{"request_id": "a", "prompt_token_ids": [1, 2], **arguments})


@pytest.mark.parametrize("bad", [-1, 2**32, 1.0, None, [1, -1], [1.5], "1", True])
def test_a_bad_output_token_changes_nothing(bad: Any) -> None:
    request = Request("a", [1, 2, 3], block_hasher=HASHER)
    with pytest.raises(InvalidRequestError, match="token"):
        request.append_output_token_ids(bad)
    assert (request.num_tokens, request.all_token_ids, request.block_hashes) == (3, [1, 2, 3], [])


def test_finished_states() -> None:
    finished = {status.name for status in RequestStatus if status.is_finished}
    assert finished == {"FINISHED_STOPPED", "FINISHED_LENGTH", "FINISHED_ABORTED"}
