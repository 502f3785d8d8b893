"""The controller: the loops of a run. Knows roles and records, no torch, no runtime.

    Waves.run        draws, generates, scores and delivers groups; see `waves`
    _learn_loop      waits for a batch (unblocked by a delivered group); step, begin to publish,
                     settle, evaluate, checkpoint. The only loop that may end the run
    _release         waits for a publication (unblocked by the generators); frees the step's slots
    evaluate         measures held-out prompts beside training, if it is to; see `held_out`
    _watch           says what is being waited for when nothing has moved for a while
    LoopLag.measure  sleeps, and notes how late it wakes

Owns invariant 9, and the order that makes 1 and 7 hold: weights are published before slots are
freed, so that a group admitted afterwards is born fresh, and a step is on record before a
checkpoint holds it. Where there are slots for several batches the next step is made while weights
are on their way (`publishing`). Whatever fails first is raised as it is, everything else having
been cancelled, and what is on its way having come to its end.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from headrace.buffer import RolloutBuffer, staleness_metrics
from headrace.checkpoints import Checkpoints, CheckpointWriting
from headrace.data import Draw, Ledger, PromptStream, Settling
from headrace.dropped import DroppedGroups
from headrace.errors import AlarmError, LearnerHungError, NoSignalError, RunError
from headrace.held_out import Evaluated, EvaluationPlan, InterleavedEvaluation, evaluate
from headrace.monitors import Alarms, LoopLag, rollout_metrics
from headrace.publishing import Publication, Publishing
from headrace.roles import Learner, Monitor, Verifier, WeightSync
from headrace.types import (
    GenerationRequest,
    RolloutGroup,
    RunEvent,
    SamplingParams,
    StepRecord,
    StepResult,
    group_seed,
)
from headrace.waves import PausableGenerator, WaveParts, Waves

WATCH_SECONDS = 60.0
"""How long nothing may arrive before the controller names what it waits for."""
STOP_SECONDS = 5.0
"""For weights on their way when a run is stopped at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The numbers of a run."""

    seed: int
    num_steps: int
    """Training stops after this step, or earlier when the prompts are exhausted."""
    groups_per_step: int
    group_size: int
    sampling: SamplingParams
    checkpoint_every: int
    max_refills: int | None = None
    """How many times the groups under way may be drawn again for one step because their rewards
    have no spread; None trains on such groups."""
    start_step: int = 0
    """Steps done before this process: 0, or those of the checkpoint resumed from."""
    start_version: int = 0
    evaluation: EvaluationPlan | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The roles and stores that a runtime has placed."""

    generator: PausableGenerator
    verifier: Verifier
    learner: Learner
    weight_sync: WeightSync
    monitor: Monitor
    buffer: RolloutBuffer
    stream: PromptStream
    ledger: Ledger
    checkpoints: Checkpoints
    alarms: Alarms


@dataclass(slots=True, kw_only=True)
class RunOutcome:
    """How a run ended."""

    num_steps_done: int
    policy_version: int
    stopped_early: bool
    """`request_stop` ended it before its last step."""


class Controller:
    """Runs one training run to its end."""

    def __init__(self, plan: Plan, parts: Parts, *, watch_seconds: float = WATCH_SECONDS) -> None:
        self._plan = plan
        self._parts = parts
        self._watch_seconds = watch_seconds
        self._stop_requested = False
        self._step_done = plan.start_step
        self._policy_version = plan.start_version
        self._checkpoints = CheckpointWriting(
            parts.checkpoints,
            parts.learner.save,
            step=plan.start_step,
            tell=lambda step: self._event("checkpoint", f"checkpoint written at step {step}"),
        )
        self._settling = Settling(parts.ledger)
        # With one batch of slots the next batch needs the new weights: there is nothing to overlap.
        self._is_overlapping = parts.buffer.num_batches > 1
        self._publishing = Publishing(parts.weight_sync, is_beside=self._is_overlapping)
        self._interleaved = InterleavedEvaluation()
        # A resumed run has the evaluation of its checkpoint's step on record, if one was due.
        resumed_at_one = plan.start_step > 0 and plan.start_step % self._evaluation_every == 0
        self._evaluated_step = plan.start_step if resumed_at_one else None
        self._dropped = DroppedGroups(
            num_slots=parts.buffer.num_slots, max_refills=plan.max_refills
        )
        self._waves = Waves(
            WaveParts(
                generator=parts.generator,
                verifier=parts.verifier,
                buffer=parts.buffer,
                stream=parts.stream,
                dropped=self._dropped,
                request=self._request,
                step=lambda: self._step_done + 1,
                tell=self._event,
            ),
            num_missing=(plan.num_steps - plan.start_step) * plan.groups_per_step,
        )
        self._lag = LoopLag()
        self._learner_since: float | None = None
        """When the update that is under way began, or the copy of its weights."""

    def request_stop(self) -> None:
        """End after the step in progress, with a checkpoint."""
        self._stop_requested = True

    async def run(self) -> RunOutcome:
        """Publish the first weights, train, and return.

        Raises the first cause of a failure as it is, a fault of ours included.
        """
        try:
            return await self._run()
        except asyncio.CancelledError:
            # Whoever stops a run at once waits for no generator that hangs, or is still to start.
            await self._publishing.settle(STOP_SECONDS)
            raise
        finally:
            # Generators live on where a learner is started again: none is left half told.
            await self._publishing.settle()

    async def _run(self) -> RunOutcome:
        # Before the first rollout: a broken path fails here, and a resumed run starts fresh.
        await self._publishing.begin(self._policy_version)
        await self._publishing.finish()
        self._publishing.take_seconds()
        if self._plan.start_step == 0:
            await self._evaluate()
        try:
            async with asyncio.TaskGroup() as tasks:
                others = [
                    tasks.create_task(self._waves.run(), name="generate"),
                    tasks.create_task(self._watch(), name="watch"),
                    tasks.create_task(self._lag.measure(), name="lag"),
                ]
                await self._learn_loop(tasks)
                self._abandon_the_rest()
                for task in others:
                    task.cancel()
        except BaseExceptionGroup as failures:
            first = _first_cause(failures)
            await self._save_what_is_settled()
            # With its own cause: the group around it would only say it again.
            raise first from first.__cause__
        return RunOutcome(
            num_steps_done=self._step_done,
            policy_version=self._policy_version,
            stopped_early=self._stop_requested and self._step_done < self._plan.num_steps,
        )

    def _request(self, draw: Draw) -> GenerationRequest:
        return GenerationRequest(
            group_id=draw.group_id,
            prompt=draw.prompt,
            group_size=self._plan.group_size,
            sampling=self._plan.sampling,
            seed=group_seed(self._plan.seed, draw.group_id),
        )

    async def _learn_loop(self, tasks: asyncio.TaskGroup) -> None:
        """Waits for a full batch; unblocked by ``_score``. The only loop that may end the run."""
        num_held = 0
        while self._step_done < self._plan.num_steps and not self._stop_requested:
            self._waves.begin_step()
            await self._free_slots(num_held, tasks)
            groups = await self._parts.buffer.take_batch(lambda: self._policy_version)
            if not groups:
                await self._prompts_are_exhausted()
                break
            self._waves.note_batch()
            await self._waves.give_up_late()
            await self._train(groups)
            num_held = len(groups)
            await self._evaluate_if_due(tasks)
            await self._checkpoints.look()
            if self._is_due(self._plan.checkpoint_every):
                await self._checkpoint()
        await self._checkpoint()
        await self._checkpoints.finish()
        await self._publishing.finish()

    async def _free_slots(self, count: int, tasks: asyncio.TaskGroup) -> None:
        """Have the slots of the last step free once its weights are with every generator."""
        release = self._release(self._publishing.last, count)
        if self._is_overlapping:
            tasks.create_task(release, name="release")
        else:
            await release

    async def _release(self, publication: Publication | None, count: int) -> None:
        """Waits for ``publication``; unblocked by the generators. Raises what came of it."""
        if publication is not None:
            await publication.over()
        # What is admitted after this line is generated with the published weights.
        await self._parts.buffer.release(count)

    async def _prompts_are_exhausted(self) -> None:
        """End sooner than planned, which dropped groups lead to.

        What was dropped since the last step is settled with it: no other step will come. Raises
        NoSignalError when there was nothing to do, since that is no success.
        """
        if self._step_done == 0:
            msg = f"no prompt was left to train on: {self._dropped.table()}"
            raise NoSignalError(msg)
        if self._step_done == self._plan.start_step and not self._dropped:
            msg = (
                "no prompt was left to train on: every epoch was finished before; raise num_epochs"
            )
            raise NoSignalError(msg)
        await self._settling.begin(self._step_done, [], self._dropped.take().reasons)
        self._take_evaluation(await self._interleaved.finished(wait=True))
        if self._evaluated_step != self._step_done:
            await self._evaluate()

    @property
    def num_steps_done(self) -> int:
        """Steps so far, those of lives before included."""
        return self._step_done

    @property
    def _evaluation_every(self) -> int:
        return self._plan.evaluation.every if self._plan.evaluation else self._plan.num_steps

    @property
    def _is_last(self) -> bool:
        return self._step_done == self._plan.num_steps

    def _is_due(self, every: int) -> bool:
        return self._step_done % every == 0 or self._is_last

    async def _train(self, groups: Sequence[RolloutGroup]) -> None:
        """One step: update, begin to publish, settle, tell."""
        learning = self._learner_since = time.monotonic()
        try:
            result = await self._parts.learner.step(groups)
        except LearnerHungError as hung:
            msg = f"step {self._step_done + 1}: {hung}"
            raise LearnerHungError(msg) from hung
        except RunError:
            self._learner_since = None  # a step that fails like this has moved nothing
            raise
        publishing = time.monotonic()
        if result.num_updates:
            await self._publishing.begin(result.policy_version)
        ended = time.monotonic()
        self._learner_since = None
        staleness = staleness_metrics(groups, self._policy_version, result.num_updates)
        self._policy_version = result.policy_version
        self._step_done += 1
        settled = self._dropped.take()
        trained = [group.group_id for group in groups]
        await self._settling.begin(self._step_done, trained, settled.reasons)
        seconds = {
            "generate": self._waves.generate_seconds(),
            "score": self._waves.score_seconds(),
            "wait": self._waves.times.wait_seconds,
            "update": publishing - learning,
            "publish": self._publishing.take_seconds(),
            "publish_wait": ended - publishing,
            "step": ended - self._waves.times.began_at,
        }
        counts = {
            **staleness,
            **self._waves.times.fill,
            "verifier/groups/num_dropped": settled.num_failed,
            "controller/groups/num_refilled": settled.num_no_spread,
            "controller/groups/num_late": settled.num_late,
        }
        self._report(groups, result, seconds, counts)

    def _report(
        self,
        groups: Sequence[RolloutGroup],
        result: StepResult,
        seconds: Mapping[str, float],
        counts: Mapping[str, float],
    ) -> None:
        metrics = rollout_metrics(groups)
        tokens = metrics.get("generator/tokens/num_completion_tokens", 0.0)
        rollouts = sum(group.group_size for group in groups)
        metrics |= {f"controller/time/{name}_seconds": value for name, value in seconds.items()}
        metrics |= {name: float(count) for name, count in counts.items()}
        metrics |= self._parts.generator.metrics()
        metrics |= self._parts.verifier.metrics()
        metrics["generator/throughput/rollouts_per_second"] = rollouts / max(seconds["step"], 1e-9)
        if seconds["generate"] > 0.0:  # a step may be of groups generated before it began
            speed = tokens / seconds["generate"]
            metrics["generator/throughput/tokens_per_second"] = speed
        metrics["controller/loop/max_lag_seconds"] = self._lag.take()
        record = StepRecord(
            step=self._step_done,
            num_steps=self._plan.num_steps,
            policy_version=result.policy_version,
            metrics=metrics | dict(result.metrics),
            groups=tuple(groups),
        )
        self._parts.monitor.on_step(record)
        self._sound(self._parts.alarms.after_step(record))

    async def _evaluate_if_due(self, tasks: asyncio.TaskGroup) -> None:
        """Evaluate now, or beside the steps that follow; tell of the one that ended meanwhile.

        The last one has the generator for itself: nothing is trained any more.
        """
        plan = self._plan.evaluation
        is_due, is_last = self._is_due(self._evaluation_every), self._is_last
        # One at a time: if they take longer than the steps between them, the learner waits here.
        self._take_evaluation(await self._interleaved.finished(wait=is_due or is_last))
        if plan is None or not is_due:
            return
        if plan.interleaved and not is_last:
            made = tasks.create_task(self._evaluated(plan), name="evaluate")
            self._interleaved.begin(made)
        else:
            await self._evaluate()

    async def _evaluate(self) -> None:
        """Evaluate, with everything else waiting."""
        if self._plan.evaluation is None:
            return
        evaluated = await self._evaluated(self._plan.evaluation)
        # What an evaluation took of the engine is not part of the step that follows it.
        self._parts.generator.metrics()
        self._parts.verifier.metrics()
        self._lag.take()
        self._take_evaluation(evaluated)

    async def _evaluated(self, plan: EvaluationPlan) -> Evaluated:
        parts, step, version = self._parts, self._step_done, self._policy_version
        # By these weights or newer ones; what is beside training does not wait here.
        await self._publishing.finish()
        return await evaluate(
            plan,
            parts.generator,
            parts.verifier,
            self._plan.seed,
            step=step,
            policy_version=version,
            portion=self._plan.groups_per_step if plan.interleaved else None,
        )

    def _take_evaluation(self, evaluated: Evaluated | None) -> None:
        """Tell of an evaluation that has ended. Raises AlarmError if it is to end the run."""
        if evaluated is None:
            return
        self._evaluated_step = evaluated.record.step
        self._parts.monitor.on_evaluation(evaluated.record)
        self._sound(self._parts.alarms.after_evaluation(evaluated.record, evaluated.canaries))

    def _sound(self, alarms: Sequence[RunEvent]) -> None:
        """Tell of ``alarms``. Raises AlarmError if they are to end the run."""
        for alarm in alarms:
            self._parts.monitor.on_event(alarm)
        if alarms and self._parts.alarms.stops:
            msg = f'{alarms[0].message}; the run stops because alarms.on_alarm = "stop"'
            raise AlarmError(msg)

    async def _checkpoint(self) -> None:
        await self._settling.finish()
        await self._checkpoints.begin(self._step_done, self._policy_version)

    async def _save_what_is_settled(self) -> None:
        """After a failure, write the checkpoint that is due at the end of every run.

        Not while the learner is within a step: its weights are then those of no step.
        """
        try:
            await self._settling.finish()
            if self._learner_since is None:
                await self._checkpoint()
                await self._checkpoints.finish()
        except RunError as failure:
            self._event("checkpoint", f"no checkpoint at step {self._step_done}: {failure}")

    def _abandon_the_rest(self) -> None:
        """Put on record what is under way and will not be trained on: none of it is settled.

        After the last step there is nothing; a run that was asked to stop may be ahead of it.
        """
        num_held = self._parts.buffer.num_under_way
        if num_held:
            self._event(
                "abandoned",
                f"{num_held} groups were under way for later steps; a resumed run draws them again",
            )
        if self._interleaved.give_up():
            self._event("abandoned", "an evaluation beside training was under way and is given up")

    async def _watch(self) -> None:
        """Every so often, say what is being waited for if nothing moved. Ended by `run`."""
        while True:
            await asyncio.sleep(self._watch_seconds)
            delays = (
                self._waves.delay(self._watch_seconds),
                self._learner_delay(),
                self._publishing.delay(self._watch_seconds),
            )
            for delay in delays:
                if delay:
                    self._event("waiting", delay)

    def _learner_delay(self) -> str | None:
        seconds = time.monotonic() - (self._learner_since or math.inf)
        if seconds < self._watch_seconds:
            return None
        return f"the learner has been at step {self._step_done + 1} for {seconds:.0f} s"

    def _event(self, kind: str, message: str) -> None:
        self._parts.monitor.on_event(RunEvent(kind=kind, step=self._step_done, message=message))


def _first_cause(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the failure that came first: the others followed from it."""
    first: BaseException = failures
    while isinstance(first, BaseExceptionGroup):
        first = first.exceptions[0]
    return first
