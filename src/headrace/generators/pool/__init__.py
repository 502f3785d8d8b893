"""A pool of generators, each in a process of its own, any of which may die."""

from headrace.generators.pool.child_proxy import ChildLauncher
from headrace.generators.pool.pool import GeneratorPool
from headrace.generators.pool.roster import PoolSettings

__all__ = ["ChildLauncher", "GeneratorPool", "PoolSettings"]
