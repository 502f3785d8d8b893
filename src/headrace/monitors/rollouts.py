"""Rollouts as Parquet: one file a step, one row a rollout, exact to the last bit.

Owns the round trip: `read_rollouts` returns the groups that were written, ids and log-probs
unchanged (only the row's other columns, ``Prompt.metadata``, are left out), so that a step can be
looked at or recomputed from its file. A file appears under its name only when it is complete.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from headrace.errors import RunDirectoryError
from headrace.monitors.formatting import encodable
from headrace.types import (
    Outcome,
    Prompt,
    Rollout,
    RolloutGroup,
    SamplingParams,
    Verdict,
    VersionSpan,
)

Row = dict[str, Any]
T = TypeVar("T")

_SPAN = pa.struct(
    [("policy_version", pa.int64()), ("start", pa.int32()), ("end", pa.int32())],
)
_SCHEMA = pa.schema(
    [
        pa.field("group_index", pa.int32(), nullable=False),  # place of the group in its batch
        pa.field("group_id", pa.string(), nullable=False),
        pa.field("prompt_id", pa.string(), nullable=False),
        pa.field("source", pa.string(), nullable=False),
        pa.field("prompt", pa.string(), nullable=False),
        pa.field("prompt_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("answer", pa.string()),
        pa.field("rollout_index", pa.int32(), nullable=False),
        pa.field("text", pa.string(), nullable=False),
        pa.field("completion_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("loss_mask", pa.list_(pa.bool_()), nullable=False),
        pa.field("generator_logprobs", pa.list_(pa.float64()), nullable=False),
        pa.field("raw_logprobs", pa.list_(pa.float64())),  # null: not recorded
        pa.field("kept_support", pa.list_(pa.binary())),  # null: not recorded
        pa.field("version_spans", pa.list_(_SPAN), nullable=False),
        pa.field("finish_reason", pa.string(), nullable=False),
        pa.field("outcome", pa.string()),  # null: the group was not scored
        pa.field("reward", pa.float64()),  # null: this rollout was not scored; never 0 instead
        pa.field("verifier", pa.string()),
        pa.field("components", pa.string()),  # JSON: name -> reward or null
        pa.field("detail", pa.string()),
        pa.field("labels", pa.list_(pa.string())),  # null: not scored, or an older file
        pa.field("sampling", pa.string(), nullable=False),  # JSON of SamplingParams
    ]
)
_REPEATED = ["group_id", "prompt_id", "source", "prompt", "answer", "verifier", "sampling"]
"""Columns that say the same in many rows. Of the others no dictionary is tried: it would be as
large as they are."""
_MEASURED = ["generator_logprobs.list.element", "raw_logprobs.list.element"]
"""Numbers that are no two alike, but have sign, exponent and empty low bits in common: stored byte
by byte they take half the room and a tenth of the time."""


def write_rollouts(path: Path, groups: Sequence[RolloutGroup]) -> str:
    """Write ``groups``, scored or not, to ``path``, and return the `digest` of the file.

    The file appears complete or not at all.
    """
    rows = list(_rows(groups))
    partial = path.with_name(f".{path.name}.partial")
    pq.write_table(
        pa.Table.from_pylist(rows, schema=_SCHEMA),
        partial,
        compression="zstd",
        use_dictionary=_REPEATED,
        use_byte_stream_split=_MEASURED,
    )
    found = digest(partial)
    partial.replace(path)
    return found


def digest(path: Path) -> str:
    """Return 32 hex digits that tell the content of a file from any other. Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def read_rollouts(path: Path) -> tuple[RolloutGroup, ...]:
    """Return the groups in ``path``, in the order written, with empty ``Prompt.metadata``.

    Raises RunDirectoryError when the file is missing, damaged or not of this layout.
    """
    try:
        table = pq.read_table(path, schema=_SCHEMA)
    except (OSError, pa.ArrowException) as error:
        msg = f"{path}: no readable rollouts ({error}); `train` writes them as [monitors] says"
        raise RunDirectoryError(msg) from error
    grouped = itertools.groupby(table.to_pylist(), key=lambda row: row["group_index"])
    return tuple(_group(list(rows)) for _, rows in grouped)


def _rows(groups: Sequence[RolloutGroup]) -> Iterator[Row]:
    for group_index, group in enumerate(groups):
        shared = _group_columns(group_index, group)
        verdicts = group.verdicts or (None,) * group.group_size
        for rollout, verdict in zip(group.rollouts, verdicts, strict=True):
            yield {**shared, **_rollout_columns(rollout), **_verdict_columns(verdict)}


def _group_columns(group_index: int, group: RolloutGroup) -> Row:
    prompt = group.prompt
    return {
        "group_index": group_index,
        "group_id": encodable(group.group_id),
        "prompt_id": encodable(prompt.prompt_id),
        "source": encodable(prompt.source),
        "prompt": encodable(prompt.text),
        "prompt_ids": prompt.token_ids,
        "answer": None if prompt.answer is None else encodable(prompt.answer),
        "sampling": json.dumps(dataclasses.asdict(group.sampling)),
    }


def _rollout_columns(rollout: Rollout) -> Row:
    return {
        "rollout_index": rollout.rollout_index,
        "text": encodable(rollout.text),
        "completion_ids": rollout.completion_ids,
        "loss_mask": rollout.loss_mask,
        "generator_logprobs": rollout.generator_logprobs,
        "raw_logprobs": rollout.raw_logprobs,
        "kept_support": rollout.kept_support,
        "version_spans": [
            {"policy_version": span.policy_version, "start": span.start, "end": span.end}
            for span in rollout.version_spans
        ],
        "finish_reason": rollout.finish_reason,
    }


def _verdict_columns(verdict: Verdict | None) -> Row:
    if verdict is None:
        return {}
    return {
        "outcome": verdict.outcome.value,
        "reward": verdict.reward,
        "verifier": encodable(verdict.verifier),
        "components": json.dumps(dict(verdict.components)),
        "detail": encodable(verdict.detail),
        "labels": [encodable(label) for label in verdict.labels],
    }


def _group(rows: Sequence[Row]) -> RolloutGroup:
    first = rows[0]
    prompt = Prompt(
        prompt_id=first["prompt_id"],
        source=first["source"],
        text=first["prompt"],
        token_ids=tuple(first["prompt_ids"]),
        answer=first["answer"],
    )
    scored = first["outcome"] is not None
    return RolloutGroup(
        group_id=first["group_id"],
        prompt=prompt,
        rollouts=tuple(_rollout(row) for row in rows),
        sampling=_sampling(json.loads(first["sampling"])),
        verdicts=tuple(_verdict(row) for row in rows) if scored else None,
    )


def _rollout(row: Row) -> Rollout:
    return Rollout(
        rollout_index=row["rollout_index"],
        completion_ids=tuple(row["completion_ids"]),
        loss_mask=tuple(row["loss_mask"]),
        generator_logprobs=tuple(row["generator_logprobs"]),
        raw_logprobs=_tuple(row["raw_logprobs"]),
        kept_support=_tuple(row["kept_support"]),
        version_spans=tuple(VersionSpan(**span) for span in row["version_spans"]),
        finish_reason=row["finish_reason"],
        text=row["text"],
    )


def _tuple(values: list[T] | None) -> tuple[T, ...] | None:
    return None if values is None else tuple(values)


def _verdict(row: Row) -> Verdict:
    return Verdict(
        outcome=Outcome(row["outcome"]),
        reward=row["reward"],
        verifier=row["verifier"],
        components=json.loads(row["components"]),
        detail=row["detail"],
        labels=tuple(row["labels"] or ()),
    )


def _sampling(fields: Mapping[str, Any]) -> SamplingParams:
    """Return the record; JSON has turned its tuples into lists."""
    tuples = {name: tuple(value) for name, value in fields.items() if isinstance(value, list)}
    return SamplingParams(**{**fields, **tuples})
