"""Generators: the roles that sample rollouts. The own torch engine is the default."""

from headrace.generators.torch_generator import TorchGenerator, default_cache_bytes

__all__ = ["TorchGenerator", "default_cache_bytes"]
