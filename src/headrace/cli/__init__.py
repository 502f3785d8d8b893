"""The command line: one file per verb. Heavy imports happen inside the verbs."""

from headrace.cli.app import main

__all__ = ["main"]
