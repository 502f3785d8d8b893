"""Runtimes place the parts of a run: all in this process, or on a cluster."""
