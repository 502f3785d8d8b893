"""What a run does that is asked for more or fewer of its roles: all of it, or nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest

from headrace.errors import ConfigError, GeneratorFailure, HeadraceError, RunError
from headrace.generators.pool import GeneratorPool
from headrace.runtime.resizing import scaler_of
from headrace.runtime.verdict_deadline import DeadlineVerifier
from headrace.types import Prompt, RolloutGroup, Verdict
from headrace.verifiers.component import Score
from headrace.verifiers.weighted import WeightedComponent, WeightedVerifier


class Pool(GeneratorPool):
    """Counts its members and starts none."""

    def __init__(self) -> None:
        self._wanted = self.there = 2
        self.error: HeadraceError | None = None
        self.asked: list[int] = []

    @property
    def num_members(self) -> int:
        return self.there

    async def resize(self, num_members: int) -> None:
        self.asked.append(num_members)
        self._wanted = num_members
        await asyncio.sleep(0)
        error, self.error = self.error, None
        self.there += 1 if error else 0
        if error:
            raise error
        self.there = num_members


class Workers:
    """A component with processes."""

    def __init__(self) -> None:
        self.num_workers = 2

    async def resize(self, num_workers: int) -> None:
        await asyncio.sleep(0)
        self.num_workers = num_workers

    async def score(self, prompt: Prompt, completion: str) -> Score:
        raise NotImplementedError

    async def close(self) -> None:
        pass


class Elsewhere:
    """A verifier on other machines."""

    async def score(self, group: RolloutGroup) -> tuple[Verdict, ...]:
        raise NotImplementedError

    def metrics(self) -> Mapping[str, float]:
        return {}

    async def close(self) -> None:
        pass


class Thinker(Workers):
    """A component of this process."""

    resize = None  # type: ignore[assignment]
    num_workers = None  # type: ignore[assignment]

    def __init__(self) -> None:
        pass


def verifier_of(**components: Workers) -> DeadlineVerifier:
    parts = {
        name: WeightedComponent(component=one, weight=1.0, require_stop=False)
        for name, one in components.items()
    }
    weighted = WeightedVerifier(parts, pass_threshold=1.0, max_failed_share=1.0, window=1)
    return DeadlineVerifier(weighted, 1.0)


class Run:
    def __init__(self) -> None:
        self.pool, self.workers = Pool(), Workers()
        self.told: list[str] = []
        verifier = verifier_of(math=self.workers)
        self.scale = scaler_of(lambda: (self.pool, verifier), self.told.append)


def test_several_roles_change_in_one_request_and_the_run_says_so_once() -> None:
    run = Run()
    said = asyncio.run(_ask(run, generators=4, verifiers=3))
    assert said == "4 generators, where there were 2; 3 verifiers, where there were 2 (math)"
    assert (run.pool.there, run.workers.num_workers, run.told) == (4, 3, [said])


async def _ask(run: Run, **wanted: int) -> str:
    return await run.scale(wanted)


@pytest.mark.parametrize("error", [GeneratorFailure("one did not join"), ConfigError("no memory")])
def test_where_generators_do_not_come_nothing_is_as_asked(error: HeadraceError) -> None:
    run = Run()
    run.pool.error = error
    with pytest.raises(type(error), match=str(error)):
        asyncio.run(_ask(run, generators=4, verifiers=3))
    assert run.pool.asked == [4, 2]
    assert (run.pool.there, run.workers.num_workers, run.told) == (2, 2, [])


def test_where_verifiers_cannot_change_generators_do_not_either() -> None:
    pool = Pool()
    for verifier, words in (
        (DeadlineVerifier(Elsewhere(), 1.0), "actors on the machines of a cluster"),
        (verifier_of(language=Thinker()), "works in processes or cells that scale"),
    ):
        scale = scaler_of(lambda verifier=verifier: (pool, verifier), print)  # type: ignore[misc]
        with pytest.raises(ConfigError, match=words):
            asyncio.run(scale({"generators": 4, "verifiers": 3}))
    assert pool.asked == []


def test_verifiers_scale_where_the_generator_is_in_the_learners_process() -> None:
    workers = Workers()
    verifier = verifier_of(code=workers)
    scale = scaler_of(lambda: (object(), verifier), print)  # type: ignore[arg-type, return-value]
    assert asyncio.run(scale({"verifiers": 5})) == "5 verifiers, where there were 2 (code)"
    with pytest.raises(ConfigError, match=r"placement\.generators"):
        asyncio.run(scale({"verifiers": 6, "generators": 2}))
    assert workers.num_workers == 5


def test_a_run_that_starts_says_so() -> None:
    with pytest.raises(RunError, match="still starting"):
        asyncio.run(scaler_of(lambda: None, print)({"verifiers": 2}))


def test_requests_are_done_one_after_the_other() -> None:
    run = Run()

    async def both() -> None:
        first = asyncio.ensure_future(_ask(run, generators=5, verifiers=5))
        second = asyncio.ensure_future(_ask(run, generators=3, verifiers=3))
        said = "3 generators, where there were 5; 3 verifiers, where there were 5 (math)"
        assert await second == said
        await first

    asyncio.run(both())
