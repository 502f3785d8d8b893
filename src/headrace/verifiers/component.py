"""What a component of a weighted sum is, and what it says of one completion."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, assert_never, runtime_checkable

from headrace.types import Outcome, Prompt, Rollout
from headrace.verifiers.process_pool import Reply, ReplyStatus
from headrace.verifiers.slots import Slots


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """One component's word on one completion."""

    outcome: Outcome
    reward: float | None
    """None means "not scored"."""
    detail: str = ""
    """One line for people."""
    traceback: str = ""
    """Where a reward function raised; kept for the first failure of a run."""
    labels: tuple[str, ...] = ()
    """Notes on what the completion tries; see `Verdict.labels`."""

    @property
    def failed(self) -> bool:
        """Whether something broke; an abstention did not."""
        return self.reward is None and self.outcome is not Outcome.ABSTAIN


class Component(Protocol):
    """Scores one completion at a time; many calls may wait side by side."""

    async def score(self, prompt: Prompt, completion: str) -> Score:
        """Return the score. Never raises for what a completion or a reward function does."""
        ...

    async def close(self) -> None:
        """End every process it started. Idempotent."""
        ...


@runtime_checkable
class RolloutComponent(Protocol):
    """Scores what the text alone does not tell, such as its number of tokens."""

    async def score_rollout(self, prompt: Prompt, rollout: Rollout) -> Score:
        """Return the score, as `Component.score` does."""
        ...

    async def close(self) -> None:
        """End every process it started. Idempotent."""
        ...


@runtime_checkable
class Slotted(Protocol):
    """A component that works in a bounded number of places."""

    @property
    def slots(self) -> Slots:
        """The places and their figures."""
        ...


@runtime_checkable
class Resizable(Protocol):
    """What works in processes or cells of this machine, and can do with another number of them."""

    @property
    def num_workers(self) -> int:
        """That work side by side at most."""
        ...

    async def resize(self, num_workers: int) -> None:
        """Let so many work; return once no more do, each job in hand having been answered.

        Waits for those jobs, which have deadlines of their own.
        """
        ...


@runtime_checkable
class Measured(Protocol):
    """What can say how it is used, such as the pool of a sandbox."""

    def statistics(self) -> Mapping[str, float]:
        """Return counts and latencies since the start, by the names of metrics."""
        ...


def right_or_wrong(*, right: bool, detail: str) -> Score:
    """Return the score of a comparison: 1 or 0."""
    return Score(
        outcome=Outcome.PASS if right else Outcome.WRONG, reward=float(right), detail=detail
    )


def no_answer_to_compare(prompt: Prompt) -> Score:
    """Return the score where the prompt came without an expected answer: our fault, not 0."""
    return unscored(
        f"prompt {prompt.prompt_id} has no usable expected answer: {shown(prompt.answer)}"
    )


def unscored(detail: str) -> Score:
    """Return the score of what could not be compared for a reason of our own."""
    return Score(outcome=Outcome.INFRA, reward=None, detail=detail)


def failed_score(reply: Reply) -> Score:
    """Return the score of a job that came to no answer: never a number."""
    match reply.status:
        case ReplyStatus.TIMEOUT:
            outcome = Outcome.TIMEOUT_WALL
        case ReplyStatus.OOM:
            outcome = Outcome.OOM
        case ReplyStatus.ERROR:
            outcome = Outcome.RUNTIME
        case ReplyStatus.CRASH:
            outcome = Outcome.INFRA
        case ReplyStatus.OK:
            msg = "a job that was answered did not fail"
            raise AssertionError(msg)
        case _:
            assert_never(reply.status)
    return Score(outcome=outcome, reward=None, detail=reply.detail, traceback=reply.traceback)


def shown(text: str | None, limit: int = 80) -> str:
    """Return ``text`` as it may stand in a detail: on one line, quoted, and short."""
    if text is None:
        return "no answer"
    return repr(text if len(text) <= limit else text[:limit] + "...")
