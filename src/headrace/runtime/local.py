"""The default runtime: every role in this process, each in its own thread or processes.

Builds the parts of a run from its config, wires them, and hands them to the controller. Nothing
here decides anything about training. When a learner dies, generator and verifier stay, and the rest
is built anew from the last checkpoint (`revival`). Owns: what the dead learner had made since then
is taken back in ledger, metrics and rollouts before any of it is made again. Groups that were under
way are drawn again and not kept: the versions that sampled them may never come to be.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
import os
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from headrace.buffer import RolloutBuffer
from headrace.compute import ComputeThread
from headrace.config import RunConfig
from headrace.controller import Controller, Parts, Plan, RunOutcome
from headrace.data import Ledger, PromptStream
from headrace.errors import CheckpointError, RunDirectoryError
from headrace.generators import default_cache_bytes
from headrace.generators.pool import GeneratorPool
from headrace.held_out import CanaryPlan, EvaluationPlan
from headrace.learners import CheckpointStore, StoredCheckpoint
from headrace.monitors import (
    Alarms,
    EvaluationMode,
    FanoutMonitor,
    JsonlMonitor,
    console_monitor,
    read_run,
    rewind,
    write_report,
)
from headrace.roles import Monitor, WeightRoom
from headrace.runtime import run_files
from headrace.runtime.devices import resolve_device
from headrace.runtime.generators import build_weight_sync, compute_threads, generator_threads
from headrace.runtime.learners import LocalLearner, build_learner
from headrace.runtime.places import LocalPlaces, Places
from headrace.runtime.preflight import PreparedRun, sampling_params
from headrace.runtime.recording import Recording
from headrace.runtime.resizing import Roles, scaler_of
from headrace.runtime.revival import Beginning, outlive
from headrace.runtime.scaling import listening
from headrace.runtime.verdict_deadline import DeadlineVerifier
from headrace.types import RunEvent, SamplingParams
from headrace.weight_sync import MemoryRoom, WeightChannel

_LOG = logging.getLogger(__name__)

START, RESUME, RESTART, END = "start", "resume", "learner_restart", "end"
"""Kinds of events: a life of the run begins, or has nothing left to do."""
SCALED = "scaled"
"""Kind of event: there are more or fewer of a role from now on."""
_OF_LIVES = frozenset((START, RESUME, RESTART, END))


@dataclass(slots=True, kw_only=True)
class _Kept:
    """What outlives a learner."""

    stack: AsyncExitStack
    """Closes all of it."""
    directory: Path
    store: CheckpointStore
    ledger: Ledger
    monitor: FanoutMonitor
    records: JsonlMonitor
    """One of those behind ``monitor``."""
    recording: Recording
    """Another one."""
    places: Places
    generator_compute: ComputeThread
    learner_compute: ComputeThread
    channel: WeightChannel | None
    """Carries weights to generators elsewhere."""
    roles: Roles | None = None
    """Built after the first learner, which takes its memory first."""

    controller: Controller | None = None
    """Of the life of now."""

    def tell_scaled(self, what: str) -> None:
        """Have an event say ``what`` was done."""
        step = 0 if self.controller is None else self.controller.num_steps_done
        self.monitor.on_event(RunEvent(kind=SCALED, step=step, message=what))

    def take_back(self, beginning: Beginning) -> None:
        """Forget what was made after ``beginning``. Raises RunDirectoryError, RunError, OSError."""
        if beginning.checkpoint is not None:
            self.ledger.require(beginning.step)
        # What is still to be written must not come after it was forgotten.
        self.recording.settle()
        self.ledger.rewind(beginning.step)
        # Without a checkpoint even the evaluation before the first step is done again.
        rewind(self.directory, -1 if beginning.checkpoint is None else beginning.step)
        self.records.reopen()

    def roles_of(self, prepared: PreparedRun) -> Roles:
        """Return generator and verifier, which have counted nothing yet."""
        if self.roles is None:
            config = prepared.config
            generator = self.places.generator(
                config, prepared.model, self.generator_compute, self.channel
            )
            self.stack.push_async_callback(generator.close)
            if isinstance(generator, GeneratorPool):
                generator.tell_events(self.monitor.tell)
            seconds = config.faults.verifier_deadline_seconds
            verifier = DeadlineVerifier(self.places.verifier(config), seconds)
            self.stack.push_async_callback(verifier.close)
            self.roles = generator, verifier
        for role in self.roles:
            role.metrics()
        return self.roles


@dataclass(slots=True, kw_only=True)
class LocalRun:
    """One training run, whose controller and learner are on this machine."""

    prepared: PreparedRun
    output: Path
    resume: bool = False
    is_restart: bool = False
    """A process of this run was killed: if it had nothing left to do, the run has ended well."""
    extra_monitors: tuple[Monitor, ...] = ()
    places: Places = field(default_factory=LocalPlaces)

    def __post_init__(self) -> None:
        """Fill in what the recipe leaves to the machine, or to the run that is resumed."""
        device = resolve_device(self.prepared.config.device)
        config = run_files.resolved(
            self.output,
            self.prepared.config,
            device="cuda" if device.type == "cuda" else "cpu",
            num_threads=os.cpu_count() or 1,
            # Of each generator: all of them together have what one would have had.
            max_cache_gib=round(
                default_cache_bytes(device) / self.prepared.config.placement.num_generators / 2**30,
                3,
            ),
        )
        self.prepared = replace(self.prepared, config=config)

    async def train(self, on_start: Callable[[Controller], None] | None = None) -> RunOutcome:
        """Train to the end, write the report, and say how it ended.

        ``on_start`` gets every controller, for asking it to stop; there is another one after each
        death of the learner. Raises UserError before anything is started and RunError afterwards.
        """
        config, prepared = self.prepared.config, self.prepared
        torch.set_num_threads(1)  # the compute threads have the cores
        num_steps = _num_steps(config, len(prepared.train.prompts))
        if self.resume:
            run_files.check_same_run(self.output, config)
        else:
            run_files.make(self.output)
        async with AsyncExitStack() as stack:
            stack.enter_context(run_files.locked(self.output))
            if not self.resume:
                run_files.create(self.output, config)
            store, last = self._open_directory(num_steps)
            if self.is_restart and last is not None and self._had_ended(last, num_steps):
                await asyncio.to_thread(_write_report, self.output)
                return RunOutcome(
                    num_steps_done=last.step,
                    policy_version=last.policy_version,
                    stopped_early=False,
                )
            kept = self._kept(stack, store, num_steps)
            scale = scaler_of(lambda: kept.roles, kept.tell_scaled)
            await stack.enter_async_context(listening(self.output, scale))

            async def live(beginning: Beginning) -> RunOutcome:
                async with AsyncExitStack() as ending:
                    controller = await self._build(ending, kept, beginning, num_steps)
                    kept.controller = controller
                    if on_start is not None:
                        on_start(controller)
                    outcome = await controller.run()
                    self._tell_end(kept.monitor, outcome)
                    return outcome

            try:
                return await outlive(live, Beginning(checkpoint=last), store, config.faults)
            finally:
                # Also after a failure: the report is where one looks first.
                await asyncio.to_thread(kept.recording.settle)
                await asyncio.to_thread(_write_report, self.output)

    def _open_directory(self, num_steps: int) -> tuple[CheckpointStore, StoredCheckpoint | None]:
        """Check that the run can go on from its last checkpoint before anything in it changes."""
        config, prepared = self.prepared.config, self.prepared
        model = prepared.model.directory
        mark = run_files.fingerprint(config, model, prepared.train.prompts)
        store = CheckpointStore(
            self.output / run_files.CHECKPOINT_DIRECTORY,
            keep=config.checkpoint.keep,
            fingerprint=mark,
        )
        last = store.latest() if self.resume else None
        if last is not None and last.fingerprint != mark:
            msg = (
                f"--resume: {last.directory} was trained from another model than {model}, on other "
                "prompts than data.train holds now, or by another reward function; give what it "
                "started from"
            )
            raise RunDirectoryError(msg)
        if last is not None and last.step >= num_steps and not self.is_restart:
            msg = (
                f"--resume: {self.output} has already made {last.step} of its {num_steps} steps; "
                "raise num_steps or num_epochs to go on"
            )
            raise RunDirectoryError(msg)
        if self.resume:
            run_files.record(self.output, config)
        return store, last

    def _had_ended(self, last: StoredCheckpoint, num_steps: int) -> bool:
        """Whether nothing is left to do after ``last``: the prompts may be exhausted sooner."""
        kinds = [event.kind for event in read_run(self.output).events if event.kind in _OF_LIVES]
        return last.step >= num_steps or kinds[-1:] == [END]

    def _tell_end(self, monitor: Monitor, outcome: RunOutcome) -> None:
        """Say that there is nothing left to do, while there still is much to close."""
        if not outcome.stopped_early:
            step = outcome.num_steps_done
            monitor.on_event(RunEvent(kind=END, step=step, message=f"ended after step {step}"))

    def _kept(self, stack: AsyncExitStack, store: CheckpointStore, num_steps: int) -> _Kept:
        config = self.prepared.config
        ledger = stack.enter_context(Ledger(self.output / run_files.LEDGER_FILE))
        generator_compute, learner_compute = compute_threads(stack, config)
        channel = self.places.channel(config, learner_compute)
        if channel is not None:
            stack.callback(channel.store.close)
        recording = Recording(
            self.output,
            config,
            num_steps=num_steps,
            num_threads=learner_compute.num_threads,
            generator_threads=generator_threads(config, generator_compute),
        )
        records = JsonlMonitor(self.output)
        monitor = self._monitor(stack, records, recording)
        return _Kept(
            stack=stack,
            directory=self.output,
            store=store,
            ledger=ledger,
            monitor=monitor,
            records=records,
            recording=recording,
            places=self.places,
            generator_compute=generator_compute,
            learner_compute=learner_compute,
            channel=channel,
        )

    async def _build(
        self, stack: AsyncExitStack, kept: _Kept, beginning: Beginning, num_steps: int
    ) -> Controller:
        """Return the controller of one life. ``stack`` closes what ends with that."""
        config, step, ledger = self.prepared.config, beginning.step, kept.ledger
        kept.take_back(beginning)
        kept.monitor.on_event(self._event(beginning))
        buffer = _buffer(config)
        room = _room(config, kept.channel)
        learner = build_learner(self.prepared, num_steps, kept.learner_compute, kept.places, room)
        stack.push_async_callback(learner.close)
        await learner.start()
        await self._rehearse(learner)
        version = await _restore(learner, beginning.checkpoint)
        generator, verifier = kept.roles_of(self.prepared)
        alarms = Alarms(config.alarms)
        if beginning.checkpoint is not None:
            alarms.recall(read_run(self.output))
        return Controller(
            self._plan(num_steps, step, version),
            Parts(
                generator=generator,
                verifier=verifier,
                learner=learner,
                weight_sync=build_weight_sync(
                    kept.recording.noting(learner.export),
                    generator,
                    kept.channel,
                    is_copied=room is not None,
                ),
                monitor=kept.monitor,
                buffer=buffer,
                stream=PromptStream(
                    self.prepared.train.prompts,
                    seed=config.seed,
                    shuffle=config.data.shuffle,
                    num_epochs=config.num_epochs,
                    ledger=ledger,
                ),
                ledger=ledger,
                checkpoints=kept.recording.before(kept.store),
                alarms=alarms,
            ),
        )

    def _event(self, beginning: Beginning) -> RunEvent:
        step = beginning.step
        if beginning.death is not None:
            message = f"{beginning.death}. It is started again from step {step}"
            fields = {"cause": str(beginning.death)}
            return RunEvent(kind=RESTART, step=step, message=message, fields=fields)
        kind, verb = (RESUME, "resumed at") if self.resume else (START, "started from")
        return RunEvent(kind=kind, step=step, message=f"{verb} step {step}")

    async def _rehearse(self, learner: LocalLearner) -> None:
        config = self.prepared.config
        is_cuda = resolve_device(config.device).type == "cuda"
        match config.learner.rehearsal:
            case "never":
                return
            case "auto" if not is_cuda:
                return
            case _:
                prompts = self.prepared.train.prompts
                await learner.rehearse(max(len(prompt.token_ids) for prompt in prompts))

    def _monitor(
        self, stack: AsyncExitStack, records: JsonlMonitor, recording: Recording
    ) -> FanoutMonitor:
        config = self.prepared.config
        # Rollouts first: they are written late, and the others hear of what fails at the end.
        monitors: list[Monitor] = [] if recording.monitor is None else [recording.monitor]
        monitors += [records, *self.extra_monitors]
        if config.monitors.console:
            monitors.append(console_monitor(config.name))
        monitor = FanoutMonitor(monitors)
        stack.callback(monitor.close)
        return monitor

    def _plan(self, num_steps: int, step: int, version: int) -> Plan:
        config = self.prepared.config
        refills = config.dynamic_sampling
        return Plan(
            seed=config.seed,
            num_steps=num_steps,
            groups_per_step=config.groups_per_step,
            group_size=config.group_size,
            sampling=sampling_params(config.sampling, self.prepared.model.tokenizer),
            checkpoint_every=config.checkpoint.every,
            max_refills=None if refills is None else refills.max_refills,
            start_step=step,
            start_version=version,
            evaluation=evaluation_plan(self.prepared),
        )


def _buffer(config: RunConfig) -> RolloutBuffer:
    return RolloutBuffer(
        groups_per_step=config.groups_per_step,
        max_staleness=config.max_staleness,
        updates_per_step=config.learner.num_minibatches,
        depth=config.pipeline.depth,
        late=config.pipeline.late,
        surplus=config.pipeline.surplus_groups,
    )


def _room(config: RunConfig, channel: WeightChannel | None) -> WeightRoom | None:
    """Return where the learner computes what it publishes; None: its own tensors are read."""
    if channel is not None:
        return channel.room
    if not config.copies_weights:
        return None
    # Of ranks weights arrive on the processor.
    is_ranked = config.learner.parallel.has_processes
    return MemoryRoom(torch.device("cpu") if is_ranked else resolve_device(config.device))


def evaluation_plan(prepared: PreparedRun) -> EvaluationPlan | None:
    """Return how held-out prompts and canaries are measured; None when there are neither."""
    config = prepared.config
    canaries = None
    if prepared.canaries is not None:
        canaries = CanaryPlan(
            prompts=prepared.canaries.prompts,
            num_rollouts=config.alarms.num_canary_rollouts,
            sampling=sampling_params(config.sampling, prepared.model.tokenizer),
        )
    if prepared.eval is None and canaries is None:
        return None
    sampling = sampling_params(config.eval_sampling, prepared.model.tokenizer)
    modes: dict[EvaluationMode, tuple[int, SamplingParams]] = {}
    if prepared.eval is not None and config.eval.greedy:
        modes["greedy"] = (1, dataclasses.replace(sampling, temperature=0.0))
    if prepared.eval is not None and config.eval.num_rollouts:
        modes["sampled"] = (config.eval.num_rollouts, sampling)
    return EvaluationPlan(
        prompts=() if prepared.eval is None else prepared.eval.prompts,
        every=config.eval.every,
        modes=modes,
        pass_at_k=config.eval.pass_at_k,
        canaries=canaries,
        interleaved=config.eval_is_interleaved,
    )


def _write_report(directory: Path) -> None:
    """Write the report. Without room for it the run has still ended as it did, so only say so."""
    try:
        write_report(directory)
    except (OSError, RunDirectoryError) as error:
        _LOG.warning(
            "the report was not written: %s; write it with: headrace report %s", error, directory
        )


async def _restore(learner: LocalLearner, last: StoredCheckpoint | None) -> int:
    """Load the checkpoint and return its policy version; 0 without one."""
    if last is None:
        return 0
    version = await learner.load(last.directory)
    if version != last.policy_version:
        msg = (
            f"checkpoint {last.directory}: state.json says version {last.policy_version}, the "
            f"learner's counters say {version}"
        )
        raise CheckpointError(msg)
    return version


def _num_steps(config: RunConfig, num_prompts: int) -> int:
    if config.num_steps is not None:
        return config.num_steps
    assert config.num_epochs is not None
    return math.ceil(config.num_epochs * num_prompts / config.groups_per_step)
