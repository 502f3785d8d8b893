"""Grades code that a policy wrote: the expected values stay here, the code runs elsewhere.

What runs it is `sandbox`; this package decides what is run, with which input, and what its result
is worth.
"""
