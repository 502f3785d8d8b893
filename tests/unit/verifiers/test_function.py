import asyncio
from pathlib import Path

import pytest

from headrace.config import FunctionConfig
from headrace.errors import ConfigError
from headrace.types import Outcome, Prompt
from headrace.verifiers import check_function
from headrace.verifiers.component import Score
from headrace.verifiers.function import FunctionComponent

REWARDS = """
import os, pathlib, sys, time
from fractions import Fraction

class Mute:
    def __str__(self):
        raise ValueError("no text")
    __repr__ = __str__

class MuteError(Exception):
    def __str__(self):
        raise SystemExit("no text")
    __repr__ = __str__

VALUES = {"one": 1, "half": 0.5, "fraction": Fraction(1, 4), "none": None, "nan": float("nan"),
          "inf": float("inf"), "true": True, "text": "1.0", "list": [1.0], "huge": 1e7,
          "integer": 10**400, "longer": 10**5000, "mute": Mute()}

def reward(prompt, completion, answer, metadata):
    if completion == "raise":
        raise ValueError("boom")
    if completion == "mute error":
        raise MuteError
    if completion == "long error":
        raise ValueError("x" * 70 * 1024**2)
    if completion == "quit":
        sys.exit("no")
    if completion == "asks":
        here = pathlib.Path(__file__).parent
        (here / f"asked-{os.getpid()}").touch()
        while len(list(here.glob("asked-*"))) < 4 or not (here / "answered").exists():
            time.sleep(0.005)
        return 1.0
    if completion == "hangs":
        time.sleep(1000)
    if completion == "echo":
        return float((prompt, answer, metadata) == ("t", "5", {"k": [1, "two"]}))
    return VALUES[completion]

async def later(prompt, completion, answer, metadata):
    return 1.0

def narrow(prompt, completion):
    return 1.0

CONSTANT = 5
"""


RAISE_LINE = REWARDS.splitlines().index('        raise ValueError("boom")') + 1


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "my_rewards.py"
    file.write_text(REWARDS)
    return file


def prompt() -> Prompt:
    return Prompt(
        prompt_id="p", source="s", text="t", token_ids=(1,), answer="5", metadata={"k": [1, "two"]}
    )


async def score_all(config: FunctionConfig, *completions: str) -> list[Score]:
    component = FunctionComponent(config)
    try:
        return await asyncio.gather(*(component.score(prompt(), text) for text in completions))
    finally:
        await component.close()


def test_every_kind_of_return_value_is_paid_left_out_or_reported(file: Path) -> None:
    paid = {"one": 1.0, "half": 0.5, "fraction": 0.25, "echo": 1.0}
    broken = ["nan", "inf", "true", "text", "list", "huge", "raise", "quit"]
    broken += ["integer", "longer", "mute", "mute error", "long error"]
    config = FunctionConfig(
        kind="function", path=f"{file}:reward", num_processes=1, timeout_seconds=60.0
    )
    scores = asyncio.run(score_all(config, *paid, "none", *broken))
    assert [score.reward for score in scores] == [*paid.values(), None, *[None] * len(broken)]
    abstained = scores[len(paid)]
    assert abstained.outcome is Outcome.ABSTAIN
    assert not abstained.failed
    for score in scores[len(paid) + 1 :]:
        assert score.outcome is Outcome.RUNTIME
        assert score.failed
        assert "my_rewards.py:reward" in score.detail
    listed = scores[len(paid) + 1 + broken.index("list")]
    assert "list '[1.0]'" in listed.detail
    assert "one finite number" in listed.detail
    raised = scores[len(paid) + 1 + broken.index("raise")]
    assert f"ValueError: boom (my_rewards.py line {RAISE_LINE})" in raised.detail
    assert "Traceback" in raised.traceback


def test_slow_functions_run_side_by_side_and_never_hold_the_event_loop(file: Path) -> None:
    """Each waits for the other three and for the event loop."""

    async def answer() -> list[Score]:
        config = FunctionConfig(
            kind="function", path=f"{file}:reward", num_processes=4, timeout_seconds=120.0
        )
        task = asyncio.create_task(score_all(config, *["asks"] * 16))
        while not task.done() and len(list(file.parent.glob("asked-*"))) < 4:  # noqa: ASYNC110 - processes have no events
            await asyncio.sleep(0.005)
        (file.parent / "answered").touch()
        return await task

    assert [score.reward for score in asyncio.run(answer())] == [1.0] * 16


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing", "has no 'nothing'"),
        ("CONSTANT", "CONSTANT is a int, not a function"),
        ("later", "async function"),
        ("narrow", "cannot be called as"),
    ],
)
def test_a_function_that_cannot_work_is_found_before_the_run(
    file: Path, name: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_function(f"{file}:{name}")


def test_a_good_function_passes_the_check(file: Path) -> None:
    check_function(f"{file}:reward")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no_such_module:reward", "ModuleNotFoundError"),
        ("/nowhere/rewards.py:reward", "no file /nowhere/rewards.py"),
    ],
)
def test_a_missing_module_is_named(path: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_function(path)


def test_a_module_that_raises_while_imported_is_named(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("import sys\nsys.exit(3)\n")
    with pytest.raises(ConfigError, match=r"SystemExit: 3 \(bad.py line 2\)"):
        check_function(f"{tmp_path}/bad.py:reward")


@pytest.mark.parametrize(
    ("module", "message"),
    [
        ("import os\nos._exit(3)\n", r"bad.py:reward.*ended during the import \(exit status 3\)"),
        (
            "class E(Exception):\n    def __str__(self): raise E\nraise E\n",
            r"bad.py:reward.*raised E: \(its text cannot be made: E\)",
        ),
    ],
)
def test_a_module_that_ends_its_process_or_raises_what_has_no_text_is_named(
    tmp_path: Path, module: str, message: str
) -> None:
    (tmp_path / "bad.py").write_text(module)
    with pytest.raises(ConfigError, match=message):
        check_function(f"{tmp_path}/bad.py:reward")


def test_who_breaks_a_function_is_paid_what_is_declared_for_it(file: Path) -> None:
    config = FunctionConfig(
        kind="function",
        path=f"{file}:reward",
        num_processes=1,
        timeout_seconds=4.0,
        failure_reward=-0.5,
    )
    raised, late, none, paid = asyncio.run(score_all(config, "raise", "hangs", "none", "half"))
    assert (raised.reward, raised.outcome, raised.failed) == (-0.5, Outcome.RUNTIME, False)
    assert "boom" in raised.detail
    assert (late.reward, late.outcome) == (-0.5, Outcome.TIMEOUT_WALL)
    assert (none.reward, none.outcome) == (None, Outcome.ABSTAIN)
    assert paid.reward == 0.5
