from __future__ import annotations

import json
from collections.abc import Mapping

import pytest

import headrace.bench
from headrace.bench import BENCHMARKS, Benchmark, BenchResult, run_benchmark
from headrace.bench.result import Peers, describe_machine, installed_versions
from headrace.errors import ConfigError, HeadraceError


def silent(_line: str) -> None:
    pass


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> list[Peers]:
    """Make `fake` the one benchmark; the list gets the peers of each call."""
    calls: list[Peers] = []

    def measure(peers: Peers, _progress: object) -> Mapping[str, float]:
        calls.append(peers)
        return {"seconds": 1.5, "num_things": 3}

    benchmark = Benchmark(name="fake", summary="nothing", measure=measure, peers=("torch", "numpy"))
    monkeypatch.setattr(headrace.bench, "BENCHMARKS", {"fake": benchmark})
    return calls


def test_every_benchmark_of_the_design_is_there_under_its_name() -> None:
    assert list(BENCHMARKS) == [
        "quickstart",
        "smollm2",
        "step",
        "verify",
        "async",
        "learn",
        "mismatch",
        "generate",
        "int8",
        "startup",
        "memory",
        "chaos",
    ]
    assert all(name == benchmark.name for name, benchmark in BENCHMARKS.items())
    assert all(benchmark.summary for benchmark in BENCHMARKS.values())


def test_a_result_is_one_json_object_of_four_parts(fake: list[Peers]) -> None:
    result = json.loads(json.dumps(run_benchmark("fake", None, silent).to_json()))
    assert list(result) == ["name", "machine", "versions", "figures"]
    assert result["name"] == "fake"
    assert result["figures"] == {"seconds": 1.5, "num_things": 3}
    assert {"processor", "num_cpus", "load_average"} <= set(result["machine"])
    assert {"headrace", "python", "torch"} <= set(result["versions"])
    assert fake == [()]


def test_peers_are_passed_on_and_their_versions_named(fake: list[Peers]) -> None:
    result = run_benchmark("fake", "torch,numpy,torch", silent)
    assert fake == [("torch", "numpy")]
    assert {"torch", "numpy"} <= set(result.versions)


def test_one_unknown_peer_among_several_is_refused(fake: list[Peers]) -> None:
    with pytest.raises(ConfigError, match="--against verl: unknown peer; allowed: torch, numpy"):
        run_benchmark("fake", "torch,verl", silent)
    assert not fake


def test_a_table_shows_every_figure_in_a_line_of_its_own() -> None:
    figures = {"step_seconds": 1.25, "speedup": 3.0}
    result = BenchResult(name="x", machine={"num_cpus": 2}, versions={}, figures=figures)
    lines = result.table().splitlines()
    assert lines[0] == "x: num_cpus 2"
    assert lines[-2:] == ["step_seconds  1.25", "speedup       3"]


def test_a_misspelt_name_is_an_error_that_lists_what_there_is() -> None:
    with pytest.raises(ConfigError, match=r"bench stepp: .*did you mean step\? there are quick"):
        run_benchmark("stepp", None, silent)


def test_an_unknown_peer_is_an_error_that_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="--against verl: unknown peer; allowed: trl"):
        run_benchmark("step", "verl", silent)


def test_a_peer_where_there_is_none_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"bench memory --against trl: .* leave --against out"):
        run_benchmark("memory", "trl", silent)


@pytest.mark.parametrize(("load", "num_notes"), [(0.1, 0), (7.5, 1)])
def test_a_busy_machine_is_said_to_be_busy(
    fake: list[Peers], monkeypatch: pytest.MonkeyPatch, load: float, num_notes: int
) -> None:
    monkeypatch.setattr("os.getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr(headrace.bench, "num_usable_cpus", lambda: 2)
    lines: list[str] = []
    run_benchmark("fake", None, lines.append)
    assert len(lines) == num_notes
    assert fake == [()]


def test_a_missing_model_is_said_before_any_work(
    monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))
    for name in ("step", "smollm2"):
        with pytest.raises(HeadraceError, match="headrace fetch smollm2-135m"):
            run_benchmark(name, None, silent)


def test_the_machine_and_the_versions_hold_no_blank() -> None:
    assert all(str(value).strip() for value in describe_machine().values())
    assert all(installed_versions(["numpy"]).values())
