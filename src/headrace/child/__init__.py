"""Processes that answer requests over their pipes: what they do first, and how they are asked."""

from headrace.child.inside import die_with_parent, take_channel

__all__ = ["die_with_parent", "take_channel"]
