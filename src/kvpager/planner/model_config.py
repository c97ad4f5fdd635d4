"""A Hugging Face ``config.json``: where the text model's fields are, and what is missing from them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from .ecosystem import attribute, read_by_class

__all__ = ["MAX_LAYERS", "ModelConfig", "load_model_config"]

_NESTED = ("text_config", "llm_config", "language_config", "thinker_config", "decoder")
"""Where multimodal and encoder-decoder models keep the configuration of the model that generates text."""
_TYPE_OF_SECTION = {"llava": "llama", "mistral3": "mistral", "deepseek_vl_v2": "deepseek_v2", "kimi_k25": "deepseek_v3"}
"""What a nested section without a model type is; others are named after the outer model."""
MAX_LAYERS = 1000
_NOWHERE = object()


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The fields of one text model.

    ``source`` names the file in errors, ``path`` the nested section (``"text_config."``), ``outer`` is the whole file,
    ``quantization`` what a ``hf_quant_config.json`` beside it says. ``defaults`` are the values of the model type
    (the name of another field: the same as that). A field is looked for in the file, in ``defaults``, and in
    transformers' class of the model type where that is installed. ``notes`` collects, for the report, every value
    that the file leaves out.
    """

    fields: Mapping[str, Any]
    source: str
    path: str
    outer: Mapping[str, Any]
    quantization: Mapping[str, Any] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def model_type(self) -> str:
        """The family's name. Raises ``ConfigError`` when it is missing."""
        value = self.fields.get("model_type")
        if value is None and self.path and isinstance(outer := self.outer.get("model_type"), str):
            return _TYPE_OF_SECTION.get(outer, f"{outer}_text")
        if not isinstance(value, str):
            raise ConfigError(f"{self._at('model_type')} must name the model's family, got {value!r}")
        return value

    @property
    def dtype(self) -> str | None:
        """What the weights are stored in (``torch_dtype`` or ``dtype``), or None where the file is silent."""
        for fields in (self.fields, self.outer.get("thinker_config"), self.outer):
            for name in ("torch_dtype", "dtype"):
                if isinstance(fields, Mapping) and isinstance(fields.get(name), str):
                    return str(fields[name]).removeprefix("torch.")
        return None

    def says(self, name: str) -> bool:
        """Whether the file has the field, be it null."""
        return self._in_file(name) is not _NOWHERE

    def has(self, name: str) -> bool:
        """Whether the field is in the file and not null."""
        return self.says(name) and self._in_file(name) is not None

    def told(self, name: str) -> bool:
        """Whether the file or the family's row has a value for the field."""
        return self.has(name) or self.defaults.get(name) is not None

    def known(self, *names: str) -> Any:
        """The first of the fields that anybody knows; None where it is known to be null.

        Notes it unless it is the file's. Raises ``ConfigError`` naming the field where nobody knows it.
        """
        value = self._lookup(*names)
        if value is _NOWHERE:
            raise self._missing(names)
        return value

    def integer(self, *names: str) -> int:
        """The first of the fields that anybody knows, a positive integer. Raises ``ConfigError`` naming the field."""
        name = next((name for name in names if self.has(name)), names[0])
        value = self._lookup(*names)
        if value is None:
            value = self._from_class(names)
        if value is None or value is _NOWHERE:
            raise self._missing(names)
        return self._positive(name, value)

    def optional_integer(self, *names: str) -> int | None:
        """The first of the fields that anybody knows, or None where it is null or unknown."""
        name = next((name for name in names if self.has(name)), names[0])
        value = self._lookup(*names)
        return None if value is None or value is _NOWHERE else self._positive(name, value)

    def count(self, *names: str) -> int:
        """The first of the fields that anybody knows, a number of things; 0 where it is null or unknown."""
        value = self._lookup(*names)
        return value if isinstance(value, int) else 0

    def outer_integer(self, name: str) -> int:
        """A field of the whole file (dots lead into sections), a positive integer. Raises ``ConfigError``."""
        return replace(self, fields=self.outer, path="", defaults={}).integer(name)

    def flag(self, name: str) -> bool:
        """The field; false where nobody knows it."""
        value = self._lookup(name)
        return value is not _NOWHERE and bool(value)

    def integers(self, *names: str) -> tuple[int, ...] | None:
        """The first of the fields that the file has, a list of integers, or None; else ``ConfigError``."""
        return self._list(names, int, "integers")

    def strings(self, *names: str) -> tuple[str, ...] | None:
        """The first of the fields that the file has, a list of strings, or None; else ``ConfigError``."""
        return self._list(names, str, "strings")

    def error(self, name: str, problem: str) -> ConfigError:
        """An error about one field, for the caller to raise."""
        return ConfigError(f"{self._at(name)} {problem}")

    def _lookup(self, *names: str) -> Any:
        for name in names:
            if self.has(name):
                return self._in_file(name)
        if any(self.says(name) for name in names) and not any(name in self.defaults for name in names):
            return None
        for name in names:
            if name in self.defaults:
                return self._default(name)
        return self._from_class(names)

    def _list(self, names: tuple[str, ...], of: type, what: str) -> tuple[Any, ...] | None:
        for name in names:
            values = self._in_file(name)
            if values is None or values is _NOWHERE:
                continue
            if not isinstance(values, list) or not all(isinstance(value, of) for value in values):
                raise self.error(name, f"must be a list of {what}, got {values!r}")
            return tuple(values)
        return None

    def _in_file(self, name: str) -> Any:
        value: Any = self.fields
        for part in name.split("."):
            if not isinstance(value, Mapping) or part not in value:
                return _NOWHERE
            value = value[part]
        return value

    def _default(self, name: str) -> Any:
        value = self.defaults[name]
        if isinstance(value, str):
            value = self.integer(value)
        if value not in (None, False):
            self._note(name, value, f"the default of {self.model_type}")
        return value

    def _from_class(self, names: tuple[str, ...]) -> Any:
        if self._read_by_class is None:
            return _NOWHERE
        config, who = self._read_by_class
        for name in names:
            try:
                value = attribute(config, name)
            except AttributeError:
                continue
            if value not in (None, False):
                self._note(name, value, f"the default of {self.model_type} in {who}")
            return value
        return _NOWHERE

    @cached_property
    def _read_by_class(self) -> tuple[object, str] | None:
        return read_by_class(self.model_type, self.fields)

    def _note(self, name: str, value: object, whose: str) -> None:
        value = f"{len(value)} values" if isinstance(value, (list, tuple)) else value
        self.notes.append(f"{self.path}{name} = {value}: {whose}, not in the file")

    def _missing(self, names: tuple[str, ...]) -> ConfigError:
        return ConfigError(
            f"{self._at(' or '.join(names))} is missing, and a {self.model_type} model's cache can't be sized without "
            f"it; add the field, or let transformers fill it in: pip install 'kvpager[plan]'"
        )

    def _at(self, name: str) -> str:
        return f"{self.source}: {self.path}{name}"

    def _positive(self, name: str, value: object) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"{self._at(name)} must be a positive integer, got {value!r}")
        return value


def load_model_config(config: str | Path | Mapping[str, Any]) -> ModelConfig:
    """The text model's configuration in a file, in a folder's ``config.json``, or in a mapping.

    A ``hf_quant_config.json`` beside the file is read too. Raises ``ConfigError`` for a file that is not there or
    is not a JSON object.
    """
    if isinstance(config, Mapping):
        return _text_config(config, {}, source="config")
    path = Path(config)
    if path.is_dir():
        path = path / "config.json"
    beside = path.with_name("hf_quant_config.json")
    quantization = _read(beside) if beside.is_file() else {}
    return _text_config(_read(path), quantization, source=str(path))


def _read(path: Path) -> dict[str, Any]:
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        problem = error.strerror or str(error)
        raise ConfigError(f"{path}: {problem}; give a config.json or a directory that has one") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ConfigError(f"{path}: a model's configuration is a JSON object, got {type(fields).__name__}")
    return fields


def _text_config(fields: Mapping[str, Any], quantization: Mapping[str, Any], *, source: str) -> ModelConfig:
    outer, path = fields, ""
    while name := next((name for name in _NESTED if isinstance(fields.get(name), Mapping)), None):
        fields, path = fields[name], f"{path}{name}."
    return ModelConfig(fields=fields, source=source, path=path, outer=outer, quantization=quantization)
