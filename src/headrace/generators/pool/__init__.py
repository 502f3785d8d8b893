"""A pool of generators, each in a process of its own, any of which may die."""
