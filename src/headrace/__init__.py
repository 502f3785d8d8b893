"""headrace: infrastructure for post-training language models with reinforcement learning."""

__version__ = "0.1.0"

__all__ = ["__version__"]
