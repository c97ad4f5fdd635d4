"""From a model's ``config.json`` to a cache: how it is laid out, and what fits."""

from .plan import Plan, PlanOptions, load_cache_config, plan

__all__ = ["Plan", "PlanOptions", "load_cache_config", "plan"]
