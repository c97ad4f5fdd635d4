"""vLLM's scheduler without a model, on either manager, with made-up answers. Imports vLLM."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVEventsConfig,
    KVTransferConfig,
    ModelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched import scheduler as scheduler_module
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from kvpager.integrations.vllm import v0_25_1

BLOCK = 16
MAX_MODEL_LEN = 512
KVPAGER = v0_25_1.KVCacheManager

init_none_hash(sha256_cbor)
hasher = get_request_block_hasher(BLOCK, sha256_cbor)


def full() -> Any:
    return FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)


def window(size: int) -> Any:
    return SlidingWindowSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32, sliding_window=size)


def mamba() -> Any:
    return MambaSpec(block_size=BLOCK, shapes=((1,),), dtypes=(torch.float32,), mamba_cache_mode="align")


def _mamba_mode(specs: Sequence[Any]) -> str:
    return "align" if any(isinstance(spec, MambaSpec) for spec in specs) else "none"


def cache(num_blocks: int, specs: Sequence[Any]) -> KVCacheConfig:
    groups = [KVCacheGroupSpec([f"layer {index}"], spec) for index, spec in enumerate(specs)]
    tensors = [
        KVCacheTensor(size=num_blocks * group.kv_cache_spec.page_size_bytes, shared_by=group.layer_names)
        for group in groups
    ]
    return KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=tensors, kv_cache_groups=groups)


def manager(kind: Any = KVPAGER, *, num_blocks: int = 64, specs: Sequence[Any] = (), **options: Any) -> Any:
    """A manager alone, as the scheduler would build it."""
    wanted = {
        "max_model_len": MAX_MODEL_LEN,
        "scheduler_block_size": BLOCK,
        "hash_block_size": BLOCK,
        "max_num_batched_tokens": MAX_MODEL_LEN,
        "log_stats": True,
    }
    return kind(kv_cache_config=cache(num_blocks, specs or [full()]), **wanted | options)


def scheduler(
    kind: Any = KVPAGER,
    *,
    num_blocks: int = 64,
    specs: Sequence[Any] = (),
    max_num_batched_tokens: int = 64,
    max_num_seqs: int = 8,
    is_async: bool = False,
    num_drafts: int = 0,
    policy: str = "fcfs",
    transfer: Mapping[str, Any] | None = None,
    events: bool = False,
    **limits: Any,
) -> Any:
    """A scheduler with the given kind of manager."""
    config = VllmConfig(
        scheduler_config=SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=MAX_MODEL_LEN,
            is_encoder_decoder=False,
            async_scheduling=is_async,
            policy=policy,
            disable_hybrid_kv_cache_manager=False if len(specs) > 1 else None,
            **limits,
        ),
        model_config=ModelConfig(model=_model_folder(), skip_tokenizer_init=True, dtype="float32"),
        cache_config=CacheConfig(block_size=BLOCK, enable_prefix_caching=True, mamba_cache_mode=_mamba_mode(specs)),
        device_config=DeviceConfig("cpu"),
        kv_transfer_config=KVTransferConfig(**transfer) if transfer else None,
        kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null") if events else None,
        speculative_config=_drafting(num_drafts, is_async) if num_drafts else None,
    )
    config.cache_config.num_gpu_blocks = num_blocks
    register_all_kvcache_specs(config)
    before, scheduler_module.KVCacheManager = scheduler_module.KVCacheManager, kind
    try:
        return (AsyncScheduler if is_async else Scheduler)(
            vllm_config=config,
            kv_cache_config=cache(num_blocks, specs or [full()]),
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK,
            log_stats=True,
        )
    finally:
        scheduler_module.KVCacheManager = before


def _drafting(num_drafts: int, is_async: bool) -> SpeculativeConfig:
    return SpeculativeConfig(
        model="ngram",
        method="ngram_gpu" if is_async else "ngram",
        num_speculative_tokens=num_drafts,
        prompt_lookup_max=num_drafts,
        prompt_lookup_min=1,
    )


def scripted(**options: Any) -> dict[str, Any]:
    """Transfer options for the connector that says what a test wants."""
    return {
        "kv_connector": "ScriptedConnector",
        "kv_connector_module_path": "kvpager_test_connector",
        "kv_role": "kv_both",
        **options,
    }


def request(request_id: str, tokens: Sequence[int], *, max_tokens: int = 16, **options: Any) -> Request:
    return Request(
        request_id=request_id,
        prompt_token_ids=list(tokens),
        sampling_params=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
        pooling_params=None,
        block_hasher=options.pop("block_hasher", hasher),
        **options,
    )


def answers(output: Any, sampled: Mapping[str, Sequence[int]], **transferred: Any) -> ModelRunnerOutput:
    """What a model runner would say: the sampled tokens by request id; what a connector's workers did."""
    ids = list(output.num_scheduled_tokens)
    return ModelRunnerOutput(
        req_ids=ids,
        req_id_to_index={request_id: index for index, request_id in enumerate(ids)},
        sampled_token_ids=[list(sampled.get(request_id, ())) for request_id in ids],
        logprobs=None,
        prompt_logprobs_dict={},
        pooler_output=[],
        kv_connector_output=KVConnectorOutput(**transferred) if transferred else None,
    )


def _model_folder() -> str:
    """A configuration that vLLM accepts; there are no weights."""
    from transformers import LlamaConfig

    folder = Path(tempfile.gettempdir()) / "kvpager-tests-llama"
    LlamaConfig(
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=1,
        max_position_embeddings=MAX_MODEL_LEN,
        vocab_size=32000,
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(folder)
    return str(folder)
