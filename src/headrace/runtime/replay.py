"""Replay: a recorded step is done again by the learner alone, and compared bit for bit.

Begins at the last checkpoint before the step, or at the model the run began with, and makes every
recorded step from there with the batch, the layout and the number formats on record. Owns: what is
called identical agrees in every metric of the learner and in the weights that were published, in
each step that was made on the way. Samples nothing itself; changes nothing in the run's directory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import torch

from headrace.config import CheckedRecipe, RunConfig, parse_config
from headrace.errors import ConfigError, ModelError, RunDirectoryError, RunError
from headrace.learners import CheckpointStore, StoredCheckpoint
from headrace.monitors import RecordedStep, Weights, read_batch, read_records, read_run
from headrace.runtime.devices import missing_device, resolve_device
from headrace.runtime.learners import LocalLearner
from headrace.runtime.preflight import PreparedModel, prepare_model
from headrace.runtime.recording import machine_facts
from headrace.runtime.replay_learner import ReplayLearner
from headrace.runtime.replay_report import Difference, ReplayReport
from headrace.runtime.replay_sampling import ReplaySampling, refuse_other_engines
from headrace.runtime.run_files import CHECKPOINT_DIRECTORY
from headrace.types import RolloutGroup, StepResult, WeightUpdate

Tell = Callable[[str], None]


async def replay(
    directory: Path, step: int, tell: Tell = lambda _: None, *, generate: bool = False
) -> ReplayReport:
    """Do step ``step`` of the run in ``directory`` again, and those before it from a checkpoint on.

    ``generate``: sample its groups again too, and begin early enough for that. ``tell`` hears of
    every step that is made. Raises RunDirectoryError where the records do not reach, ConfigError
    or ModelError where recipe or model are no longer what the run had, and RunError where the
    learner fails or a checkpoint is damaged.
    """
    torch.set_num_threads(1)  # as in a run: the compute thread has the cores
    config, model = _read_recipe(directory)
    if generate:
        refuse_other_engines(config)
    records = read_records(directory)
    record = _record_of(directory, records, step)
    batch = read_batch(directory, record)
    since = _step_that_sampled(records, record, batch) if generate else step
    start = _last_checkpoint(directory, since - 1)
    steps = list(_steps(directory, records, start, step))
    report = ReplayReport(
        step=step,
        first_step=steps[0].step,
        started_from=str(model.directory) if start is None else start.directory.name,
        notes=list(_notes(config, steps)),
    )
    async with AsyncExitStack() as stack:
        learners = ReplayLearner(config, model)
        stack.push_async_callback(learners.close)
        sampling = ReplaySampling(config, model, record, batch if generate else ())
        stack.push_async_callback(sampling.close)
        learner = await learners.laid_out_for(steps[0])
        if start is not None:
            await learner.load(start.directory)
        published = await learner.export()
        report.differences += _compare_start(published, steps[0], model, start)
        for made in steps:
            await sampling.at(published)
            tell(f"replay: step {made.step}, of {steps[0].step} to {step}")
            learner = await learners.laid_out_for(made)
            result = await _again(learner, directory, made)
            published = await learner.export()
            report.differences += _compare(result, published, made)
        report.differences += sampling.differences
        report.sampling = sampling.report if generate else None
    return report


def _read_recipe(directory: Path) -> tuple[RunConfig, PreparedModel]:
    """Return what the run was made of. Raises UserError."""
    tree = dict(read_run(directory).config)
    try:
        config = parse_config(tree)
    except ConfigError as error:
        problems = (f"the recipe of {directory}: {problem}" for problem in error.problems)
        raise ConfigError(*problems) from error
    if missing := missing_device(config.device):
        msg = f'{directory} was trained on device = "{config.device}": {missing}'
        raise ConfigError(msg)
    recipe = CheckedRecipe(config=config, problems=(), faulty=frozenset())
    return config, prepare_model(recipe)


def _last_checkpoint(directory: Path, step: int) -> StoredCheckpoint | None:
    store = CheckpointStore(directory / CHECKPOINT_DIRECTORY, keep=1, fingerprint="")
    return store.latest(up_to=step)


def _record_of(directory: Path, records: Mapping[int, RecordedStep], step: int) -> RecordedStep:
    if step not in records:
        msg = (
            f"{directory}: step {step} is not on record; there are steps {min(records)} to "
            f"{max(records)}"
        )
        raise RunDirectoryError(msg)
    return records[step]


def _step_that_sampled(
    records: Mapping[int, RecordedStep], record: RecordedStep, batch: Sequence[RolloutGroup]
) -> int:
    """Return the last step that began with weights as old as the oldest in ``batch``."""
    versions = [group.oldest_version for group in batch]
    oldest = min((version for version in versions if version is not None), default=None)
    if oldest is None:
        return record.step
    as_old = (r.step for r in records.values() if r.before.policy_version <= oldest)
    return max((step for step in as_old if step <= record.step), default=1)


def _steps(
    directory: Path,
    records: Mapping[int, RecordedStep],
    start: StoredCheckpoint | None,
    step: int,
) -> Iterator[RecordedStep]:
    """Yield what is to be made again. Raises RunDirectoryError where some of it is missing."""
    first = 1 if start is None else start.step + 1
    missing = [number for number in range(first, step) if number not in records]
    if missing:
        origin = "the model it began with" if start is None else start.directory.name
        msg = (
            f"{directory}: step {step} can only be made again from {origin} on, and step "
            f"{missing[0]} is not on record; replay a step between a checkpoint and the next gap"
        )
        raise RunDirectoryError(msg)
    yield from (records[number] for number in range(first, step + 1))


def _notes(config: RunConfig, steps: list[RecordedStep]) -> Iterator[str]:
    """Say in what this machine is another one than that of a step that is made again."""
    here = machine_facts(resolve_device(config.device))
    for name, value in here.items():
        others = {str(record.facts.get(name)) for record in steps} - {str(value)}
        if others:
            yield f"{name} was {' and '.join(sorted(others))} on record and is {value} here"


def _compare_start(
    published: WeightUpdate,
    record: RecordedStep,
    model: PreparedModel,
    start: StoredCheckpoint | None,
) -> list[Difference]:
    """Compare what the first step begins with. Raises ModelError for another model."""
    found = list(_compare_weights(published, record.before, record.step, "before the step"))
    if found and start is None:
        msg = (
            f"model {model.directory} is not what the run began with: "
            f"{found[0].name} is {found[0].recorded} on record and {found[0].recomputed} here; "
            "put the model back where it was"
        )
        raise ModelError(msg)
    return found


async def _again(learner: LocalLearner, directory: Path, record: RecordedStep) -> StepResult:
    try:
        return await learner.step(read_batch(directory, record))
    except RunError as error:
        msg = f"step {record.step} is on record and cannot be made again: {error}"
        raise RunError(msg) from error


def _compare(
    result: StepResult, published: WeightUpdate, record: RecordedStep
) -> Iterator[Difference]:
    """Yield what came out otherwise: metrics as the learner lists them, then the weights."""
    for name, value in result.metrics.items():
        recorded = record.metrics.get(name)
        # As hex: all bits count, the sign of a zero too, and NaN is NaN.
        if recorded is None or float(value).hex() != recorded.hex():
            yield Difference(
                step=record.step, name=name, recorded=recorded, recomputed=float(value)
            )
    yield from _compare_weights(published, record.after, record.step, "after the step")


def _compare_weights(
    published: WeightUpdate, recorded: Weights, step: int, when: str
) -> Iterator[Difference]:
    if published.policy_version != recorded.policy_version:
        yield Difference(
            step=step,
            name=f"policy version {when}",
            recorded=recorded.policy_version,
            recomputed=published.policy_version,
        )
    if published.checksum != recorded.checksum:
        yield Difference(
            step=step,
            name=f"checksum of the weights {when}",
            recorded=f"{recorded.checksum:016x}",
            recomputed=f"{published.checksum:016x}",
        )
