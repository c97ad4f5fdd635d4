"""The plan: how a model's cache is laid out, and how much of what fits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from ..attention import AttentionSpec, CrossAttention, Mamba
from ..attention.mamba import MambaMode
from ..config import CacheConfig, check_eagle
from ..counts import MAX_BYTES, as_count
from ..errors import ConfigError
from .checkpoint import kv_dtype_of
from .families import ModelLayers, model_layers
from .grouping import Group, Grouping, group_layers, pipeline_ranks
from .lengths import longest_sequence
from .memory import KV_DTYPES, AttentionMemory, KVDtype, Layer, Rank
from .model_config import ModelConfig, load_model_config
from .speculation import Speculation, draft_layers, parse_speculative
from .units import format_bytes
from .weights import Weights, estimate_weights

__all__ = ["DEFAULT_LENGTHS", "Plan", "PlanOptions", "TraceFit", "load_cache_config", "plan"]

DEFAULT_LENGTHS = (1024, 8192, 131072)
_COUNTS = {
    "memory_bytes": 1,
    "weights_bytes": 0,
    "tensor_parallel": 1,
    "pipeline_parallel": 1,
    "data_parallel": 1,
    "decode_context_parallel": 1,
    "prefill_context_parallel": 1,
    "block_size": 1,
    "max_model_len": 1,
    "max_step": 1,
}
_MAY_BE_NONE = {"max_model_len", "weights_bytes"}


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """What the user decides.

    ``memory_bytes`` is one rank's memory, ``gpu_memory_utilization`` the fraction of it that may be used, and
    ``weights_bytes`` what the weights and all the rest take of that (None: estimated from the configuration).
    ``kv_dtype``: a name in ``KV_DTYPES``; None or "auto" for what the checkpoint or the model says. ``max_step`` is
    the most tokens of one request in a step (the manager's ``max_num_batched_tokens``). ``speculative``: a drafter
    (``mtp:3``, ``eagle:CONFIG``, ``draft:CONFIG:5``). ``assume_full``: count a family that is not known as plain full
    attention. Raises ``ConfigError``.
    """

    memory_bytes: int
    gpu_memory_utilization: float = 1.0
    weights_bytes: int | None = 0
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    data_parallel: int = 1
    decode_context_parallel: int = 1
    prefill_context_parallel: int = 1
    kv_dtype: str | None = None
    state_dtype: str | None = None
    block_size: int = 16
    max_model_len: int | None = None
    max_step: int = 2048
    state_mode: MambaMode = "align"
    speculative: str | None = None
    assume_full: bool = False

    def __post_init__(self) -> None:
        for name, at_least in _COUNTS.items():
            value = getattr(self, name)
            if value is not None or name not in _MAY_BE_NONE:
                object.__setattr__(self, name, as_count(value, name, at_least, at_most=MAX_BYTES))
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(
                f"gpu_memory_utilization must be a fraction above 0 and at most 1, got {self.gpu_memory_utilization}"
            )
        if self.kv_dtype not in (None, "auto", *KV_DTYPES):
            raise ConfigError(f"kv_dtype must be one of auto, {', '.join(KV_DTYPES)}, got {self.kv_dtype!r}")
        if self.state_mode not in ("none", "all", "align"):
            raise ConfigError(f"state_mode must be none, all or align, got {self.state_mode!r}")
        if self.tensor_parallel % self.decode_context_parallel:
            raise ConfigError(
                f"decode_context_parallel {self.decode_context_parallel} must divide tensor_parallel "
                f"{self.tensor_parallel}: its ranks are those of a tensor-parallel group"
            )

    @property
    def context_ranks(self) -> int:
        """Ranks that share the tokens of a block."""
        return self.decode_context_parallel * self.prefill_context_parallel

    @property
    def num_ranks(self) -> int:
        """Ranks of all replicas."""
        return self.tensor_parallel * self.pipeline_parallel * self.prefill_context_parallel * self.data_parallel

    @property
    def usable_bytes(self) -> int:
        """What weights and cache may take of one rank's memory."""
        return int(self.memory_bytes * self.gpu_memory_utilization)


@dataclass(frozen=True, kw_only=True)
class TraceFit:
    """Requests of a trace against a plan. ``refused``: too long for the model or the cache, or of no length."""

    requests: int
    refused: int
    mean_tokens: float
    longest_tokens: int
    at_once: int
    """Of the others, on all replicas together."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A model's cache on the fullest rank. All bytes are of one rank, all counts of one data-parallel replica."""

    model_type: str
    source: str
    kv_dtype: KVDtype
    options: PlanOptions
    max_model_len: int
    num_encoder_tokens: int
    num_drafted: int
    """Tokens that the drafter proposes in a step."""
    layers: tuple[Layer, ...]
    grouping: Grouping
    cache_config: CacheConfig
    weights: Weights
    notes: tuple[str, ...]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of the pool."""
        return self.grouping.block_bytes

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool, the null block among them."""
        return self.cache_config.num_blocks

    @property
    def cache_bytes(self) -> int:
        """Memory that is left for the cache."""
        return self.options.usable_bytes - (self.weights.num_bytes or 0)

    @cached_property
    def growing(self) -> tuple[Group, ...]:
        """Groups that a request goes on filling at long context."""
        return tuple(group for group in self.grouping.groups if self._grows(group))

    @property
    def bytes_per_token(self) -> float:
        """What one more token costs at long context."""
        return self._per_token(self.growing)

    @property
    def bytes_per_first_token(self) -> float:
        """What one more token costs while everything is still inside the windows."""
        attention = (Mamba, CrossAttention)
        return self._per_token(tuple(g for g in self.grouping.groups if not isinstance(g.spec, attention)))

    @cached_property
    def fixed_bytes_per_request(self) -> int:
        """What a request holds at long context whatever its length: states, windows, encoder tokens."""
        return self.block_bytes * sum(
            self.fixed_blocks(group) for group in self.grouping.groups if group not in self.growing
        )

    @property
    def states_per_request(self) -> int:
        """Blocks of states that a request holds between two steps, those for drafted tokens among them."""
        return sum(self.fixed_blocks(group) for group in self.grouping.groups if isinstance(group.spec, Mamba))

    @property
    def no_hits_because(self) -> str | None:
        """Why no prefix can ever be hit; None where some can."""
        if self.num_encoder_tokens:
            return "what an encoder gave is one request's own"
        if not all(spec.can_hit for spec in self.cache_config.specs):
            return "states are kept in mode none"
        alignment = self.cache_config.alignment
        if self.max_model_len <= alignment:
            return f"hits are multiples of {alignment:,} tokens and no sequence is longer than {self.max_model_len:,}"
        return None

    @cached_property
    def longest_sequence(self) -> int:
        """The longest request that fits alone, at most ``max_model_len``; 0 if none does. O(log tokens)."""
        low, high = 0, self.max_model_len
        while low < high:
            middle = (low + high + 1) // 2
            if self.blocks_while_prefilling(middle) < self.num_blocks:
                low = middle
            else:
                high = middle - 1
        return low

    def concurrency(self, num_tokens: int) -> int:
        """Requests of ``num_tokens`` that fit at once: one that prefills, the others decoding. O(log tokens).

        0 for a length above ``max_model_len``. Raises ``ConfigError`` for a length below 1.
        """
        num_tokens = as_count(num_tokens, "num_tokens", 1)
        first = self.blocks_while_prefilling(num_tokens)
        usable = self.num_blocks - 1
        if num_tokens > self.max_model_len or first > usable:
            return 0
        return 1 + (usable - first) // self.blocks_while_decoding(num_tokens)

    def of_lengths(self, lengths: Iterable[int]) -> TraceFit:
        """How many requests of these lengths (tokens, prompt and output) run at once, on average.

        One prefills, the others decode, each at its full length. O(distinct lengths).
        """
        counts = Counter(lengths)
        if not counts:
            raise ConfigError("the trace has no requests; there is nothing to count")
        fitting = {n: count for n, count in counts.items() if 0 < n <= self.longest_sequence}
        total, at_once = sum(fitting.values()), 0
        if total:
            first = sum(self.blocks_while_prefilling(n) * count for n, count in fitting.items()) / total
            decoding = sum(self.blocks_while_decoding(n) * count for n, count in fitting.items()) / total
            at_once = 1 + max(0, int((self.num_blocks - 1 - first) / decoding))
        requests = sum(counts.values())
        return TraceFit(
            requests=requests,
            refused=requests - total,
            mean_tokens=sum(n * count for n, count in counts.items()) / requests,
            longest_tokens=max(counts),
            at_once=at_once * self.options.data_parallel,
        )

    def padding_bytes(self, num_tokens: int) -> int:
        """Bytes of a decoding request's blocks that nobody writes, however full they are."""
        return sum(
            self.grouping.padding_bytes(group) * self.blocks_of_group(group, num_tokens, max_step=1)
            for group in self.grouping.groups
        )

    def blocks_while_prefilling(self, num_tokens: int) -> int:
        """Blocks a request holds at most on its way to ``num_tokens`` tokens. O(log tokens)."""
        return self._blocks(num_tokens, self.options.max_step)

    def blocks_while_decoding(self, num_tokens: int) -> int:
        """Blocks a request holds at most while it decodes, up to ``num_tokens`` tokens. O(log tokens)."""
        return self._blocks(num_tokens, 1 + self.num_drafted)

    def blocks_of_group(self, group: Group, num_tokens: int, *, max_step: int) -> int:
        """Blocks of one group that a request holds at most in steps of ``max_step``. O(log tokens).

        Behind its tokens it has slots for those that are drafted next.
        """
        slots = min(num_tokens + self.num_drafted, self.max_model_len)
        step = max_step + self.num_drafted
        return self.effective(group).most_held(slots, step, num_tokens, self.num_encoder_tokens)

    def fixed_blocks(self, group: Group) -> int:
        """Blocks of a group that does not grow which a long request holds between two steps.

        For a moment it can be one state more: where a step crosses a block's end, drafted tokens may be taken back.
        """
        spec = self.effective(group)
        if not isinstance(spec, Mamba):
            return self.blocks_of_group(group, self.max_model_len, max_step=1)
        alone = replace(spec, num_speculative_states=0)
        return alone.most_held(self.max_model_len, 1, self.max_model_len) + spec.num_speculative_states

    def effective(self, group: Group) -> AttentionSpec:
        """The group's kind as the manager has it: context-parallel ranks share the tokens of a block."""
        return replace(group.spec, block_size=group.spec.block_size * self.options.context_ranks)

    def _blocks(self, num_tokens: int, max_step: int) -> int:
        return sum(self.blocks_of_group(group, num_tokens, max_step=max_step) for group in self.grouping.groups)

    def _grows(self, group: Group) -> bool:
        fixed = isinstance(group.spec, (Mamba, CrossAttention))
        return not fixed and len(self.effective(group).dead(self.max_model_len, self.max_model_len)) == 0

    def _per_token(self, groups: tuple[Group, ...]) -> float:
        return sum(self.block_bytes / self.effective(group).block_size for group in groups)


def plan(config: str | Path | Mapping[str, Any], options: PlanOptions) -> Plan:
    """The plan for a ``config.json`` (a file, its folder, or its content).

    Raises ``ConfigError`` naming what can't be placed, what is missing, or how much memory is needed.
    """
    model = load_model_config(config)
    speculation = parse_speculative(options.speculative) if options.speculative else None
    rank = _rank(model, options, speculation)
    found = model_layers(
        model, rank, assume_full=options.assume_full, mtp=speculation is not None and speculation.method == "mtp"
    )
    drafting, draft_notes = draft_layers(speculation, rank, found.num_layers) if speculation else ((), [])
    max_model_len = options.max_model_len or longest_sequence(found)
    layers = tuple(_within(layer, max_model_len) for layer in (*found.layers, *drafting))
    grouping = _grouping(found, layers, max_model_len, rank.num_drafted, options)
    _check_context_parallel(found, grouping, options)
    weights = _weights(model, rank, options)
    planned = Plan(
        model_type=model.model_type,
        source=model.source,
        kv_dtype=rank.kv_dtype,
        options=options,
        max_model_len=max_model_len,
        num_encoder_tokens=found.num_encoder_tokens,
        num_drafted=rank.num_drafted,
        layers=layers,
        grouping=grouping,
        cache_config=_cache_config(grouping, options, weights),
        weights=weights,
        notes=(),
    )
    return replace(planned, notes=tuple(dict.fromkeys([*model.notes, *draft_notes, *_notes(planned, speculation)])))


def load_cache_config(config: str | Path | Mapping[str, Any], options: PlanOptions) -> CacheConfig:
    """The ``CacheConfig`` of a model's ``config.json``, as the manager takes it. Raises ``ConfigError``."""
    return plan(config, options).cache_config


def _rank(model: ModelConfig, options: PlanOptions, speculation: Speculation | None) -> Rank:
    """One rank, and the dtypes it works in: the model's is 16 bit, as engines serve it."""
    known = {"float16": "fp16", "bfloat16": "bf16"}
    model_dtype = str(model.dtype) if model.dtype in known else "bfloat16"
    if model.dtype not in known:
        said = f"says {model.dtype}" if model.dtype else "names no dtype"
        model.notes.append(f"the file {said}: counted as served in bf16")
    asked = None if options.kv_dtype == "auto" else options.kv_dtype
    named = None if asked else kv_dtype_of(model)
    if named:
        model.notes.append(f"K/V in {named}: the checkpoint's quantization says so")
    return Rank(
        tensor_parallel=options.tensor_parallel,
        kv_dtype=KV_DTYPES[asked or named or known[model_dtype]],
        model_dtype=model_dtype,
        state_dtype=options.state_dtype,
        num_drafted=speculation.num_tokens if speculation else 0,
    )


def _weights(model: ModelConfig, rank: Rank, options: PlanOptions) -> Weights:
    if options.weights_bytes is not None:
        return Weights.given(options.weights_bytes)
    whole = model_layers(model, replace(rank, tensor_parallel=1), assume_full=options.assume_full)
    return estimate_weights(whole, options.tensor_parallel * options.pipeline_parallel)


def _grouping(
    found: ModelLayers, layers: tuple[Layer, ...], max_model_len: int, num_drafted: int, options: PlanOptions
) -> Grouping:
    return group_layers(
        layers,
        ranks=_ranks(found.num_layers, layers, options.pipeline_parallel),
        block_size=options.block_size,
        state_mode=options.state_mode,
        max_model_len=max_model_len,
        max_step=options.max_step,
        num_encoder_tokens=found.num_encoder_tokens,
        num_drafted=num_drafted,
    )


def _ranks(num_layers: int, layers: tuple[Layer, ...], pipeline_parallel: int) -> list[range]:
    """The layers of each pipeline rank; a drafter runs on the last."""
    ranks = pipeline_ranks(num_layers, pipeline_parallel)
    ranks[-1] = range(ranks[-1].start, 1 + max(num_layers - 1, *(layer.index for layer in layers)))
    return ranks


def _check_context_parallel(found: ModelLayers, grouping: Grouping, options: PlanOptions) -> None:
    """Tokens can be shared out among ranks only where no token ever dies, and by ranks that keep the same heads."""
    if options.context_ranks == 1:
        return
    for group in grouping.groups:
        memory = group.memory
        if not isinstance(memory, AttentionMemory) or memory.kind not in ("full", "mla"):
            raise ConfigError(
                f"context parallelism shares out the tokens of full attention and MLA; {memory.label} layers of "
                f"{found.config.source} can't be: leave it at 1"
            )
    copies = _copies_of_heads(found, options)
    if copies % options.decode_context_parallel:
        raise ConfigError(
            f"decode_context_parallel {options.decode_context_parallel} needs so many ranks with the same K/V heads, "
            f"but {options.tensor_parallel} ranks keep {copies} copies of them; raise tensor_parallel or lower it"
        )


def _copies_of_heads(found: ModelLayers, options: PlanOptions) -> int:
    """Ranks of a tensor-parallel group that keep the same keys and values (vLLM 0.25.1, config/model.py 1231-1254)."""
    memories = [layer.memory for layer in found.layers if isinstance(layer.memory, AttentionMemory)]
    if all(memory.kind == "mla" for memory in memories):
        return options.tensor_parallel
    return max(1, options.tensor_parallel // found.config.integer("num_key_value_heads"))


def _notes(planned: Plan, speculation: Speculation | None) -> list[str]:
    """What must be known of the plan itself."""
    notes = []
    if speculation is not None and speculation.assumed:
        notes.append(f"ASSUMED: {speculation.num_tokens} drafted tokens a step; say how many behind a colon")
    if planned.no_hits_because is not None:
        notes.append(f"prefix caching can never hit: {planned.no_hits_because}")
    varying = [group.spec.kind for group in planned.grouping.groups if group not in planned.growing]
    if kinds := sorted({kind.replace("_", " ") for kind in varying} - {"cross attention"}):
        notes.append(
            f"requests at once: each is counted at its fullest moment; while some hold less ({', '.join(kinds)}), the "
            f"manager may admit more"
        )
    return notes


def _within(layer: Layer, max_model_len: int) -> Layer:
    """A window or chunk that no sequence outgrows is full attention."""
    memory = layer.memory
    bounded = isinstance(memory, AttentionMemory) and memory.kind in ("sliding", "chunked")
    if not bounded or not isinstance(memory, AttentionMemory) or (memory.extent or 0) < max_model_len:
        return layer
    return replace(layer, memory=replace(memory, kind="full", extent=None))


def _cache_config(grouping: Grouping, options: PlanOptions, weights: Weights) -> CacheConfig:
    groups = tuple(group.group_spec() for group in grouping.groups)
    check_eagle([group.spec for group in groups], frozenset(i for i, group in enumerate(groups) if group.is_eagle))
    free = options.usable_bytes - (weights.num_bytes or 0)
    num_blocks = free // grouping.block_bytes
    if num_blocks < 2:
        raise ConfigError(_too_little(grouping, options, weights, free))
    return CacheConfig(
        num_blocks=num_blocks,
        groups=groups,
        dcp_world_size=options.decode_context_parallel,
        pcp_world_size=options.prefill_context_parallel,
    )


def _too_little(grouping: Grouping, options: PlanOptions, weights: Weights, free: int) -> str:
    need = 2 * grouping.block_bytes
    if free < 0:
        whose = "estimated at" if weights.is_estimate else "said to take"
        start = (
            f"weights are {whose} {format_bytes(weights.num_bytes or 0)}, {format_bytes(-free)} more than the "
            f"{format_bytes(options.usable_bytes)} there are; "
        )
    else:
        start = f"{format_bytes(free)} are left for the cache, {format_bytes(need - free)} too little; "
    return (
        f"{start}the null block and one more take {format_bytes(need)} ({format_bytes(grouping.block_bytes)} each); "
        f"give more memory, more ranks, or a smaller block size"
        + ("; --weights-memory 0 if the memory is what is free beside the weights" if weights.is_estimate else "")
    )
