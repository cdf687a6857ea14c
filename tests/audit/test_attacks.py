"""Each attack comes through where a server has its leak, and does not where it has none."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from sglang_ext.audit import harm, hits, outside, reads, timing
from sglang_ext.audit.party import Party, Prompts
from sglang_ext.audit.report import Finding, Verdict, as_document, as_table, leaks
from sglang_ext.cli import main
from tests.audit.fake import Fake, serving

PAIRS = 14


class Attack:
    """Victim and attacker of one fake."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.victim, self.attacker = Party(url, "key-v"), Party(url, "key-a")
        self.prompts = Prompts(self.victim, 1)
        self.both = (self.victim, self.attacker, self.prompts)

    def close(self) -> None:
        self.victim.close()
        self.attacker.close()


@contextmanager
def attacking(leak: str = "") -> Iterator[Attack]:
    with serving(Fake(leak)) as url:
        attack = Attack(url)
        try:
            yield attack
        finally:
            attack.close()


ATTACKS: dict[str, Callable[[Attack], Finding]] = {
    "first token": lambda on: timing.probe(*on.both, 512, PAIRS)[0],
    "between tokens": lambda on: timing.probe(*on.both, 8, PAIRS)[1],
    "batch": lambda on: timing.batch_order(*on.both, 8),
    "cached tokens": lambda on: hits.cached_token_fields(*on.both),
    "body": lambda on: hits.forged_body(*on.both, "victim"),
    "headers": lambda on: hits.forged_headers(*on.both, "victim"),
    "abort": lambda on: harm.foreign_abort(*on.both, "victim"),
    "session": lambda on: harm.foreign_session(*on.both),
    "flush": lambda on: harm.foreign_flush(*on.both, "victim"),
    "deadly": lambda on: harm.deadly_requests(*on.both),
    "metrics": lambda on: reads.metrics(*on.both),
    "errors": lambda on: reads.error_texts(*on.both, "victim"),
    "policy": lambda on: reads.policy_reads(on.attacker, "victim"),
    "no key": lambda on: reads.no_key(on.url, on.prompts),
}
LEAKS = {
    "time": "first token",
    "gap": "between tokens",
    "batch order": "batch",
    "shared": "cached tokens",
    "one route": "cached tokens",
    "forged body": "body",
    "forged header": "headers",
    "abort": "abort",
    "abort all": "abort",
    "stolen session": "session",
    "closed session": "session",
    "listed session": "session",
    "told session": "session",
    "flush": "flush",
    "metrics": "metrics",
    "error text": "errors",
    "used id": "errors",
    "usage": "policy",
    "policy": "policy",
    "no key": "no key",
    "deadly": "deadly",
}


@pytest.mark.parametrize("leak", LEAKS)
def test_a_leak_is_found(leak: str) -> None:
    with attacking(leak) as on:
        found = ATTACKS[LEAKS[leak]](on)
    assert found.verdict is Verdict.LEAK, found
    assert found.detail


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_server_without_leaks_passes(attack: str) -> None:
    with attacking() as on:
        found = ATTACKS[attack](on)
    assert found.verdict is Verdict.PASS, found


def test_metrics_that_tell_nothing_pass() -> None:
    with attacking("readable metrics") as on:
        assert reads.metrics(*on.both).verdict is Verdict.PASS


def test_every_attack_has_a_leak_that_it_must_find() -> None:
    assert set(LEAKS.values()) == set(ATTACKS)


# ---- beside the routes


class Stream:
    """Publishes what a fake stores, as SGLang does, with or without the owner's name."""

    def __init__(self, fake: Fake, named: bool, sealed: bool = False) -> None:
        self.socket = zmq.Context.instance().socket(zmq.PUB)
        port = self.socket.bind_to_random_port("tcp://127.0.0.1")
        self.address = f"tcp://127.0.0.1:{port}"
        self._cached, self._named, self._sealed = fake.cached, named, sealed
        fake.cached = self.cached  # type: ignore[method-assign]

    def cached(self, space: str, ids: list[int], remember: bool = True) -> int:
        salt = {"cache_salt": space} if self._named else {}
        event = {"type": "BlockStored", "block_hashes": [1], "token_ids": ids, **salt}
        if not (self._sealed and space == "victim"):
            batch = [0.0, [event], None]
            self.socket.send_multipart([b"", b"0", msgspec.msgpack.encode(batch)])
        return self._cached(space, ids, remember)


@pytest.mark.parametrize(
    ("named", "sealed", "verdict"),
    [
        (False, False, Verdict.LEAK),
        (True, False, Verdict.PASS),
        (False, True, Verdict.PASS),
    ],
)
def test_events_must_name_the_owner_of_a_text(
    named: bool, sealed: bool, verdict: Verdict, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outside, "_QUIET_S", 0.2)
    fake = Fake()
    stream = Stream(fake, named, sealed)
    with serving(fake) as url:
        on = Attack(url)
        found = outside.kv_events(*on.both, stream.address)
        on.close()
    stream.socket.close(0)
    assert found.verdict is verdict, found


@pytest.mark.parametrize("leak", ["ids", "text", "mode", "", "closed folder"])
def test_files_must_not_tell(leak: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outside, "_FILES_S", 0.0)
    tmp_path.chmod(0o755)
    inner = tmp_path / "rank"
    inner.mkdir()
    inner.chmod(0o700 if leak == "closed folder" else 0o755)
    fake, page = Fake(), inner / "page"
    page.touch()
    page.chmod(0o644 if leak in ("mode", "closed folder") else 0o600)
    remember = fake.cached

    def written(space: str, ids: list[int], remember_it: bool = True) -> int:
        if leak == "ids" and len(ids) > 100:
            page.write_bytes(b"".join(token.to_bytes(4, "little") for token in ids))
        return remember(space, ids, remember_it)

    fake.cached = written  # type: ignore[method-assign]
    with serving(fake) as url:
        on = Attack(url)
        if leak == "text":
            send = on.victim.post

            def post(path: str, body: Any, headers: Any = None) -> Any:
                page.write_text(str(body.get("text")))
                return send(path, body, headers)

            on.victim.post = post  # type: ignore[method-assign]
        found = outside.nvme_files(on.victim, on.prompts, tmp_path)
        on.close()
    tells = leak not in ("", "closed folder")
    assert found.verdict is (Verdict.LEAK if tells else Verdict.PASS), found


def test_what_is_not_given_is_not_run(tmp_path: Path) -> None:
    with attacking() as on:
        assert outside.kv_events(*on.both, None).verdict is Verdict.NOT_RUN
        assert outside.nvme_files(on.victim, on.prompts, None).verdict is Verdict.NOT_RUN
        missing = tmp_path / "missing"
        assert outside.nvme_files(on.victim, on.prompts, missing).verdict is Verdict.NOT_RUN


# ---- the command


def run(url: str, *more: str) -> int:
    keys = ["--victim-key", "key-v", "--attacker-key", "key-a"]
    return main(["audit", "--url", url, *keys, "--pairs", "6", *more])


@pytest.mark.parametrize(("leak", "status"), [("", 0), ("flush", 1)])
def test_the_command_says_what_leaks(
    leak: str, status: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "audit.json"
    with serving(Fake(leak)) as url:
        assert run(url, "--json", str(file)) == status
    document = json.loads(file.read_text())
    assert document["passed"] == (status == 0)
    rows = {row["attack"]: row["verdict"] for row in document["findings"]}
    assert len(rows) == 24
    assert rows["flush"] == ("LEAK" if leak else "pass")
    assert [row for row in rows if rows[row] == "LEAK"] == ([leak] if leak else [])
    printed = capsys.readouterr().out
    assert all(row in printed for row in rows)


def test_a_server_that_does_not_answer_is_no_pass(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("http://127.0.0.1:1") == 1
    assert "127.0.0.1:1" in capsys.readouterr().err


def test_too_few_pairs_are_wrong_input(capsys: pytest.CaptureFixture[str]) -> None:
    keys = ["--victim-key", "key-v", "--attacker-key", "key-a"]
    assert main(["audit", *keys, "--pairs", "1"]) == 2
    assert "at least 2" in capsys.readouterr().err


def test_a_table_says_what_leaked() -> None:
    findings = [Finding("one", Verdict.LEAK, "[x]"), Finding("two", Verdict.PASS, "fine")]
    assert leaks(findings) == ["one"]
    assert as_document("u", findings)["passed"] is False
    assert as_table(findings, plain=True).row_count == 2
