"""What a pool tells of its members as it happens, one event each.

    generator_lost       an incarnation is over: why, and which groups are given to others
    generator_restart    a member that was lost takes work again
    generator_given_up   its restarts are used up
    generator_fenced     an answer of an incarnation that was over was thrown away

Owns the words. A log hears of it where nobody else wants to.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from headrace.generators.pool.member import Member

_LOG = logging.getLogger(__name__)

MAX_NAMED = 5
"""Groups that a message names; its fields name all."""

Tell: TypeAlias = Callable[[str, str, Mapping[str, object]], None]
"""Takes kind, message and fields of an event."""


def log(kind: str, message: str, fields: Mapping[str, object]) -> None:
    """Have the log hear of it: a `Tell`."""
    del fields
    _LOG.warning("%s: %s", kind, message)


class Telling:
    """Puts what happens to members into words."""

    def __init__(self) -> None:
        self.tell: Tell = log

    def lost(self, member: Member, why: str) -> None:
        """Tell that the incarnation of now is over."""
        groups, member.reissued = list(member.reissued), ()
        again = f"; {_some(groups)} given to others" if groups else ""
        fields = {**_who(member), "cause": why, "reissued": groups}
        self.tell("generator_lost", f"{_name(member)} was lost: {why}{again}", fields)

    def restarted(self, member: Member) -> None:
        """Tell that a member that was lost serves again."""
        message = f"generator {member.index} is back, as incarnation {member.incarnation}"
        fields = {**_who(member), "losses_in_a_row": member.losses_in_a_row}
        self.tell("generator_restart", message, fields)

    def given_up(self, member: Member) -> None:
        """Tell that it is not started again."""
        message = (
            f"generator {member.index} is not started again: it was lost "
            f"{member.losses_in_a_row} times without a group of it between "
            "(placement.max_restarts)"
        )
        fields = {**_who(member), "losses_in_a_row": member.losses_in_a_row}
        self.tell("generator_given_up", message, fields)

    def fenced(self, member: Member, incarnation: int, group_id: str) -> None:
        """Tell that an answer came after whoever gave it was over."""
        message = (
            f"group {group_id} came from incarnation {incarnation} of generator {member.index}, "
            "which was over, and was thrown away"
        )
        fields = {"member": member.index, "incarnation": incarnation, "group": group_id}
        self.tell("generator_fenced", message, fields)


def _who(member: Member) -> dict[str, object]:
    return {"member": member.index, "incarnation": member.incarnation}


def _name(member: Member) -> str:
    return f"generator {member.index} (incarnation {member.incarnation})"


def _some(groups: Sequence[str]) -> str:
    count, named = len(groups), ", ".join(groups[:MAX_NAMED])
    more = f" and {count - MAX_NAMED} more" * (count > MAX_NAMED)
    return f"group {named} is" if count == 1 else f"groups {named}{more} are"
