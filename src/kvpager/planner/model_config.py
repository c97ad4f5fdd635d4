"""A Hugging Face ``config.json``: where the text model's fields are, and what is missing from them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import ConfigError

__all__ = ["ModelConfig", "load_model_config"]

_NESTED = ("text_config", "llm_config", "language_config", "thinker_config")
"""Where multimodal models keep the configuration of the model that generates text."""
MAX_LAYERS = 1000


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The fields of one text model.

    ``source`` names the file in errors, ``path`` the nested section (``"text_config."``), ``outer``
    is the whole file. ``notes`` collects every value that the file leaves to its model type, for the report.
    """

    fields: Mapping[str, Any]
    source: str
    path: str
    outer: Mapping[str, Any]
    notes: list[str] = field(default_factory=list)

    @property
    def model_type(self) -> str:
        """The family's name. Raises ``ConfigError`` when it is missing."""
        value = self.fields.get("model_type")
        if not isinstance(value, str):
            raise ConfigError(f"{self._at('model_type')} must name the model's family, got {value!r}")
        return value

    @property
    def dtype(self) -> str | None:
        """What the weights are stored in (``torch_dtype`` or ``dtype``), or None where the file is silent."""
        for fields in (self.fields, self.outer):
            for name in ("torch_dtype", "dtype"):
                if isinstance(fields.get(name), str):
                    return str(fields[name]).removeprefix("torch.")
        return None

    def has(self, name: str) -> bool:
        """Whether the field is there and not null."""
        return self.fields.get(name) is not None

    def integer(self, *names: str, default: int | None = None) -> int:
        """The first of the fields that is there, a positive integer.

        ``default`` is the model type's own value, for fields that its published files leave out;
        it is noted when used. Raises ``ConfigError`` naming the field otherwise.
        """
        for name in names:
            if self.has(name):
                return self._positive(name, self.fields[name])
        if default is None:
            raise ConfigError(
                f"{self._at(' or '.join(names))} is missing, and a {self.model_type} model's cache can't be "
                f"sized without it; add the field"
            )
        self.notes.append(f"{self.path}{names[0]} = {default}: the default of {self.model_type}, not in the file")
        return default

    def num_layers(self, name: str = "num_hidden_layers") -> int:
        """The number of layers, in bounds that a plan can be made for. Raises ``ConfigError``."""
        count = self.integer(name)
        if count > MAX_LAYERS:
            raise self.error(name, f"is {count}; no more than {MAX_LAYERS} layers can be planned")
        return count

    def optional_integer(self, name: str) -> int | None:
        """The field, or None where it is missing or null."""
        return self._positive(name, self.fields[name]) if self.has(name) else None

    def flag(self, name: str) -> bool:
        """The field, false where it is missing."""
        return bool(self.fields.get(name, False))

    def integers(self, name: str) -> tuple[int, ...] | None:
        """A list of integers, or None where it is missing or null. Raises ``ConfigError`` for anything else."""
        values = self.fields.get(name)
        if values is None:
            return None
        if not isinstance(values, list) or not all(isinstance(value, int) for value in values):
            raise ConfigError(f"{self._at(name)} must be a list of integers, got {values!r}")
        return tuple(values)

    def strings(self, *names: str) -> tuple[str, ...] | None:
        """The first of the fields that is there, a list of strings, or None; else ``ConfigError``."""
        for name in names:
            values = self.fields.get(name)
            if values is None:
                continue
            if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
                raise ConfigError(f"{self._at(name)} must be a list of strings, got {values!r}")
            return tuple(values)
        return None

    def error(self, name: str, problem: str) -> ConfigError:
        """An error about one field, for the caller to raise."""
        return ConfigError(f"{self._at(name)} {problem}")

    def _at(self, name: str) -> str:
        return f"{self.source}: {self.path}{name}"

    def _positive(self, name: str, value: object) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"{self._at(name)} must be a positive integer, got {value!r}")
        return value


def load_model_config(config: str | Path | Mapping[str, Any]) -> ModelConfig:
    """The text model's configuration in a file, in a directory's ``config.json``, or in a mapping.

    Raises ``ConfigError`` for a file that is not there or is not a JSON object.
    """
    if isinstance(config, Mapping):
        return _text_config(config, source="config")
    path = Path(config)
    if path.is_dir():
        path = path / "config.json"
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        problem = error.strerror or str(error)
        raise ConfigError(f"{path}: {problem}; give a config.json or a directory that has one") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ConfigError(f"{path}: a model's configuration is a JSON object, got {type(fields).__name__}")
    return _text_config(fields, source=str(path))


def _text_config(fields: Mapping[str, Any], *, source: str) -> ModelConfig:
    outer, path = fields, ""
    while name := next((name for name in _NESTED if isinstance(fields.get(name), Mapping)), None):
        fields, path = fields[name], f"{path}{name}."
    return ModelConfig(fields=fields, source=source, path=path, outer=outer)
