"""The families: one row each.

A row says how many layers there are, which layer is of which kind, and what a layer of each kind keeps. A new family
is a row here and its bytes, by hand and with their source, in ``tests/unit/test_planner_families.py``. Values in
``defaults`` are those of transformers 5.24's class of the same model type (a test compares them); rows of model types
that transformers doesn't know follow vLLM 0.25.1's model of the same name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ..model_config import ModelConfig
from . import states
from .keeps import Module, heads_of, latent
from .numbers import HEADS, HIDDEN, KV_HEADS, Number, fixed, flagged, if_told, product, ratio
from .numbers import field as number
from .patterns import (
    CHUNKED,
    FULL,
    LINEAR,
    MAMBA,
    SLIDING,
    Pattern,
    after,
    every,
    everywhere,
    first_of,
    in_turn,
    indices,
    letters,
    listed,
    marks,
    period,
    unless_off,
    when,
)

__all__ = ["FAMILIES", "ORDINARY", "Family"]

NOTHING: tuple[Module, ...] = ()
Keeps = dict[str, tuple[Module, ...]]
WINDOW, CHUNK = number("sliding_window"), number("attention_chunk_size")


def attention(heads: Number = KV_HEADS, size: Number | None = None, query: Number = HEADS) -> Keeps:
    """Keys and values in every layer; kinds differ only in how far a layer looks."""
    return {
        FULL: (Module("self_attn", heads_of(heads, size, query_heads=query)),),
        SLIDING: (Module("self_attn", heads_of(heads, size, kind="sliding", extent=WINDOW, query_heads=query)),),
        CHUNKED: (Module("self_attn", heads_of(heads, size, kind="chunked", extent=CHUNK, query_heads=query)),),
    }


LISTED = listed("layer_types", "layers_block_type")
LISTED_OR_FULL = first_of(LISTED, everywhere(FULL))
LAYERS = number("num_hidden_layers")


@dataclass(frozen=True, kw_only=True)
class Family:
    """A family of models.

    ``keeps``: kind of layer -> its modules that keep something. ``pattern``: which layer is of which kind;
    ``pattern_fields``: fields beside ``layer_types`` that may say it. ``longest``: the first of these fields that is
    there gives the longest sequence; ``assumed_length``: what is taken where published files name none, since states
    know no limit (2,048 as vLLM 0.25.1 does, config/model.py 2187).
    ``shares_last``: so many of the last layers read other layers' keys and values.
    ``mtp``: the field that counts the drafting layers of the checkpoint, which are of kind ``mtp_kind``.
    ``unexplained``: fields that change what is kept in a way the row doesn't know; a file that sets one is refused.
    ``note``: what the reader of a plan must be told.

    For the weights: the fields that give the hidden size, the inner size of a feed-forward layer and of an expert
    (none: no experts), and the matrices of either: 3 with a gate, 2 without, 0 where the row can't tell.
    """

    keeps: Mapping[str, tuple[Module, ...]] = field(default_factory=attention)
    pattern: Pattern = LISTED_OR_FULL
    pattern_fields: tuple[str, ...] = ()
    num_layers: Number = LAYERS
    longest: tuple[str, ...] = ("max_position_embeddings", "max_seq_len", "model_max_length")
    rope_scales_length: bool = True
    assumed_length: int | None = None
    encoder_tokens: Number | None = None
    shares_last: str | None = None
    prefix: str = "layers"
    mtp: str | None = None
    mtp_kind: str = FULL
    unexplained: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ("hidden_size",)
    mlp_size: tuple[str, ...] = ("intermediate_size",)
    mlp_matrices: int = 3
    expert_size: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    note: str | None = None


ALL_HEADS = {"num_key_value_heads": "num_attention_heads"}
NEXTN = "num_nextn_predict_layers"

ORDINARY = Family(defaults=ALL_HEADS)
"""Full attention in every layer, under the names that most families use."""
_OWN_HEADS = Family()
"""The same, of classes that have a number of K/V heads of their own for files without one."""

_LLAMA = {"num_hidden_layers": 32, "num_attention_heads": 32, "hidden_size": 4096}
_QWEN = Family(
    pattern=first_of(
        LISTED,
        when("use_sliding_window", after("max_window_layers", SLIDING, FULL), everywhere(FULL)),
    ),
    defaults={"use_sliding_window": False},
)
_WINDOWED = Family(
    pattern=first_of(LISTED, when("sliding_window", everywhere(SLIDING), everywhere(FULL))),
    defaults={"sliding_window": None},
)
_IN_TURN = Family(pattern=first_of(LISTED, in_turn(SLIDING, FULL)))
_EVERY_NTH = Family(pattern=first_of(LISTED, every("sliding_window_pattern", FULL, SLIDING)))
_EVERY_FOURTH = replace(_EVERY_NTH, defaults={"sliding_window_pattern": 4})
_GEMMA3 = replace(
    _EVERY_NTH,
    rope_scales_length=False,  # its files give the scaled length (vLLM 0.25.1, config/model.py 2202)
    defaults={
        "sliding_window_pattern": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
    },
)
_LATENT = (Module("self_attn", latent()),)
_DEEPSEEK = Family(
    keeps={"latent": _LATENT, **attention()},
    pattern=unless_off("use_mla", when("kv_lora_rank", everywhere("latent"), everywhere(FULL)), everywhere(FULL)),
    mtp=NEXTN,
    mtp_kind="latent",
)
_LATENT_ONLY = Family(keeps={FULL: _LATENT}, pattern=everywhere(FULL), mtp=NEXTN)
_INDEXED = Family(
    keeps={"indexed": (Module("self_attn", latent(index=number("index_head_dim"))),), "reuses": _LATENT},
    pattern=first_of(letters("index_topk_pattern", {"F": "indexed", "S": "reuses"}), everywhere("indexed")),
    mtp=NEXTN,
    mtp_kind="indexed",
    unexplained=("index_topk_freq", "compress_ratios"),
    note="vLLM keeps these latents in 656 bytes by default: --kv-dtype fp8_ds_mla",
)
_MAMBA1 = Family(
    assumed_length=2048,
    keeps={
        MAMBA: (
            Module("mixer", states.mamba1(number("intermediate_size"), number("state_size"), number("conv_kernel"))),
        )
    },
    pattern=everywhere(MAMBA),
)
_INNER = product(number("mamba_expand"), HIDDEN)


def named_mamba2(channels: Number = _INNER) -> Module:
    """Mamba 2 under the names that Bamba, Granite and Falcon-H1 share; head size ``"auto"``: an even share."""

    def head_dim(config: ModelConfig) -> int:
        shared_out = config.known("mamba_d_head") == "auto"
        return channels(config) // config.integer("mamba_n_heads") if shared_out else config.integer("mamba_d_head")

    return Module(
        "mamba",
        states.mamba2(
            channels=channels,
            heads=number("mamba_n_heads"),
            head_dim=head_dim,
            groups=number("mamba_n_groups"),
            state_size=number("mamba_d_state"),
            kernel=number("mamba_d_conv"),
        ),
    )


def states_and_attention(state: Module, full: Module | None = None) -> Keeps:
    """Both under all the names that files give them: transformers renamed them in version 5."""
    attends = (full or Module("self_attn", heads_of()),)
    return {MAMBA: (state,), LINEAR: (state,), "attention": attends, FULL: attends}


_FALCON_INNER = if_told("mamba_d_ssm", number("mamba_d_ssm"), _INNER)
_NEMOTRON_HEADS = Module("mixer", heads_of(size=number("head_dim", "attention_head_dim")))
_NEMOTRON_STATE = Module(
    "mixer",
    states.mamba2(
        channels=product(number("mamba_num_heads"), number("mamba_head_dim")),
        heads=number("mamba_num_heads"),
        head_dim=number("mamba_head_dim"),
        groups=number("n_groups", "mamba_n_groups"),
        state_size=number("ssm_state_size"),
        kernel=number("conv_kernel", "mamba_d_conv"),
        dtype="float32",  # what the model type keeps its states in
    ),
)
_MAMBA2_HYBRID = Family(keeps=states_and_attention(named_mamba2()), pattern=LISTED, defaults=ALL_HEADS)
_DELTA_NET = Family(
    keeps=states_and_attention(Module("linear_attn", states.gated_delta_net)),
    pattern=first_of(LISTED, every("full_attention_interval", FULL, LINEAR)),
)
_ZAMBA_INNER_HEAD = if_told(
    "mamba_headdim",
    number("mamba_headdim"),
    lambda config: config.integer("mamba_expand") * config.integer("hidden_size") // config.integer("n_mamba_heads"),
)
_ZAMBA_STATE = Module(
    "mamba",
    states.mamba2(
        channels=_INNER,
        heads=number("n_mamba_heads"),
        head_dim=_ZAMBA_INNER_HEAD,
        groups=number("mamba_ngroups"),
        state_size=number("mamba_d_state"),
        kernel=number("mamba_d_conv"),
    ),
)
_ZAMBA_HEAD = if_told(
    "attention_head_dim",
    number("attention_head_dim"),
    lambda config: 2 * config.integer("hidden_size") // config.integer("num_attention_heads"),
)


def own_and_cross(heads: Number, size: Number, encoder_tokens: Number) -> Keeps:
    """A decoder layer of an encoder-decoder model: its own tokens, and keys and values of the encoder's."""
    return {
        FULL: (
            Module("self_attn", heads_of(heads, size, query_heads=heads)),
            Module("encoder_attn", heads_of(heads, size, kind="cross", extent=encoder_tokens, query_heads=heads)),
        )
    }


def encoder_decoder(heads: Number, size: Number, encoder_tokens: Number, **more: Any) -> Family:
    """A row for a model in which all decoder layers are alike. The encoder keeps nothing between steps."""
    return Family(
        keeps=own_and_cross(heads, size, encoder_tokens),
        pattern=everywhere(FULL),
        encoder_tokens=encoder_tokens,
        prefix="decoder.layers",
        **more,
    )


_DECODER_HEADS = number("decoder_attention_heads")
_BART = encoder_decoder(
    _DECODER_HEADS,
    ratio("d_model", "d_model", "decoder_attention_heads"),
    number("max_position_embeddings"),
    num_layers=number("decoder_layers"),
)


def _image_tokens(config: ModelConfig) -> int:
    """Vision tokens of one image at most: tiles of patches, each with a class token."""
    side = config.outer_integer("vision_config.image_size") // config.outer_integer("vision_config.patch_size")
    return config.outer_integer("vision_config.max_num_tiles") * (side * side + 1)


def _t5gemma_encoder(config: ModelConfig) -> int:
    return config.outer_integer("encoder.max_position_embeddings")


_T5GEMMA_CROSS = Module("cross_attn", heads_of(kind="cross", extent=_t5gemma_encoder))
_GLOBAL_HEADS = flagged(
    "attention_k_eq_v",
    if_told("num_global_key_value_heads", number("num_global_key_value_heads"), KV_HEADS),
    KV_HEADS,
)
_SWA_HEADS = heads_of(
    number("swa_num_key_value_heads"),
    number("swa_head_dim"),
    value_size=number("swa_v_head_dim"),
    kind="sliding",
    extent=number("sliding_window_size", "sliding_window"),
)
_MIMO_V2 = Family(
    keeps={
        FULL: (Module("self_attn", heads_of(size=number("head_dim"), value_size=number("v_head_dim"))),),
        SLIDING: (Module("self_attn", _SWA_HEADS),),
    },
    pattern=marks("hybrid_layer_pattern", {0: FULL, 1: SLIDING}),
    mtp=NEXTN,
    mtp_kind=SLIDING,
)
_STEP35_OTHER = heads_of(
    number("attention_other_setting.num_attention_groups", "num_attention_groups", "num_key_value_heads"),
    number("attention_other_setting.head_dim", "head_dim"),
    kind="sliding",
    extent=WINDOW,
)
_KIMI_LINEAR = Family(
    keeps={
        FULL: _LATENT,
        LINEAR: (
            Module(
                "linear_attn",
                states.kimi_delta(
                    number("linear_attn_config.num_heads", "linear_num_heads"),
                    number("linear_attn_config.head_dim", "linear_head_dim"),
                    number("linear_attn_config.short_conv_kernel_size", "linear_conv_kernel_dim"),
                ),
            ),
        ),
    },
    pattern=first_of(indices("linear_attn_config.full_attn_layers", FULL, LINEAR, first=1), LISTED),
    mtp=NEXTN,
)
_MULTI_QUERY = flagged("multi_query", fixed(1), number("num_kv_heads"))
_GPT2_SIZE = ratio("n_embd", "n_embd", "n_head")
_GPT2 = Family(
    hidden=("n_embd",),
    mlp_size=("n_inner",),
    mlp_matrices=2,
    keeps=attention(number("n_head"), _GPT2_SIZE, number("n_head")),
    num_layers=number("n_layer"),
    longest=("n_positions", "n_ctx"),
)

FAMILIES: dict[str, Family] = {
    # -- full attention everywhere ------------------------------------------------------------------
    "llama": replace(ORDINARY, defaults={**_LLAMA, **ALL_HEADS}),
    "apertus": replace(ORDINARY, mlp_matrices=2),
    "arcee": replace(ORDINARY, mlp_matrices=2),
    "cohere": ORDINARY,
    "ernie4_5": replace(_OWN_HEADS, defaults={"head_dim": 128}),
    "ernie4_5_moe": replace(_OWN_HEADS, mtp=NEXTN, expert_size=("moe_intermediate_size",)),
    "gemma": replace(_OWN_HEADS, defaults={"head_dim": 256}),
    "glm": replace(ORDINARY, defaults={"head_dim": 128}),
    "glm4": replace(ORDINARY, defaults={"head_dim": 128}),
    "glm4_moe": replace(_OWN_HEADS, mtp=NEXTN, expert_size=("moe_intermediate_size",)),
    "glm4v_moe_text": replace(_OWN_HEADS, expert_size=("moe_intermediate_size",)),
    "glm4v_text": _OWN_HEADS,
    "gpt_neox": Family(keeps=attention(HEADS), mlp_matrices=2),
    "granite": ORDINARY,
    "granitemoe": replace(ORDINARY, expert_size=("intermediate_size",)),
    "granitemoeshared": replace(ORDINARY, expert_size=("intermediate_size",)),
    "helium": replace(ORDINARY, defaults={"head_dim": 128}),
    "hunyuan_v1_dense": replace(ORDINARY, unexplained=("use_cla",)),
    "hunyuan_v1_moe": replace(ORDINARY, unexplained=("use_cla",), mlp_matrices=0),
    "internlm2": _OWN_HEADS,
    "minimax_m2": replace(ORDINARY, defaults={"head_dim": 128}, expert_size=("intermediate_size",)),
    "nemotron": replace(_OWN_HEADS, mlp_matrices=2),
    "olmo": ORDINARY,
    "olmo2": ORDINARY,
    "olmoe": replace(ORDINARY, expert_size=("intermediate_size",)),
    "opt": Family(keeps=attention(HEADS), mlp_matrices=2, mlp_size=("ffn_dim",)),
    "persimmon": Family(keeps=attention(HEADS), mlp_matrices=2),
    "phi": replace(ORDINARY, mlp_matrices=2),
    "qwen3_omni_moe_text": replace(
        _QWEN, pattern=everywhere(FULL), defaults={}, expert_size=("moe_intermediate_size",)
    ),
    "seed_oss": replace(ORDINARY, defaults={"head_dim": 128}),
    "stablelm": _OWN_HEADS,
    "step3_text": Family(
        keeps=attention(fixed(1), number("head_dim")), longest=("max_position_embedding", "max_seq_len"), mlp_matrices=0
    ),
    "chatglm": Family(
        keeps=attention(
            flagged("multi_query_attention", number("multi_query_group_num"), HEADS), number("kv_channels")
        ),
        num_layers=number("num_layers", "num_hidden_layers"),
        longest=("seq_length",),
        mlp_size=("ffn_hidden_size",),
    ),
    "dbrx": Family(
        keeps=attention(number("attn_config.kv_n_heads"), ratio("d_model", "d_model", "n_heads"), number("n_heads")),
        num_layers=number("n_layers"),
        longest=("max_seq_len",),
        mlp_matrices=0,
    ),
    "falcon": Family(
        keeps=attention(
            flagged("new_decoder_architecture", number("num_kv_heads", "n_head_kv"), _MULTI_QUERY),
            ratio("hidden_size", "hidden_size", "num_attention_heads"),
        ),
        num_layers=number("num_hidden_layers", "n_layer"),
        defaults={"multi_query": True, "max_position_embeddings": 2048, "num_kv_heads": "num_attention_heads"},
        mlp_matrices=2,
        mlp_size=("ffn_hidden_size",),
    ),
    "gpt2": _GPT2,
    "gptj": _GPT2,
    "gpt_bigcode": replace(
        _GPT2,
        keeps=attention(flagged("multi_query", fixed(1), number("n_head")), _GPT2_SIZE, number("n_head")),
        defaults={"multi_query": True},
    ),
    # -- windows and chunks --------------------------------------------------------------------------
    "mistral": replace(_WINDOWED, defaults={}),  # a file without the field means a window to some, none to others
    "ministral": replace(_WINDOWED, defaults={}),
    "ministral3": replace(_WINDOWED, defaults={"sliding_window": None, "head_dim": 128}),
    "mixtral": replace(_WINDOWED, expert_size=("intermediate_size",)),
    "phi3": replace(_WINDOWED, defaults={"sliding_window": None, **ALL_HEADS}),
    "phimoe": replace(_WINDOWED, expert_size=("intermediate_size",)),
    "starcoder2": replace(_WINDOWED, mlp_matrices=2),
    "minimax": Family(
        keeps={FULL: (Module("self_attn", heads_of()),), LINEAR: (Module("self_attn", states.lightning),)},
        pattern=first_of(LISTED, marks("attn_type_list", {0: LINEAR, 1: FULL})),
        mlp_matrices=0,
    ),
    "mimo": replace(_QWEN, mtp=NEXTN),
    "mimo_v2": replace(_MIMO_V2, mlp_matrices=0),
    "mimo_v2_flash": replace(_MIMO_V2, mlp_matrices=0),
    "qwen2": _QWEN,
    "qwen2_moe": replace(_QWEN, expert_size=("moe_intermediate_size",)),
    "qwen2_vl": _QWEN,
    "qwen2_vl_text": _QWEN,
    "qwen2_5_omni_text": _QWEN,
    "qwen2_5_vl": _QWEN,
    "qwen2_5_vl_text": _QWEN,
    "qwen3": replace(_QWEN, defaults={"use_sliding_window": False, "head_dim": 128}),
    "qwen3_moe": replace(_QWEN, expert_size=("moe_intermediate_size",)),
    "qwen3_vl_text": replace(_QWEN, defaults={"use_sliding_window": False, "head_dim": 128}),
    "qwen3_vl_moe_text": replace(_QWEN, expert_size=("moe_intermediate_size",)),
    "smollm3": replace(_QWEN, defaults={"use_sliding_window": False, "num_key_value_heads": 4}),
    "cohere2": replace(_EVERY_FOURTH, defaults={"sliding_window_pattern": 4, "sliding_window": 4096, **ALL_HEADS}),
    "exaone4": Family(
        pattern=first_of(
            LISTED, when("sliding_window", every("sliding_window_pattern", FULL, SLIDING), everywhere(FULL))
        )
    ),
    "exaone_moe": replace(_EVERY_FOURTH, mtp=NEXTN, expert_size=("moe_intermediate_size",)),
    "gemma2": replace(_IN_TURN, keeps=attention(size=number("head_dim"))),
    "gemma3_text": _GEMMA3,
    "gemma3n_text": replace(
        _EVERY_NTH,
        rope_scales_length=False,
        shares_last="num_kv_shared_layers",
        defaults={"sliding_window_pattern": 5, "head_dim": 256, "num_kv_shared_layers": 15, "sliding_window": 512},
        mlp_matrices=0,
    ),
    "gemma4_text": Family(
        keeps={
            FULL: (Module("self_attn", heads_of(_GLOBAL_HEADS, number("global_head_dim"))),),
            SLIDING: (Module("self_attn", heads_of(size=number("head_dim"), kind="sliding", extent=WINDOW)),),
        },
        pattern=LISTED,
        rope_scales_length=False,
        shares_last="num_kv_shared_layers",
        defaults={"head_dim": 256, "global_head_dim": 512, "num_kv_shared_layers": 0, "sliding_window": 512},
        mlp_matrices=0,
    ),
    "gpt_oss": replace(_IN_TURN, keeps=attention(size=number("head_dim")), expert_size=("intermediate_size",)),
    "llama4_text": Family(
        pattern=first_of(
            LISTED,
            when(
                "attention_chunk_size",
                first_of(
                    marks("no_rope_layers", {0: FULL, 1: CHUNKED}, empty_is_silent=True),
                    every("no_rope_layer_interval", FULL, CHUNKED),
                ),
                everywhere(FULL),
            ),
        ),
        defaults={"no_rope_layer_interval": 4, "head_dim": 128},
        mlp_size=("intermediate_size_mlp",),
        expert_size=("intermediate_size",),
    ),
    "olmo3": replace(_EVERY_FOURTH, defaults={"sliding_window_pattern": 4, "sliding_window": 4096, **ALL_HEADS}),
    "step3p5": Family(
        keeps={
            FULL: (
                Module(
                    "self_attn", heads_of(number("num_attention_groups", "num_key_value_heads"), number("head_dim"))
                ),
            ),
            SLIDING: (Module("self_attn", _STEP35_OTHER),),
        },
        pattern=listed("layer_types", may_go_on=True),
        mtp=NEXTN,
        mlp_matrices=0,
    ),
    # -- latents -------------------------------------------------------------------------------------
    "deepseek_v2": replace(_DEEPSEEK, expert_size=("moe_intermediate_size",)),
    "deepseek_v3": replace(_DEEPSEEK, expert_size=("moe_intermediate_size",)),
    "kimi_k2": replace(_DEEPSEEK, expert_size=("moe_intermediate_size",)),
    "glm4_moe_lite": replace(_LATENT_ONLY, expert_size=("moe_intermediate_size",)),
    "mistral4": replace(_LATENT_ONLY, expert_size=("moe_intermediate_size",)),
    "longcat_flash": replace(
        _LATENT_ONLY,
        keeps={FULL: (Module("self_attn.0", latent()), Module("self_attn.1", latent()))},
        num_layers=number("num_layers", "num_hidden_layers"),
        mlp_matrices=0,
    ),
    "deepseek_v32": replace(_INDEXED, expert_size=("moe_intermediate_size",)),
    "glm_moe_dsa": replace(_INDEXED, expert_size=("moe_intermediate_size",)),
    # -- states --------------------------------------------------------------------------------------
    "kimi_linear": replace(_KIMI_LINEAR, mlp_matrices=0),
    "qwen3_next": replace(_DELTA_NET, mtp=NEXTN, expert_size=("moe_intermediate_size",)),
    "qwen3_5_text": replace(_DELTA_NET, mtp="mtp_num_hidden_layers"),
    "qwen3_5_moe_text": replace(_DELTA_NET, mtp="mtp_num_hidden_layers", expert_size=("moe_intermediate_size",)),
    "jamba": Family(
        keeps=states_and_attention(
            Module("mamba", states.mamba1(_INNER, number("mamba_d_state"), number("mamba_d_conv")))
        ),
        pattern=first_of(LISTED, period("attn_layer_period", "attn_layer_offset", "attention", MAMBA)),
        expert_size=("intermediate_size",),
    ),
    "bamba": replace(
        _MAMBA2_HYBRID,
        defaults={},
        pattern=first_of(LISTED, indices("attn_layer_indices", "attention", MAMBA)),
        pattern_fields=("attn_layer_indices",),
    ),
    "granitemoehybrid": replace(_MAMBA2_HYBRID, expert_size=("intermediate_size",)),
    "nemotron_h": Family(
        keeps={
            **states_and_attention(
                _NEMOTRON_STATE, Module("mixer", heads_of(size=number("head_dim", "attention_head_dim")))
            ),
            **dict.fromkeys(("mlp", "moe"), NOTHING),
        },
        pattern=first_of(LISTED, letters("hybrid_override_pattern", {"M": MAMBA, "*": FULL, "-": "mlp", "E": "moe"})),
        pattern_fields=("hybrid_override_pattern",),
        mtp=NEXTN,
        num_layers=lambda config: _letters_or_layers(config),
        mlp_matrices=2,
        expert_size=("moe_intermediate_size",),
    ),
    "falcon_h1": Family(
        keeps={
            "both": (
                Module("self_attn", heads_of()),
                named_mamba2(if_told("mamba_d_ssm", number("mamba_d_ssm"), _INNER)),
            )
        },
        pattern=everywhere("both"),
    ),
    "lfm2": Family(
        keeps={FULL: (Module("self_attn", heads_of()),), "conv": (Module("conv", states.short_conv),)},
        pattern=first_of(LISTED, indices("full_attn_idxs", FULL, "conv")),
        pattern_fields=("full_attn_idxs",),
        mlp_matrices=0,
    ),
    "zamba2": Family(
        keeps={
            "hybrid": (Module("self_attn", heads_of(HEADS, _ZAMBA_HEAD)), _ZAMBA_STATE),
            MAMBA: (_ZAMBA_STATE,),
            LINEAR: (_ZAMBA_STATE,),
        },
        pattern=first_of(LISTED, indices("hybrid_layer_ids", "hybrid", MAMBA)),
        pattern_fields=("hybrid_layer_ids",),
        mlp_matrices=0,
    ),
    "falcon_mamba": replace(_MAMBA1, mlp_size=()),
    "mamba": replace(_MAMBA1, mlp_size=()),
    "mamba2": replace(
        _MAMBA1,
        keeps={
            MAMBA: (
                Module(
                    "mixer",
                    states.mamba2(
                        channels=product(number("expand"), HIDDEN),
                        heads=number("num_heads"),
                        head_dim=number("head_dim"),
                        groups=number("n_groups"),
                        state_size=number("state_size"),
                        kernel=number("conv_kernel"),
                    ),
                ),
            )
        },
        mlp_size=(),
    ),
    "rwkv": Family(
        keeps={MAMBA: (Module("attention", states.rwkv4),)},
        pattern=everywhere(MAMBA),
        longest=("context_length",),
        defaults={"attention_hidden_size": "hidden_size"},
        mlp_matrices=0,
    ),
    # -- encoders beside the decoder -----------------------------------------------------------------
    "whisper": encoder_decoder(
        _DECODER_HEADS,
        ratio("d_model", "d_model", "decoder_attention_heads"),
        number("max_source_positions"),
        num_layers=number("decoder_layers"),
        longest=("max_target_positions",),
    ),
    "bart": _BART,
    "mbart": _BART,
    "t5": encoder_decoder(
        number("num_heads"),
        number("d_kv"),
        number("n_positions"),
        num_layers=number("num_decoder_layers"),
        longest=("n_positions",),
        defaults={"d_kv": 64, "num_decoder_layers": "num_layers"},
        note="its positions are relative: n_positions is the length it was made with, not a limit",
    ),
    "t5_gemma_module": replace(
        _IN_TURN,
        keeps={kind: (*modules, _T5GEMMA_CROSS) for kind, modules in attention().items() if kind != CHUNKED},
        encoder_tokens=_t5gemma_encoder,
        prefix="decoder.layers",
    ),
    "mllama_text_model": Family(
        keeps={**attention(), "cross": (Module("cross_attn", heads_of(kind="cross", extent=_image_tokens)),)},
        pattern=indices("cross_attention_layers", "cross", FULL),
        encoder_tokens=_image_tokens,
        note="its cross layers are counted with one image a request, at its most tiles",
    ),
}
FAMILIES["minimax_text_01"] = FAMILIES["minimax"]
FAMILIES["lfm2_moe"] = FAMILIES["lfm2"]
FAMILIES["step3p7_text"] = FAMILIES["step3p5"]


def _letters_or_layers(config: ModelConfig) -> int:
    """Nemotron-H's files may leave the number of layers to the pattern."""
    if config.has("num_hidden_layers"):
        return config.integer("num_hidden_layers")
    kinds = config.strings("layers_block_type", "layer_types") or config.known("hybrid_override_pattern")
    return len(kinds)
