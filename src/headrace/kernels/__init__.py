"""Functions over whole vectors, written in Python and compiled by numba for this processor."""
