"""Kernels for processors, written in Python, compiled by numba, and the runner that uses them."""
