"""Either manager behind the few verbs that the benchmarks time. Public names only."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import os
import random
import warnings
from array import array
from collections.abc import Sequence
from typing import Any, Protocol

from .shapes import BLOCK, MAX_MODEL_LEN, STEP, Shape


class Peer(Protocol):
    """One manager implementation."""

    name: str
    version: str
    running: Any
    """The status of a running request."""

    def manager(self, shape: Shape, num_blocks: int, *, events: bool = False) -> Any: ...
    def hasher(self) -> Any: ...
    def request(self, request_id: str, tokens: list[int], hasher: Any) -> Any: ...
    def hash(self, tokens: Any) -> int: ...
    def limit_step(self, manager: Any, request: Any, start: int, num_tokens: int, shape: Shape) -> int: ...


class Kvpager:
    """The package under test."""

    name = "kvpager"

    def __init__(self) -> None:
        import kvpager
        from kvpager.request import RequestStatus

        self._kvpager = kvpager
        self.version = importlib.metadata.version("kvpager") if _installed("kvpager") else "from source"
        self.running = RequestStatus.RUNNING

    def manager(self, shape: Shape, num_blocks: int, *, events: bool = False) -> Any:
        kv = self._kvpager
        specs = [kv.FullAttention(block_size=BLOCK)]
        specs += [kv.SlidingWindow(block_size=BLOCK, window=1024) for _ in range(shape.window)]
        specs += [kv.Mamba(block_size=BLOCK, mode="align") for _ in range(shape.mamba)]
        return kv.KVCacheManager(
            kv.CacheConfig.uniform(num_blocks, specs),
            max_model_len=MAX_MODEL_LEN,
            max_num_batched_tokens=STEP,
            log_stats=True,
            enable_kv_cache_events=events,
        )

    def hasher(self) -> Any:
        return self._kvpager.BlockHasher(BLOCK)

    def request(self, request_id: str, tokens: list[int], hasher: Any) -> Any:
        return self._kvpager.Request(request_id, tokens, block_hasher=hasher, max_tokens=4096)

    def hash(self, tokens: Any) -> int:
        return len(self._kvpager.hash_blocks(tokens, block_size=BLOCK))

    def limit_step(self, manager: Any, request: Any, start: int, num_tokens: int, shape: Shape) -> int:
        return int(manager.limit_prefill_step(request, start, num_tokens))


class Vllm:
    """The peer: vLLM's manager, as its scheduler builds it."""

    name = "vLLM"

    def __init__(self) -> None:
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import torch
            import vllm
            from vllm.sampling_params import SamplingParams
            from vllm.utils.hashing import get_hash_fn_by_name
            from vllm.v1 import kv_cache_interface, request
            from vllm.v1.core import kv_cache_manager, kv_cache_utils
        self.version = vllm.__version__
        self.running = request.RequestStatus.RUNNING
        self._torch, self._specs, self._managers = torch, kv_cache_interface, kv_cache_manager
        self._utils, self._request, self._sampling = kv_cache_utils, request.Request, SamplingParams
        self._hash_function = get_hash_fn_by_name("sha256")
        self._plain_hasher = self.hasher()

    def manager(self, shape: Shape, num_blocks: int, *, events: bool = False) -> Any:
        specs, dtype = self._specs, self._torch.bfloat16
        heads = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 1, "dtype": dtype}
        kinds: list[Any] = [specs.FullAttentionSpec(**heads)]
        kinds += [specs.SlidingWindowSpec(sliding_window=1024, **heads) for _ in range(shape.window)]
        kinds += [
            specs.MambaSpec(block_size=BLOCK, shapes=((1, 1),), dtypes=(dtype,), mamba_cache_mode="align")
            for _ in range(shape.mamba)
        ]
        groups = [specs.KVCacheGroupSpec([f"layer.{i}"], spec) for i, spec in enumerate(kinds)]
        return self._managers.KVCacheManager(
            specs.KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups),
            max_model_len=MAX_MODEL_LEN,
            scheduler_block_size=BLOCK,
            hash_block_size=BLOCK,
            max_num_batched_tokens=STEP,
            enable_caching=True,
            log_stats=True,
            enable_kv_cache_events=events,
        )

    def hasher(self) -> Any:
        self._utils.init_none_hash(self._hash_function)
        return self._utils.get_request_block_hasher(BLOCK, self._hash_function)

    def request(self, request_id: str, tokens: list[int], hasher: Any) -> Any:
        return self._request(
            request_id=request_id,
            prompt_token_ids=tokens,
            sampling_params=self._sampling(max_tokens=4096),
            pooling_params=None,
            arrival_time=0.0,
            block_hasher=hasher,
        )

    def hash(self, tokens: Any) -> int:
        return len(self._plain_hasher(tokens))

    def limit_step(self, manager: Any, request: Any, start: int, num_tokens: int, shape: Shape) -> int:
        last = request.num_tokens // BLOCK * BLOCK
        if not shape.mamba:
            return num_tokens
        if start < last < start + num_tokens:
            return last - start
        return num_tokens // BLOCK * BLOCK if start + num_tokens < last else num_tokens


def load_vllm() -> tuple[Vllm | None, str]:
    """vLLM if it is here in the version the ratios are stated for, else why not."""
    with contextlib.suppress(ImportError):
        importlib.import_module("torchvision_ops")  # a workaround that the oracle's environment may need
    try:
        peer = Vllm()
    except ImportError as error:
        return None, f"vLLM does not import here ({error}): kvpager alone, no ratios"
    if peer.version != "0.25.1":
        return None, f"vLLM here is {peer.version}, the ratios are to 0.25.1: kvpager alone"
    return peer, ""


def _installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def tokens_of(count: int, rng: random.Random) -> list[int]:
    """Random token ids."""
    return rng.choices(range(128_000), k=count)


def buffer_of(tokens: Sequence[int]) -> array[int]:
    """The same ids as 32-bit integers in one buffer."""
    return array("I", tokens)
