"""Runs code that a policy wrote, as if an attacker had: it was optimised against its judge."""
