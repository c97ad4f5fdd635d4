"""`sha256_cbor` against vLLM 0.25.1's algorithm of that name, request by request."""

from __future__ import annotations

import random
import string
from typing import Any

import numpy as np
import pytest

from kvpager.extra_keys import LoRA, MultiModalItem, PromptEmbeds
from kvpager.hashing import BlockHasher
from kvpager.request import Request

pytest.importorskip("vllm", reason="vLLM 0.25.1 is not importable here: this compares with its hashes")

import torch
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core import kv_cache_utils
from vllm.v1.request import Request as TheirRequest

NUM_REQUESTS = 400
SEED = "kvpager"


@pytest.fixture(autouse=True)
def _same_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", SEED)
    monkeypatch.setattr(kv_cache_utils, "NONE_HASH", b"", raising=False)  # so that other tests get theirs back
    kv_cache_utils.init_none_hash(sha256_cbor)


def make_arguments(rng: random.Random) -> dict[str, Any]:
    """A random request in our words; every extra is there in about half of them."""

    def text() -> str:
        return "".join(rng.choices(string.printable + "äß→𝄞", k=rng.choice((1, 3, 23, 24, 64, 300))))

    length = rng.randint(1, 200)
    items, end = [], 0
    while rng.random() < 0.6 and end < length - 1:
        offset = rng.randint(end, length - 1)
        item = MultiModalItem(identifier=text(), offset=offset, length=rng.randint(1, min(length - offset, 70)))
        items.append(item)
        end = item.end
    top = rng.choice((20, 300, 70_000, 2**32))
    values = np.frombuffer(rng.randbytes(length * 8), np.float16).reshape(length, 4)
    return {
        "prompt_token_ids": [rng.randrange(top) for _ in range(length)],
        "cache_salt": text() if rng.random() < 0.5 else None,
        "lora": LoRA(name=text(), id=rng.randint(1, 9)) if rng.random() < 0.5 else None,
        "multimodal": items,
        "prompt_embeds": PromptEmbeds(values=values) if rng.random() < 0.3 else None,
    }


def their_request(arguments: dict[str, Any], hash_size: int) -> TheirRequest:
    """The same request in vLLM's words."""
    lora, embeds = arguments["lora"], arguments["prompt_embeds"]
    features = [
        MultiModalFeatureSpec(
            data=None,
            modality="image",
            identifier=item.identifier,
            mm_position=PlaceholderRange(offset=item.offset, length=item.length),
        )
        for item in arguments["multimodal"]
    ]
    return TheirRequest(
        request_id="r",
        prompt_token_ids=arguments["prompt_token_ids"],
        sampling_params=SamplingParams(max_tokens=500),
        pooling_params=None,
        arrival_time=0.0,
        prompt_embeds=None if embeds is None else torch.from_numpy(embeds.values.copy()),
        mm_features=features,
        lora_request=lora and LoRARequest(lora_name=lora.name, lora_int_id=lora.id, lora_path="/nowhere"),
        cache_salt=arguments["cache_salt"],
        block_hasher=kv_cache_utils.get_request_block_hasher(hash_size, sha256_cbor),
    )


def test_roots_are_equal() -> None:
    assert BlockHasher(16, seed=SEED, algorithm="sha256_cbor").root == kv_cache_utils.NONE_HASH


@pytest.mark.parametrize("hash_size", [1, 4, 16, 24, 64])
def test_requests_hash_alike(hash_size: int) -> None:
    rng = random.Random(hash_size)
    hasher = BlockHasher(hash_size, seed=SEED, algorithm="sha256_cbor")
    for index in range(NUM_REQUESTS):
        arguments = make_arguments(rng)
        ours, theirs = Request("r", block_hasher=hasher, **arguments), their_request(arguments, hash_size)
        assert ours.block_hashes == theirs.block_hashes, f"hash_size {hash_size}, request {index}: {arguments}"


def append_at_random(rng: random.Random, *requests: Any) -> None:
    """The same generated tokens, in the same portions, for all of them."""
    for _ in range(rng.randint(1, 20)):
        tokens = [rng.randrange(70_000) for _ in range(rng.randint(0, 9))]
        for request in requests:
            request.append_output_token_ids(list(tokens))


def test_generated_tokens_hash_alike() -> None:
    rng = random.Random(1)
    hasher = BlockHasher(16, seed=SEED, algorithm="sha256_cbor")
    for index in range(NUM_REQUESTS):
        arguments = make_arguments(rng)
        arguments["multimodal"] = arguments["multimodal"][-1:]
        ours, theirs = Request("r", block_hasher=hasher, **arguments), their_request(arguments, 16)
        append_at_random(rng, ours, theirs)
        assert ours.block_hashes == theirs.block_hashes, f"request {index}: {arguments}"


def test_several_items_in_the_block_that_decoding_fills() -> None:
    """A named difference: vLLM then names only the last item, and its hash isn't that of the same
    tokens as a prompt. Ours is."""
    rng = random.Random(2)
    hasher = BlockHasher(16, seed=SEED, algorithm="sha256_cbor")
    num_different = 0
    for _ in range(NUM_REQUESTS):
        arguments = make_arguments(rng) | {"prompt_embeds": None}
        ours, theirs = Request("r", block_hasher=hasher, **arguments), their_request(arguments, 16)
        append_at_random(rng, ours, theirs)
        num_different += ours.block_hashes != theirs.block_hashes
        whole = their_request(arguments | {"prompt_token_ids": ours.all_token_ids}, 16)
        assert ours.block_hashes == whole.block_hashes
    assert num_different > 0
