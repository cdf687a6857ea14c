"""Usage is added exactly once, whatever fails or is killed when."""

import os
import signal
import sqlite3
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_ext.errors import UsageError
from sglang_ext.observe.usage import HeldUsage, UsageRecorder, payer
from sglang_ext.observe.usage_store import AMOUNTS, HOUR, Cell, UsageStore
from sglang_ext.types import PUBLIC, Owner, Tier

_EVER = (0, float("inf"))


class _Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


class _FailingDb:
    """A connection whose statements fail on demand, before or after they took effect."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db
        self.fail: tuple[str, bool] | None = None

    def execute(self, statement: str, *arguments: Any) -> Any:
        return self._run(self._db.execute, statement, *arguments)

    def executemany(self, statement: str, rows: Any) -> Any:
        return self._run(self._db.executemany, statement, list(rows))

    def _run(self, call: Any, statement: str, *arguments: Any) -> Any:
        word, after = self.fail or ("nothing", False)
        hit = statement.startswith(word)
        if hit:
            self.fail = None
        if hit and not after:
            raise sqlite3.OperationalError("disk I/O error")
        result = call(statement, *arguments)
        if hit:
            raise sqlite3.OperationalError("disk I/O error, but it was done")
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._db, name)


def _sums(store: UsageStore) -> Counter[tuple[Cell, str]]:
    return Counter(
        {
            (cell, name): amount
            for cell, amounts in store.read(*_EVER)
            for name, amount in amounts.items()
            if amount
        }
    )


_STEPS = st.lists(
    st.one_of(
        st.tuples(
            st.just("add"),
            st.sampled_from("ab"),
            st.integers(0, 3 * HOUR),
            st.sampled_from(AMOUNTS[:7]),
            st.integers(1, 9),
        ),
        st.tuples(st.just("flush")),
        st.tuples(st.just("fail"), st.sampled_from(["BEGIN", "INSERT", "COMMIT"]), st.booleans()),
        st.tuples(st.just("restart")),
    ),
    max_size=30,
)


@settings(deadline=None, max_examples=60)
@given(_STEPS)
def test_every_amount_is_there_once(steps: list[Any]) -> None:
    store = UsageStore(Path(":memory:"))
    failing = store._db = _FailingDb(store._db)  # type: ignore[assignment]
    recorder, expected = UsageRecorder(store), Counter[tuple[Cell, str]]()
    for step, *rest in steps:
        if step == "add":
            tenant, when, name, amount = rest
            recorder.add(tenant, when, {name: amount})
            expected[Cell(when // HOUR * HOUR, tenant), name] += amount
        elif step == "flush":
            recorder.flush()
        elif step == "fail":
            failing.fail = (rest[0], rest[1])
        else:
            failing.fail = None
            assert recorder.flush()
            recorder = UsageRecorder(store)
    failing.fail = None
    assert recorder.flush()
    assert _sums(store) == expected


def test_a_failed_write_is_reported_and_made_up_for(tmp_path: Path) -> None:
    store, errors = UsageStore(tmp_path / "usage.db"), []
    failing = store._db = _FailingDb(store._db)  # type: ignore[assignment]
    recorder = UsageRecorder(store, on_error=lambda: errors.append(1))
    recorder.add("a", 0, {"requests": 1})
    failing.fail = ("COMMIT", True)
    assert not recorder.flush()
    recorder.add("a", 0, {"requests": 1})
    assert recorder.flush()
    assert len(errors) == 1
    assert recorder.read(*_EVER)[0][1]["requests"] == 2


def test_two_processes_and_two_runs_add_up(tmp_path: Path) -> None:
    stores = [UsageStore(tmp_path / "usage.db") for _ in range(2)]
    for _ in range(2):
        for store in stores:
            recorder = UsageRecorder(store)
            recorder.add("a", 7, {"output_tokens": 5})
            recorder.close()
    assert _sums(stores[0]) == {(Cell(0, "a"), "output_tokens"): 20}


def test_threads_lose_nothing(tmp_path: Path) -> None:
    recorder = UsageRecorder(UsageStore(tmp_path / "usage.db"))

    def add() -> None:
        for _ in range(2000):
            recorder.add("a", 0, {"requests": 1})

    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        recorder.flush()
    recorder.close()
    assert recorder.read(*_EVER)[0][1]["requests"] == 8000


_WRITER = """
import sys
from pathlib import Path
from sglang_ext.errors import UsageError
from sglang_ext.observe.usage import UsageRecorder
from sglang_ext.observe.usage_store import UsageStore

recorder = UsageRecorder(UsageStore(Path(sys.argv[1])))
number = 0
while True:
    for _ in range(7):
        number += 1
        recorder.add("a", number, {"requests": 1, "prompt_tokens": number})
    # One write a line, with or without buffers, so that a kill leaves no half of one.
    print(f"added {number}\\n", end="", flush=True)
    recorder.flush()
    print(f"written {number}\\n", end="", flush=True)
"""


@pytest.mark.parametrize("lines", [1, 2, 5, 40, 171])
def test_a_kill_loses_only_what_was_not_written(tmp_path: Path, lines: int) -> None:
    """What is there is the beginning of what was added, whole batches, nothing twice."""
    path = tmp_path / "usage.db"
    writer = subprocess.Popen(
        [sys.executable, "-c", _WRITER, str(path)], stdout=subprocess.PIPE, text=True
    )
    assert writer.stdout is not None
    said = [writer.stdout.readline().split() for _ in range(lines)]
    os.kill(writer.pid, signal.SIGKILL)
    said += [line.split() for line in writer.stdout]
    writer.wait()
    added = max(int(number) for word, number in said if word == "added")
    written = max([int(number) for word, number in said if word == "written"], default=0)
    rows = UsageStore(path).read(*_EVER)
    count = sum(amounts["requests"] for _, amounts in rows)
    assert written <= count <= added
    assert sum(amounts["prompt_tokens"] for _, amounts in rows) == count * (count + 1) / 2


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "other.db"
    with sqlite3.connect(other) as db:
        db.execute("PRAGMA user_version = 9")
    (tmp_path / "text.db").write_text("this is no database, and never was one " * 50)
    for path in (other, tmp_path / "text.db", tmp_path, tmp_path / "no" / "folder.db"):
        with pytest.raises(UsageError, match=str(path)):
            UsageStore(path)
    assert (tmp_path / "text.db").read_text().startswith("this is no database")


def test_a_file_of_format_1_is_taken_over_while_its_server_still_writes(tmp_path: Path) -> None:
    path, old = tmp_path / "usage.db", AMOUNTS[: AMOUNTS.index("reused_tokens")]
    columns = ", ".join(f"{name} NOT NULL DEFAULT 0" for name in old)
    insert = "INSERT INTO usage (hour, tenant, requests) VALUES (?, 'a', 3)"
    with sqlite3.connect(path) as db:
        db.execute(f"CREATE TABLE usage (hour, tenant, {columns}, PRIMARY KEY (hour, tenant))")
        db.execute("CREATE TABLE writers (name TEXT PRIMARY KEY, batch INTEGER NOT NULL)")
        db.execute(insert, (0,))
        db.execute("PRAGMA user_version = 1")
    store = UsageStore(path)
    store.add("w", 1, {Cell(0, "a"): {"reused_tokens": 5, "requests": 1}})
    with sqlite3.connect(path) as db:
        db.execute(insert, (HOUR,))
    assert _sums(store) == {
        (Cell(0, "a"), "requests"): 4,
        (Cell(0, "a"), "reused_tokens"): 5,
        (Cell(HOUR, "a"), "requests"): 3,
    }
    assert UsageStore(path).read(*_EVER) == store.read(*_EVER)


@given(st.lists(st.tuples(st.floats(0, 3 * HOUR), st.integers(0, 1000)), max_size=8))
def test_token_seconds_are_spread_over_their_hours(steps: list[tuple[float, int]]) -> None:
    store, clock = UsageStore(Path(":memory:")), _Clock()
    recorder = UsageRecorder(store, clock)
    held, total = HeldUsage(recorder, clock), 0.0
    by_hour: Counter[int] = Counter()
    for seconds, tokens in steps:
        start, end = clock.now, clock.now + seconds
        total += tokens * seconds
        for hour in range(0, int(end) + 1, HOUR):
            inside = min(end, hour + HOUR) - max(start, hour)
            by_hour[hour] += max(inside, 0) * tokens  # type: ignore[assignment]
        clock.now = end
        held.publish({(Owner("t:a"), Tier.CPU): total})
    recorder.close()
    stored = {cell.hour: amounts["cpu_token_seconds"] for cell, amounts in store.read(*_EVER)}
    for hour, amount in by_hour.items():
        assert stored.get(hour, 0.0) == pytest.approx(amount, abs=1e-6 * max(total, 1))
    assert sum(stored.values()) == pytest.approx(total)


def test_who_pays() -> None:
    owners = {"t:a": "a", "g:team": "group:team", PUBLIC: "public", "t:b:c": "b:c"}
    assert {owner: payer(Owner(owner)) for owner in owners} == owners
