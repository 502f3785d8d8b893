"""The ledger: which (epoch, prompt) was settled at which step, in one sqlite file.

Invariant (exactly once): a (epoch, prompt) is settled at most once, as trained or as dropped with
the reason, and the rows of a step are all there or none of them, whenever the process is killed.
It holds no weights and does not know what a checkpoint is: on resume the caller rewinds it to the
step whose weights it loaded. One process writes it; any thread may, and waits for the others.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from headrace.errors import RunDirectoryError, RunError

_VERSION = ("ledger_version", "1")
_TABLES = (
    "CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID",
    # A null reason: trained. The key makes a second settling of one prompt impossible.
    """CREATE TABLE settled (
        epoch INTEGER NOT NULL, prompt_id TEXT NOT NULL, step INTEGER NOT NULL, reason TEXT,
        PRIMARY KEY (epoch, prompt_id)
    ) WITHOUT ROWID""",
    "CREATE INDEX settled_by_step ON settled (step)",
)
# A reader, such as `headrace inspect`, may hold the file for a moment.
_BUSY_SECONDS = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerCounts:
    """How many (epoch, prompt) pairs are settled, by how they ended."""

    num_trained: int
    num_dropped: int


class Ledger:
    """The open ledger of one run; made if the file does not exist."""

    def __init__(self, path: Path) -> None:
        """Open ``path``. Raises RunDirectoryError when it is not a ledger of this version."""
        self._path = path
        self._lock = threading.RLock()
        """Of the connection: a transaction of one thread holds nothing of another's."""
        try:
            # Autocommit: every transaction below is written out. Threads: see the module.
            self._connection = sqlite3.connect(
                path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False
            )
        except sqlite3.Error as error:
            msg = f"ledger {path}: {error}"
            raise RunDirectoryError(msg) from error
        try:
            self._prepare()
        except sqlite3.Error as error:
            self.close()
            msg = f"ledger {path}: {error}; is this the directory of a run?"
            raise RunDirectoryError(msg) from error
        except RunDirectoryError:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def settle(self, step: int, trained: Sequence[str], dropped: Mapping[str, str]) -> None:
        """Record the groups that ``step`` trained and dropped (group id -> reason), all or none.

        Returns once they are on the disk. Raises RunError, with nothing recorded, when a group is
        settled already, when a later step has settled some, or when the disk refuses.
        """
        endings = [*((group_id, None) for group_id in trained), *dropped.items()]
        try:
            with self._transaction():
                self._refuse_earlier_than_last(step)
                self._insert_all(step, endings)
        except sqlite3.Error as error:
            msg = f"ledger {self._path}: step {step} could not be recorded: {error}"
            raise RunError(msg) from error

    def rewind(self, step: int) -> int:
        """Take back what was settled after ``step`` and return how many pairs that were.

        A run killed at step 13 with its last checkpoint at 10 trains steps 11 to 13 again, from
        the weights of step 10; what those steps settled is settled no more. Raises RunError.
        """
        query = "DELETE FROM settled WHERE step > ?"
        try:
            with self._transaction():
                return self._connection.execute(query, (step,)).rowcount
        except sqlite3.Error as error:
            msg = (
                f"ledger {self._path}: what was settled after step {step} could not be taken back: "
                f"{error}; make room on the disk, end what else has the file open, and --resume"
            )
            raise RunError(msg) from error

    def require(self, step: int) -> None:
        """Raise RunDirectoryError unless ``step`` is on record, as it is before its checkpoint is.

        Where it is not, the file is another one: prompts would be trained a second time.
        """
        with self._lock:
            find = self._connection.execute
            if find("SELECT 1 FROM settled WHERE step = ? LIMIT 1", (step,)).fetchone():
                return
            (last,) = find("SELECT max(step) FROM settled").fetchone()
        msg = (
            f"ledger {self._path}: nothing of step {step} is in it, "
            f"{'which is empty' if last is None else f'whose last step is {last}'}, and there is a "
            f"checkpoint of step {step}: the file was lost, cut short or exchanged; put it back, "
            "or start a new run from the checkpoint's model"
        )
        raise RunDirectoryError(msg)

    def settled(self, epoch: int) -> frozenset[str]:
        """Return the ids of the prompts that ``epoch`` is done with, trained or dropped."""
        query = "SELECT prompt_id FROM settled WHERE epoch = ?"
        with self._lock:
            return frozenset(row[0] for row in self._connection.execute(query, (epoch,)))

    def counts(self) -> LedgerCounts:
        """Count what is settled, over all epochs."""
        query = "SELECT count(*) - count(reason), count(reason) FROM settled"
        num_trained, num_dropped = self._connection.execute(query).fetchone()
        return LedgerCounts(num_trained=num_trained, num_dropped=num_dropped)

    def dropped_reasons(self) -> Mapping[str, int]:
        """Return how many were dropped for each reason, the most frequent reason first."""
        query = (
            "SELECT reason, count(*) FROM settled WHERE reason IS NOT NULL "
            "GROUP BY reason ORDER BY count(*) DESC, reason"
        )
        return dict(self._connection.execute(query).fetchall())

    def close(self) -> None:
        """Close the file, after what another thread records. Idempotent."""
        with self._lock:
            self._connection.close()

    def _prepare(self) -> None:
        # A rollback journal and not WAL: run directories lie on network file systems, where WAL
        # has no shared memory. Truncated and not deleted: a deletion would need the directory
        # synced too, or a power cut could bring the journal of a committed step back.
        self._connection.execute("PRAGMA journal_mode = TRUNCATE")
        self._connection.execute("PRAGMA synchronous = FULL")
        with self._transaction():
            tables = {row[0] for row in self._connection.execute("SELECT name FROM sqlite_master")}
            if not tables:
                for statement in _TABLES:
                    self._connection.execute(statement)
                self._connection.execute("INSERT INTO meta VALUES (?, ?)", _VERSION)
            elif not {"meta", "settled"} <= tables:
                msg = f"ledger {self._path}: a database of something else"
                raise RunDirectoryError(msg)
            found = self._connection.execute("SELECT key, value FROM meta").fetchall()
        if found != [_VERSION]:
            msg = f"ledger {self._path}: holds {dict(found)}, this headrace reads {_VERSION}"
            raise RunDirectoryError(msg)

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._lock:
            # IMMEDIATE takes the write lock now: nothing is done yet that would be undone.
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._connection.execute("COMMIT")
            finally:
                # Still inside: something above raised, and sqlite has not rolled back itself.
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")

    def _refuse_earlier_than_last(self, step: int) -> None:
        last = self._connection.execute("SELECT max(step) FROM settled").fetchone()[0]
        if last is not None and step < last:
            msg = f"ledger {self._path}: step {step} after step {last}; rewind to a step first"
            raise RunError(msg)

    def _insert_all(self, step: int, endings: Sequence[tuple[str, str | None]]) -> None:
        rows = [(*_split(group_id), step, reason) for group_id, reason in endings]
        self._connection.execute("SAVEPOINT before_rows")
        try:
            self._connection.executemany("INSERT INTO settled VALUES (?, ?, ?, ?)", rows)
        except sqlite3.IntegrityError:
            # It does not say which row: again, one after the other.
            self._connection.execute("ROLLBACK TO before_rows")
            for group_id, reason in endings:
                self._insert(group_id, step, reason)

    def _insert(self, group_id: str, step: int, reason: str | None) -> None:
        epoch, prompt_id = _split(group_id)
        try:
            row = (epoch, prompt_id, step, reason)
            self._connection.execute("INSERT INTO settled VALUES (?, ?, ?, ?)", row)
        except sqlite3.IntegrityError as error:
            query = "SELECT step FROM settled WHERE epoch = ? AND prompt_id = ?"
            (earlier,) = self._connection.execute(query, (epoch, prompt_id)).fetchone()
            msg = (
                f"ledger {self._path}: group {group_id} of step {step} was already settled "
                f"at step {earlier}"
            )
            raise RunError(msg) from error


def _split(group_id: str) -> tuple[int, str]:
    """Take ``epoch/prompt_id`` apart; the prompt id may hold slashes of its own."""
    epoch, _, prompt_id = group_id.partition("/")
    return int(epoch), prompt_id
