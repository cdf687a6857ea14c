"""One picture from samples; what the terminal and the commands make of it."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from sglang_ext import cli
from sglang_ext.observe.overview import Sample, overview, samples_of
from sglang_ext.observe.top import screen
from sglang_ext.tenancy.loader import parse_policy

_POLICY = parse_policy(
    "version: 1\ntenants:\n  a: {quota: {hbm: 20%, hard: true}, reserve: {cpu: 1GB}}\n"
    "  s: {isolation: shared, group: team}"
)
_RECENT = {
    "requests": 3,
    "ttft_p50": 0.1,
    "ttft_p99": 12.5,
    "hit_rate": 0.25,
    "hit_rates": [None, 0.0, 0.5, 1.0],
}
_SLOW = {"ended": 1.0, "tenant": "a", "ttft": 0.5, "seconds": 1.0, "prompt": 1234}
_SLOW_ROW = {**_SLOW, "cached": {"hbm": 16, "cpu": 4}, "output": 2}
_SAMPLES = [
    Sample("prompt_tokens_total", {"tenant": "a", "source": "hbm"}, 30),
    Sample("prompt_tokens_total", {"tenant": "a", "source": "computed"}, 10),
    Sample("admissions_skipped_total", {"tenant": "a", "reason": "quota"}, 1),
    Sample("admissions_skipped_total", {"tenant": "a", "reason": "turn"}, 2),
    Sample("generated_tokens_total", {"tenant": "b"}, 5),
    Sample("tier_capacity_tokens", {"tier": "hbm"}, 100),
    Sample("held_tokens", {"owner": "t:a", "tier": "hbm"}, 40),
    Sample("held_tokens", {"owner": "public", "tier": "hbm"}, 60),
    Sample("quota_tokens", {"owner": "t:a", "tier": "hbm"}, 50),
    Sample("evicted_tokens_total", {"owner": "t:a", "tier": "hbm", "reason": "ttl"}, 7),
    Sample("evicted_tokens_total", {"owner": "t:a", "tier": "cpu", "reason": "ttl"}, 8),
    Sample("store_events_total", {"event": "corrupt"}, 1),
]


def _picture() -> dict[str, Any]:
    recent = SimpleNamespace(
        slowest=lambda: [_SLOW_ROW], tenants=lambda: {"a": _RECENT}, service=lambda: _RECENT
    )
    return {"time": 100.0, **overview(_SAMPLES, recent, _POLICY)}


def test_the_picture_of_a_server() -> None:
    picture = _picture()
    a, b = picture["tenants"]
    assert (a["name"], a["prompt"], a["skipped"], a["recent"]) == (
        "a",
        {"hbm": 30, "computed": 10},
        3,
        _RECENT,
    )
    assert (b["name"], b["output"], b["recent"]) == ("b", 5, None)
    (hbm,) = picture["tiers"]
    assert hbm == {"name": "hbm", "capacity": 100, "held": {"t:a": 40, "public": 60}}
    owners = {owner["name"]: owner for owner in picture["owners"]}
    assert owners["t:a"]["evicted"] == {"ttl": 15}
    assert owners["t:a"]["quota"] == {"hbm": 50}
    assert picture["store"] == {"corrupt": 1}
    policy = {row["name"]: row for row in picture["policy"]}
    assert policy["a"]["quota"]["hbm"] == "20%"
    assert policy["a"]["hard"] and not policy["s"]["hard"]
    assert policy["s"]["owner"] == "g:team"
    json.dumps(picture)


def test_the_policy_of_many_tenants_is_cut() -> None:
    many = ", ".join(f"t{number}: {{}}" for number in range(500))
    recent = SimpleNamespace(slowest=list, tenants=dict, service=dict)
    picture = overview([], recent, parse_policy(f"version: 1\ntenants: {{{many}}}"))
    assert len(picture["policy"]) == 200
    assert picture["policy_total"] == 501


def test_no_key_is_in_it() -> None:
    assert "sha256" not in json.dumps(_picture())


def test_only_our_own_metrics_are_read() -> None:
    family = SimpleNamespace
    sample = SimpleNamespace(name="sglang_ext_x_total", labels={"tier": "hbm"}, value=1.0)
    families = [
        family(name="sglang_ext_x", samples=[sample]),
        family(name="sglang:y", samples=[sample]),
    ]
    assert samples_of(families) == [Sample("x_total", {"tier": "hbm"}, 1.0)]


def _text(plain: bool, before: dict[str, Any] | None = None) -> str:
    console = Console(width=160, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(screen(_picture(), before, plain=plain))
    return console.export_text()


def test_plain_tables_are_plain() -> None:
    text = _text(plain=True)
    assert text.isascii()
    rows = [line.split() for line in text.splitlines()]
    assert ["a", "3", "0", "25.0%", "100", "ms", "12.5", "s", "-", "-", "0"] in rows
    assert ["hbm", "100", "100", "100.0%", "public", "60,", "t:a", "40"] in rows
    assert ["a", "500", "ms", "1,000", "ms", "1,234", "20", "2"] in rows


def test_a_terminal_gets_drawings_and_rates() -> None:
    before = _picture()
    before["time"] = 98.0
    before["tenants"][0]["prompt"] = {"hbm": 20}
    text = _text(plain=False, before=before)
    assert "▅█" in text
    (row,) = [line for line in text.splitlines() if line.split()[:1] == ["a"] and "25.0%" in line]
    assert "12.5 s" in row and " 10 " in row


@pytest.fixture
def asked() -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """A stand-in for a server, and what it was asked: (path, authorization)."""
    seen: list[tuple[str, str]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append((self.path, self.headers["authorization"]))
            allowed = self.headers["authorization"] == "Bearer key-admin"
            body = json.dumps(_picture() if allowed else {"error": "needs the admin key"}).encode()
            self.send_response(200 if allowed else 403)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", seen
    server.shutdown()
    thread.join()
    server.server_close()


Asked = tuple[str, list[tuple[str, str]]]


def test_top_once(asked: Asked, capsys: pytest.CaptureFixture[str]) -> None:
    url, seen = asked
    options = ["--url", url, "--key", "key-admin", "--once"]
    assert cli.main(["top", *options, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(_picture()))
    assert cli.main(["top", *options]) == 0
    out = capsys.readouterr().out
    assert out.isascii() and "Slowest" in out
    assert seen == [("/ext/v1/overview", "Bearer key-admin")] * 2


def test_usage_asks_for_a_time(asked: Asked, capsys: pytest.CaptureFixture[str]) -> None:
    url, seen = asked
    given_time = ["--from", "2026-11-01", "--to", "2026-12-01T00:00:00Z"]
    assert cli.main(["usage", "--url", url, "--key", "key-admin", "--csv", *given_time]) == 0
    path = "/ext/v1/usage/export?from=2026-11-01&to=2026-12-01T00%3A00%3A00Z&format=csv"
    assert seen[0][0] == path


@pytest.mark.parametrize("command", [["top", "--once"], ["usage"]])
def test_a_refusal_is_one_line(
    asked: Asked, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    url, _ = asked
    assert cli.main([*command, "--url", url, "--key", "key-a"]) == 1
    assert "needs the admin key" in capsys.readouterr().err
    assert cli.main([*command, "--url", "http://127.0.0.1:1"]) == 1
    assert "127.0.0.1:1" in capsys.readouterr().err
