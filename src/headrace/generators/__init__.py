"""Generators: the roles that sample rollouts. The own torch engine is the default."""

from headrace.generators.torch_generator import TorchGenerator

__all__ = ["TorchGenerator"]
