"""From a model's configuration to its layers' caches: a row for each family (rows.py), read here."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...errors import ConfigError
from ..memory import AttentionMemory, Layer, Rank, StateMemory
from ..model_config import MAX_LAYERS, ModelConfig
from .patterns import shown
from .rows import FAMILIES, ORDINARY, Family

__all__ = ["FAMILIES", "ModelLayers", "model_layers"]


@dataclass(frozen=True, kw_only=True)
class ModelLayers:
    """A model's caches; ``layers`` may end in drafting ones, which ``kinds`` doesn't count."""

    family: Family
    config: ModelConfig
    kinds: tuple[str, ...]
    """The kind of each layer of the model, those that keep nothing and those that others share among them."""
    layers: tuple[Layer, ...]
    num_encoder_tokens: int = 0
    """Encoder tokens of one request at most (encoder-decoder models)."""

    @property
    def num_layers(self) -> int:
        """Layers of the model, also those that keep nothing."""
        return len(self.kinds)


def model_layers(config: ModelConfig, rank: Rank, *, assume_full: bool = False, mtp: bool = False) -> ModelLayers:
    """The caches of the model's layers on one rank, with ``mtp`` those of its drafting layers too.

    ``assume_full``: take an unknown family for ordinary full attention. Raises ``ConfigError`` naming what can't be
    placed. O(layers).
    """
    family = _family(config, assume_full)
    config = replace(config, defaults=family.defaults)
    for name in family.unexplained:
        if config.flag(name):
            raise config.error(name, f"changes what a {config.model_type} model keeps in a way that is not known here")
    num_layers = _num_layers(config, family)
    kinds = _kinds(config, family, num_layers)
    layers = _layers(config, family, rank, kinds)
    if not layers:
        raise config.error("layers", f"none of the {len(kinds)} keeps anything: there is no cache to plan")
    if mtp:
        layers += _drafting(config, family, rank, kinds)
    return ModelLayers(
        family=family,
        config=config,
        kinds=kinds,
        layers=layers,
        num_encoder_tokens=family.encoder_tokens(config) if family.encoder_tokens else 0,
    )


def _family(config: ModelConfig, assume_full: bool) -> Family:
    family = FAMILIES.get(config.model_type)
    if family is None and assume_full:
        config.notes.append(
            f"ASSUMED: nothing is known of model type {config.model_type!r}; every layer is counted as full attention. "
            f"Windows, states, shared or compressed layers would make these numbers wrong"
        )
        return ORDINARY
    if family is None:
        known = ", ".join(sorted(FAMILIES))
        raise config.error(
            "model_type",
            f"{config.model_type!r} is not a family that can be placed; --assume full counts it as plain full "
            f"attention. Known: {known}",
        )
    if family.note:
        config.notes.append(family.note)
    return family


def _num_layers(config: ModelConfig, family: Family) -> int:
    count = family.num_layers(config)
    if count > MAX_LAYERS:
        raise config.error("num_hidden_layers", f"is {count}; no more than {MAX_LAYERS} layers can be planned")
    return count


def _kinds(config: ModelConfig, family: Family, num_layers: int) -> tuple[str, ...]:
    """The kind of each layer, as the family's row reads it, or as its class does. Raises ``ConfigError``."""
    kinds = family.pattern(config, num_layers)
    if kinds is None:
        kinds = tuple(config.known("layer_types", *family.pattern_fields) or ())
        if not kinds:
            raise config.error("layer_types", "is null; it says which layer keeps what, add it")
    unknown = sorted({kind for kind in kinds if kind not in family.keeps})
    if unknown:
        index = kinds.index(unknown[0])
        raise config.error(
            f"layer {index}",
            f"is of kind {unknown[0]!r}, which can't be placed in a {config.model_type} model; known: "
            f"{', '.join(sorted(family.keeps))}; the file says: {shown(kinds)}",
        )
    return kinds


def _layers(config: ModelConfig, family: Family, rank: Rank, kinds: tuple[str, ...]) -> tuple[Layer, ...]:
    """The modules that keep something, in order. Layers that read other layers' keys and values keep nothing.

    What a kind keeps is worked out once, and only if a layer is of it: fields of kinds that the model doesn't use
    may be missing.
    """
    shared = config.known(family.shares_last) or 0 if family.shares_last else 0
    owners = kinds[: len(kinds) - shared]
    if missing := sorted(set(kinds) - set(owners)):
        raise config.error(str(family.shares_last), f"{shared} leaves no layer of kind {missing[0]} to share from")
    kept = {kind: _modules(config, family, rank, kind) for kind in dict.fromkeys(owners)}
    return tuple(
        Layer(index=index, name=f"{family.prefix}.{index}.{name}", memory=memory)
        for index, kind in enumerate(owners)
        for name, memory in kept[kind]
    )


def _modules(
    config: ModelConfig, family: Family, rank: Rank, kind: str
) -> list[tuple[str, AttentionMemory | StateMemory]]:
    return [(module.name, module.keeps(config, rank)) for module in family.keeps[kind]]


def _drafting(config: ModelConfig, family: Family, rank: Rank, kinds: tuple[str, ...]) -> tuple[Layer, ...]:
    """The checkpoint's own drafting layers (MTP), behind the others. Raises ``ConfigError`` where there are none."""
    if family.mtp is None:
        raise ConfigError(f"{config.source}: a {config.model_type} model has no drafting layers that mtp could use")
    count = config.optional_integer(family.mtp)
    if count is None:
        count = 1
        config.notes.append(f"ASSUMED: one drafting layer; the file has no {family.mtp}")
    modules = _modules(config, family, rank, family.mtp_kind if family.mtp_kind in kinds else kinds[-1])
    return tuple(
        Layer(index=index, name=f"{family.prefix}.{index}.{name}", memory=memory, drafts=True)
        for index in range(len(kinds), len(kinds) + count)
        for name, memory in modules
    )
