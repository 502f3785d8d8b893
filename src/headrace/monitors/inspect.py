"""``headrace inspect``: rollouts of a run on the terminal, down to the single token.

Shows what was recorded and computes nothing. Model text is stripped of control characters, so that
a completion cannot rewrite the screen it is read on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from headrace.errors import RunDirectoryError
from headrace.kept_support import decode
from headrace.monitors.formatting import clipped, number, printable
from headrace.monitors.rollouts import read_rollouts
from headrace.monitors.run_directory import read_run, rollout_files
from headrace.types import Rollout, RolloutGroup, Verdict, VersionSpan

_EXCERPT = 60
_LISTED = 12
_SAMPLING = 2000
"""Characters shown of the sampling parameters: masks may be as long as the vocabulary."""

TokenText = Callable[[int], str]
"""Token id -> its text, from the run's tokenizer."""


def inspect_view(
    run_directory: Path,
    *,
    step: int | None = None,
    group_id: str | None = None,
    token_text: TokenText | None = None,
) -> RenderableType:
    """Return what rich prints: every group of ``step`` (the last recorded), or one group in full.

    With ``token_text`` each token is shown as text beside its id. Raises RunDirectoryError, naming
    what there is, when the directory, the step or the group does not exist.
    """
    read_run(run_directory)
    found, groups = _groups_of(run_directory, step)
    if group_id is None:
        return _overview(found, groups)
    chosen = [group for group in groups if group.group_id == group_id]
    if not chosen:
        msg = f"{run_directory}: step {found} has no group {group_id}; it has {_listed(groups)}"
        raise RunDirectoryError(msg)
    return Group(*(_group_view(group, token_text) for group in chosen))


def _groups_of(run_directory: Path, step: int | None) -> tuple[int, tuple[RolloutGroup, ...]]:
    recorded = {found: path for path, kind, found in rollout_files(run_directory) if kind == "step"}
    if not recorded:
        msg = (
            f"{run_directory}: no rollouts of a training step were recorded; "
            "train with monitors.rollouts_every >= 1"
        )
        raise RunDirectoryError(msg)
    wanted = max(recorded) if step is None else step
    if wanted not in recorded:
        steps = ", ".join(str(found) for found in sorted(recorded)[-_LISTED:])
        msg = f"{run_directory}: no rollouts of step {wanted} were recorded; there are {steps}"
        raise RunDirectoryError(msg)
    return wanted, read_rollouts(recorded[wanted])


def _listed(groups: Sequence[RolloutGroup]) -> str:
    names = [group.group_id for group in groups]
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more


def _overview(step: int, groups: Sequence[RolloutGroup]) -> RenderableType:
    table = Table(title=f"step {step}: {len(groups)} groups", title_justify="left", expand=True)
    table.add_column("group", overflow="fold")
    table.add_column("source", overflow="fold")
    table.add_column("prompt", ratio=1, overflow="ellipsis", no_wrap=True)
    for heading in ("rewards", "tokens", "versions"):
        table.add_column(heading, overflow="fold")
    for group in groups:
        table.add_row(*(Text(printable(cell)) for cell in _overview_cells(group)))
    return table


def _overview_cells(group: RolloutGroup) -> tuple[str, ...]:
    rewards = ("",) if group.verdicts is None else tuple(map(_reward, group.verdicts))
    lengths = [len(rollout.completion_ids) for rollout in group.rollouts]
    return (
        group.group_id,
        group.prompt.source,
        group.prompt.text[:_EXCERPT].replace("\n", " "),
        " ".join(rewards),
        f"{min(lengths)}-{max(lengths)}",
        _versions(group.rollouts),
    )


def _versions(rollouts: Sequence[Rollout]) -> str:
    found = {span.policy_version for rollout in rollouts for span in rollout.version_spans}
    return ", ".join(str(version) for version in sorted(found))


def _reward(verdict: Verdict) -> str:
    return "not scored" if verdict.reward is None else number(verdict.reward)


def _group_view(group: RolloutGroup, token_text: TokenText | None) -> RenderableType:
    prompt = group.prompt
    facts = (
        f"source {prompt.source}   prompt {prompt.prompt_id}   answer {prompt.answer}\n"
        f"{clipped(str(group.sampling), _SAMPLING)}"
    )
    head = Panel(
        Group(Text(printable(prompt.text)), Text(printable(facts), style="dim")),
        title=Text(printable(f"group {group.group_id}")),
        title_align="left",
    )
    verdicts = group.verdicts or (None,) * group.group_size
    pairs = zip(group.rollouts, verdicts, strict=True)
    return Group(head, *(_rollout_view(rollout, verdict, token_text) for rollout, verdict in pairs))


def _rollout_view(
    rollout: Rollout, verdict: Verdict | None, token_text: TokenText | None
) -> RenderableType:
    parts: list[RenderableType] = [Text(printable(rollout.text))]
    if verdict is not None:
        parts.append(_verdict_view(verdict))
    parts.append(_tokens(rollout, token_text))
    title = f"rollout {rollout.rollout_index}: {rollout.finish_reason}"
    return Panel(Group(*parts), title=title, title_align="left")


def _verdict_view(verdict: Verdict) -> RenderableType:
    components = "  ".join(
        f"{name} {'not scored' if reward is None else number(reward)}"
        for name, reward in verdict.components.items()
    )
    text = f"{verdict.verifier}: {verdict.outcome}, reward {_reward(verdict)}"
    labels = f"labels {', '.join(verdict.labels)}" if verdict.labels else ""
    lines = (text, components, labels, clipped(verdict.detail, 1000))
    return Text(printable("\n".join(line for line in lines if line)), style="bold")


def _tokens(rollout: Rollout, token_text: TokenText | None) -> RenderableType:
    columns = _columns(rollout)
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    for heading in ("#", *columns):
        table.add_column(heading, justify="right")
    table.add_column("token" if token_text else "")
    cells = zip(rollout.completion_ids, *columns.values(), strict=True)
    for place, (token, *shown) in enumerate(cells):
        text = repr(token_text(token)) if token_text else ""
        table.add_row(str(place), *shown, Text(printable(text)))
    return table


def _columns(rollout: Rollout) -> dict[str, list[str]]:
    """Heading -> what stands below it; what was not recorded has no column."""
    versions = [span.policy_version for span in rollout.version_spans for _ in _places(span)]
    columns = {
        "id": [str(token) for token in rollout.completion_ids],
        "log-prob": [f"{logprob:.4f}" for logprob in rollout.generator_logprobs],
        "version": [str(version) for version in versions],
        "trained": ["yes" if mask else "no" for mask in rollout.loss_mask],
    }
    if rollout.raw_logprobs is not None:
        columns["raw log-prob"] = [f"{logprob:.4f}" for logprob in rollout.raw_logprobs]
    if rollout.kept_support is not None:
        columns["kept"] = [str(len(decode(packed))) for packed in rollout.kept_support]
    return columns


def _places(span: VersionSpan) -> range:
    return range(span.start, span.end)
