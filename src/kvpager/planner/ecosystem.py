"""What transformers knows of a family: the values that a published ``config.json`` leaves out."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

__all__ = ["attribute", "class_of", "read_by_class"]


def class_of(model_type: str) -> tuple[type[Any], str] | None:
    """The family's configuration class and the version of transformers; None where one of them isn't there.

    Only classes of the installed package, never code of a checkpoint. Needs no PyTorch.
    """
    with _quiet():
        try:
            import transformers
        except ImportError:
            return None
        if model_type not in transformers.CONFIG_MAPPING:
            return None
        return transformers.CONFIG_MAPPING[model_type], str(transformers.__version__)


def read_by_class(model_type: str, fields: Mapping[str, Any]) -> tuple[object, str] | None:
    """The file's fields as the family's class reads them, and by whom; None where nobody can."""
    found = class_of(model_type)
    if found is None:
        return None
    with _quiet():
        try:
            config = found[0].from_dict(dict(fields))
            return getattr(config, "text_config", config), f"transformers {found[1]}"
        except Exception:  # a class may object to anything; what is missing is then named as without it
            return None


def attribute(config: object, name: str) -> Any:
    """A field of a class's reading; ``AttributeError`` where it has none, or not one for all layers."""
    try:
        return getattr(config, name)
    except AttributeError:
        raise
    except Exception as error:  # transformers' own errors about fields that differ between layers
        raise AttributeError(str(error)) from None


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' remarks about PyTorch and about fields that only concern its own models."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(before)
