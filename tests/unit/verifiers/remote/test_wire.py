"""The messages: nothing is lost on the way, and nothing misshapen comes through."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from verifier_site import job

from headrace.verifiers.remote.wire import (
    WIRE_VERSION,
    RunAnswer,
    RunRequest,
    digest,
    execution_problem,
    is_at_least,
    job_problem,
    max_answer_bytes,
)
from headrace.verifiers.sandbox.execution import (
    Ending,
    Execution,
    Job,
    Limits,
    PythonCall,
    Tier,
)

TEXT = st.text(st.characters(codec="utf-8"), max_size=20)
NAMES = st.text(st.characters(codec="utf-8"), min_size=1, max_size=20)
SECONDS = st.floats(0.001, 600.0)
JOBS = st.builds(
    Job,
    job_id=NAMES,
    language=TEXT,
    source=TEXT,
    stdin=st.binary(max_size=40),
    call=st.none() | st.builds(PythonCall, function=TEXT, arguments=st.binary(max_size=40)),
    files=st.dictionaries(TEXT, st.binary(max_size=40), max_size=3),
    limits=st.builds(Limits, cpu_seconds=SECONDS, memory_mib=st.integers(1, 1000)),
)
EXECUTIONS = st.builds(
    Execution,
    job_id=NAMES,
    tier=st.sampled_from(Tier),
    ending=st.sampled_from(Ending),
    exit_status=st.none() | st.integers(0, 255),
    signal=st.none() | st.integers(1, 64),
    stdout=st.binary(max_size=100),
    stderr=st.binary(max_size=100),
    returned=st.none() | st.binary(max_size=100),
    cpu_seconds=SECONDS,
    wall_seconds=SECONDS,
    detail=TEXT,
)


@settings(deadline=None)
@given(JOBS, st.sampled_from(Tier))
def test_a_job_arrives_as_it_was_sent(sent: Job, tier: Tier) -> None:
    request = RunRequest(minimum_tier=tier, deadline_seconds=1.5, job=sent)
    arrived = RunRequest.model_validate_json(request.model_dump_json())
    assert arrived == request
    assert type(arrived.job) is Job
    assert digest(arrived.job) == digest(sent)


@settings(deadline=None)
@given(EXECUTIONS)
def test_an_execution_arrives_as_it_was_sent(sent: Execution) -> None:
    text = RunAnswer(execution=sent).model_dump_json()
    assert RunAnswer.model_validate_json(text).execution == sent
    limits = Limits(output_bytes=max(len(sent.stdout), len(sent.stderr), 100))
    assert len(text) <= max_answer_bytes(job(job_id=sent.job_id, limits=limits))


def test_the_largest_answer_fits() -> None:
    limits = Limits(output_bytes=300_000)
    full = b"\xff" * limits.output_bytes
    execution = replace(GOOD, stdout=full, stderr=full, returned=full)
    text = RunAnswer(execution=execution).model_dump_json()
    assert len(text) <= max_answer_bytes(job(limits=limits))


GOOD = Execution(job_id="a", tier=Tier.CELL, ending=Ending.EXITED, exit_status=0)


def good_request() -> dict[str, Any]:
    request = RunRequest(minimum_tier=Tier.LOCK, deadline_seconds=1.0, job=job())
    return json.loads(request.model_dump_json())


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("wire_version",), WIRE_VERSION + 1),
        (("unknown",), 1),
        (("minimum_tier",), "best"),
        (("deadline_seconds",), 0.0),
        (("deadline_seconds",), float("nan")),
        (("deadline_seconds",), "5"),
        (("job", "unknown"), 1),
        (("job", "source"), None),
        (("job", "stdin"), "no base64!"),
        (("job", "files"), {"a": 1}),
        (("job", "limits", "memory_mib"), 1.5),
        (("job", "limits", "cpu_seconds"), float("inf")),
        (("job", "limits", "unknown"), 1),
    ],
)
def test_a_misshapen_request_is_refused(path: tuple[str, ...], value: object) -> None:
    tree = good_request()
    RunRequest.model_validate_json(json.dumps(tree))
    node = tree
    for part in path[:-1]:
        node = node[part]
    node[path[-1]] = value
    with pytest.raises(ValidationError):
        RunRequest.model_validate_json(json.dumps(tree))


@pytest.mark.parametrize(
    "field", [field.name for field in fields(Job) if field.name not in {"job_id", "limits"}]
)
def test_every_part_of_a_job_tells_it_from_others(field: str) -> None:
    values = {
        "language": "c",
        "source": "print 2",
        "stdin": b"x",
        "call": PythonCall(function="f", arguments=b""),
        "files": {"a": b"b"},
    }
    assert digest(job()) == digest(job())
    assert digest(replace(job(), **{field: values[field]})) != digest(job())
    assert digest(replace(job(), limits=Limits())) != digest(job())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"job_id": "b"}, "answers job 'b'"),
        ({"tier": Tier.LOCK}, "in tier lock, below the demanded bubblewrap"),
        ({"tier": Tier.NONE}, "in tier none"),
        ({"exit_status": None}, "exited without a status"),
        ({"ending": Ending.SIGNALED, "exit_status": None}, "signal that is not told"),
        ({"stdout": b"x" * 11}, "11 bytes of output, where 10"),
        ({"stderr": b"x" * 11}, "11 bytes"),
        ({"returned": b"x" * 11}, "11 bytes"),
        ({"returned": b"x"}, "nothing was called"),
        ({"cpu_seconds": -1.0}, "less than no time"),
    ],
)
def test_an_execution_that_does_not_fit_its_job_is_found(
    changes: dict[str, Any], words: str
) -> None:
    asked = job(limits=Limits(output_bytes=10))
    assert execution_problem(GOOD, asked, Tier.BUBBLEWRAP) is None
    problem = execution_problem(replace(GOOD, **changes), asked, Tier.BUBBLEWRAP)
    assert problem is not None
    assert words in problem


def test_tiers_are_compared_by_strength() -> None:
    assert is_at_least(Tier.CELL, Tier.CELL)
    assert is_at_least(Tier.CELL, Tier.LOCK)
    assert not is_at_least(Tier.LOCK, Tier.CELL)
    assert not is_at_least(Tier.NONE, Tier.LOCK)


@pytest.mark.parametrize(
    "limits",
    [
        Limits(memory_mib=10**9),
        Limits(wall_seconds=1e9),
        Limits(output_bytes=0),
        Limits(num_processes=-1),
    ],
)
def test_a_job_beyond_what_a_server_allows_is_refused(limits: Limits) -> None:
    assert job_problem(job()) is None
    assert "a server allows" in str(job_problem(job(limits=limits)))
    assert "job_id" in str(job_problem(job(job_id="")))


def test_a_new_field_means_a_new_version() -> None:
    """Change WIRE_VERSION together with this list."""
    assert WIRE_VERSION == 1
    names = {kind: [field.name for field in fields(kind)] for kind in (Job, Execution, Limits)}
    assert names == {
        Job: ["job_id", "language", "source", "stdin", "call", "files", "limits"],
        Execution: [
            "job_id",
            "tier",
            "ending",
            "exit_status",
            "signal",
            "stdout",
            "stderr",
            "returned",
            "cpu_seconds",
            "wall_seconds",
            "detail",
        ],
        Limits: [
            "cpu_seconds",
            "wall_seconds",
            "memory_mib",
            "output_bytes",
            "num_processes",
            "disk_mib",
        ],
    }
