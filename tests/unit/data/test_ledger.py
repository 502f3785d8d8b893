from __future__ import annotations

import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from headrace.data import Ledger, LedgerCounts
from headrace.errors import RunDirectoryError, RunError

# Settles 50 groups a step, as fast as it can, and says so after each step: most of its time is
# spent inside a step, so most kills fall there.
WORKER = """
import sys
from pathlib import Path
from headrace.data.ledger import Ledger

ledger, step = Ledger(Path(sys.argv[1])), int(sys.argv[2])
while True:
    step += 1
    groups = [f"{step}/p{index}" for index in range(49)]
    ledger.settle(step, groups, {f"{step}/dropped": "all rollouts equal"})
    print(step, flush=True)
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.sqlite"


def test_what_is_settled_is_there_when_the_file_is_opened_again(path: Path) -> None:
    with Ledger(path) as ledger:
        ledger.settle(1, ["0/a", "0/b/c"], {"0/d": "too long"})
        ledger.settle(2, ["1/a"], {"1/b/c": "too long", "1/d": "all equal"})
    with Ledger(path) as ledger:
        assert ledger.settled(0) == {"a", "b/c", "d"}
        assert ledger.settled(1) == {"a", "b/c", "d"}
        assert ledger.settled(2) == frozenset()
        assert ledger.counts() == LedgerCounts(num_trained=3, num_dropped=3)
        assert list(ledger.dropped_reasons().items()) == [("too long", 2), ("all equal", 1)]


@pytest.mark.parametrize("dropped", [{}, {"0/b": "too long"}])
def test_settling_a_group_twice_raises_and_records_nothing_of_that_step(
    path: Path, dropped: dict[str, str]
) -> None:
    with Ledger(path) as ledger:
        ledger.settle(3, ["0/a", "0/b"], {})
        repeated = [] if dropped else ["0/b"]
        with pytest.raises(RunError, match="group 0/b of step 4 was already settled at step 3"):
            ledger.settle(4, ["0/c", *repeated], dropped)
        assert ledger.settled(0) == {"a", "b"}
        ledger.settle(4, ["0/c"], {})


def test_the_same_group_twice_in_one_step_raises(path: Path) -> None:
    with Ledger(path) as ledger, pytest.raises(RunError, match="already settled at step 1"):
        ledger.settle(1, ["0/a", "0/a"], {})


def test_a_rewind_takes_back_the_steps_after_the_checkpoint_and_no_others(path: Path) -> None:
    with Ledger(path) as ledger:
        for step in range(1, 14):
            ledger.settle(step, [f"0/p{step}"], {f"0/d{step}": "equal"})
        assert ledger.rewind(10) == 6
        assert ledger.counts() == LedgerCounts(num_trained=10, num_dropped=10)
        assert ledger.rewind(10) == 0
        ledger.settle(11, ["0/p11"], {})


@pytest.mark.parametrize(
    ("settled", "found"), [((), "which is empty"), ((1, 2), "whose last step is 2")]
)
def test_a_ledger_without_the_step_of_a_checkpoint_is_not_the_runs(
    path: Path, settled: tuple[int, ...], found: str
) -> None:
    with Ledger(path) as ledger:
        for step in settled:
            ledger.settle(step, [f"0/p{step}"], {})
            ledger.require(step)
        with pytest.raises(RunDirectoryError, match=f"nothing of step 3 .*{found}.* put it back"):
            ledger.require(3)


def test_a_step_before_one_that_is_settled_needs_a_rewind(path: Path) -> None:
    with Ledger(path) as ledger:
        ledger.settle(13, ["0/a"], {})
        with pytest.raises(RunError, match="step 11 after step 13; rewind to a step first"):
            ledger.settle(11, ["0/b"], {})
        assert ledger.settled(0) == {"a"}


def test_a_file_that_is_no_ledger_is_refused_and_left_as_it_was(path: Path) -> None:
    path.write_text("these are notes, not a database, and long enough to be looked at" * 20)
    before = path.read_bytes()
    with pytest.raises(RunDirectoryError, match="file is not a database"):
        Ledger(path)
    assert path.read_bytes() == before


def test_a_database_of_something_else_is_refused_and_left_as_it_was(path: Path) -> None:
    other = sqlite3.connect(path)
    other.execute("CREATE TABLE settled (name TEXT)")
    other.close()
    before = path.read_bytes()
    with pytest.raises(RunDirectoryError, match="a database of something else"):
        Ledger(path)
    assert path.read_bytes() == before


def test_a_ledger_of_another_version_is_refused(path: Path) -> None:
    Ledger(path).close()
    other = sqlite3.connect(path)
    with other:
        other.execute("UPDATE meta SET value = '9'")
    other.close()
    with pytest.raises(RunDirectoryError, match=r"'ledger_version': '9'.*this headrace reads"):
        Ledger(path)


def test_a_ledger_in_a_directory_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="unable to open database file"):
        Ledger(tmp_path / "absent" / "ledger.sqlite")


def test_a_full_disk_is_a_run_error_and_the_step_can_be_settled_later(path: Path) -> None:
    with Ledger(path) as ledger:
        ledger.settle(1, ["0/a"], {})
        pages = ledger._connection.execute("PRAGMA page_count").fetchone()[0]
        ledger._connection.execute(f"PRAGMA max_page_count = {pages}")
        many = [f"0/p{index}" for index in range(5000)]
        with pytest.raises(
            RunError, match="step 2 could not be recorded: database or disk is full"
        ):
            ledger.settle(2, many, {})
        assert ledger.settled(0) == {"a"}
        ledger._connection.execute("PRAGMA max_page_count = 100000")
        ledger.settle(2, many, {})
        assert ledger.counts().num_trained == 5001


def test_a_rewind_that_the_disk_refuses_says_what_to_do(path: Path) -> None:
    with Ledger(path) as ledger:
        ledger.settle(1, ["0/a"], {})
        ledger._connection.execute("PRAGMA query_only = 1")
        with pytest.raises(RunError, match=r"after step 0 could not be taken back.*--resume"):
            ledger.rewind(0)
        assert ledger.settled(0) == {"a"}


def test_another_thread_may_settle_and_closing_twice_is_fine(path: Path) -> None:
    ledger = Ledger(path)
    thread = threading.Thread(target=ledger.settle, args=(1, ["0/a"], {}))
    thread.start()
    thread.join(timeout=30)
    assert ledger.settled(0) == {"a"}
    ledger.close()
    ledger.close()


def test_a_reader_sees_whole_steps_while_the_run_writes(path: Path) -> None:
    with Ledger(path) as writer, Ledger(path) as reader:
        for step in range(1, 20):
            writer.settle(step, [f"0/{step}a", f"0/{step}b"], {})
            assert reader.counts().num_trained == 2 * step


def _work_until_killed(path: Path, *, last: int, num_steps: int, pause: float) -> int:
    """Run the worker on from step ``last``, kill it ``pause`` seconds after it told ``num_steps``.

    Returns the last step told.
    """
    command = [sys.executable, "-c", WORKER, str(path), str(last)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as worker:
        output = worker.stdout
        assert output is not None
        try:
            told = [output.readline() for _ in range(num_steps)]
            time.sleep(pause)
        finally:
            worker.kill()
        # It may have gone on for a moment before the signal reached it.
        told += output.readlines()
    return int(told[-1])


def test_a_ledger_killed_at_any_moment_holds_whole_steps_and_all_that_was_told(path: Path) -> None:
    last = 0
    # A kill right after a step is told falls before the next one has begun: hence the pauses.
    for num_steps, pause in [(1, 0.0), (2, 0.1), (4, 0.033)]:
        told = _work_until_killed(path, last=last, num_steps=num_steps, pause=pause)
        with Ledger(path) as ledger:
            # The kill may fall between the commit and its announcement: one step more, never less.
            query = "SELECT step, count(*) FROM settled GROUP BY step"
            steps = dict(ledger._connection.execute(query).fetchall())
            assert set(steps.values()) == {50}
            assert sorted(steps) == list(range(1, max(steps) + 1))
            assert told <= max(steps) <= told + 1
            last = max(steps)
            ledger.rewind(last - 1)
            last -= 1
