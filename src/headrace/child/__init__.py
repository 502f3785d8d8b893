"""Processes of this program's own: what they do first, how they are asked, how they end."""

from headrace.child.inside import adopt_orphans, die_with_parent, end_with, take_channel

__all__ = ["adopt_orphans", "die_with_parent", "end_with", "take_channel"]
