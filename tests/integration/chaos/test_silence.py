"""A verifier that never answers leaves its group unscored: the run goes on and says so."""

from __future__ import annotations

import sqlite3
from contextlib import closing

import pytest
from lab import Lab

pytestmark = pytest.mark.slow

REWARD = '''
import time


def share_of_ones(prompt, completion, answer, metadata):
    """Never answer for one prompt."""
    if prompt == "3+3=":
        time.sleep(1e6)
    return completion.count("1") / max(len(completion), 1)
'''


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ("verifier.components.ones.timeout_seconds=4.0", "no answer within 4 s"),
        ("faults.verifier_deadline_seconds=8.0", "faults.verifier_deadline_seconds = 8"),
    ],
)
def test_a_prompt_whose_verdicts_never_come_is_dropped_and_the_run_ends(
    own_lab: Lab, setting: str, reason: str
) -> None:
    (own_lab.folder / "reward.py").write_text(REWARD, encoding="utf-8")
    one_epoch = ("--set", "num_steps=null", "--set", "num_epochs=1", "--set", "data.eval=null")
    ended = own_lab.train("silent", *one_epoch, "--set", setting).wait()
    assert ended.status == 0, ended.err
    with closing(sqlite3.connect(own_lab.folder / "silent" / "ledger.sqlite")) as ledger:
        rows = ledger.execute("SELECT prompt_id, reason FROM settled").fetchall()
    assert len(rows) == 14
    dropped = [told for _, told in rows if told is not None]
    assert dropped
    assert all(reason in told for told in dropped)
    # A machine that stands still for as long would be late with others as well.
    assert len(dropped) < len(rows)
