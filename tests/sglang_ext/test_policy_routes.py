"""The routes about policy, tenants and usage: what they answer, and to whom."""

import json
from pathlib import Path
from typing import Any

import pytest

from sglang_ext import active
from sglang_ext.tenancy.document import version_of
from sglang_ext.tenancy.keys import digest
from sglang_ext.tenancy.loader import MAX_BYTES
from sglang_ext.types import TenantId
from tests.sglang_ext.live import TEXT, Server, forget_policy

# What SGLang's handler of errors says of itself.
pytestmark = pytest.mark.filterwarnings("ignore:ORJSONResponse is deprecated")


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Server:
    forget_policy(monkeypatch)
    return Server(tmp_path, ranks=2)


def document() -> dict[str, Any]:
    return json.loads(json.dumps(active.policy().document))


def test_the_policy_is_shown_without_digests(server: Server) -> None:
    answer = server.call("GET", "/ext/v1/policy")
    shown = answer.json()["policy"]
    assert shown["tenants"]["a"] == {"api_keys": [digest("key-a")[:15] + "..."]}
    assert digest("key-a") not in answer.text
    assert answer.headers["etag"] == f'"{answer.json()["version"]}"'


def test_json_and_yaml_mean_the_same(server: Server) -> None:
    wanted = {**document(), "metrics": {"public": True}}
    first = server.call("PUT", "/ext/v1/policy", json=wanted).json()
    text = TEXT + "metrics: {public: true}\n"
    second = server.call("PUT", "/ext/v1/policy", content=text).json()
    assert first["version"] == second["version"] == version_of(wanted)
    assert second["changes"] == []


@pytest.mark.parametrize("tag", ['"{}"', "{}", 'W/"{}"', "*"])
def test_a_change_of_the_version_that_was_seen(server: Server, tag: str) -> None:
    seen = server.call("GET", "/ext/v1/tenants/a").json()["version"]
    headers = {"if-match": tag.format(seen)}
    answer = server.call("PUT", "/ext/v1/tenants/a", json={"weight": 2}, headers=headers)
    assert answer.status_code == 200
    again = server.call("PUT", "/ext/v1/tenants/a", json={"weight": 3}, headers=headers)
    assert again.status_code == (200 if tag == "*" else 412)


def test_a_tenant_keeps_its_keys_unless_others_are_given(server: Server) -> None:
    server.call("PUT", "/ext/v1/tenants/a", json={"weight": 2})
    assert document()["tenants"]["a"] == {"api_keys": [digest("key-a")], "weight": 2}
    until = {"key": digest("key-a"), "until": "2999-01-01T00:00:00Z"}
    server.call("PUT", "/ext/v1/tenants/a", json={"api_keys": [until, digest("key-a2")]})
    for key in ("key-a", "key-a2"):
        assert server.call("GET", "/ext/v1/usage", key).status_code == 200
    server.call("PUT", "/ext/v1/tenants/a", json={"api_keys": []})
    assert server.call("GET", "/ext/v1/usage", "key-a2").status_code == 401


@pytest.mark.parametrize("method", ["GET", "DELETE"])
@pytest.mark.parametrize("name", ["nobody", "system"])
def test_no_such_tenant(server: Server, method: str, name: str) -> None:
    assert server.call(method, f"/ext/v1/tenants/{name}").status_code == 404


@pytest.mark.parametrize(
    ("method", "path", "request_", "problem"),
    [
        ("PUT", "/ext/v1/tenants/system", {"json": {}}, "reserved"),
        ("PUT", "/ext/v1/tenants/a%20b", {"json": {}}, "a name of 1 to 64"),
        ("PUT", "/ext/v1/tenants/z", {"json": {"api_keys": [digest("key-a")]}}, "the same key"),
        ("PUT", "/ext/v1/policy", {"content": b"\xff"}, "UTF-8"),
        ("PUT", "/ext/v1/policy", {"content": b"version: 1"}, "admin_keys: none"),
        ("PUT", "/ext/v1/policy", {"json": {"version": 1}}, "admin_keys: none"),
        ("PUT", "/ext/v1/policy", {"json": []}, "a mapping"),
        ("PUT", "/ext/v1/policy", {"content": b""}, "the file is empty"),
    ],
)
def test_refused(
    server: Server, method: str, path: str, request_: dict[str, Any], problem: str
) -> None:
    before = active.policy()
    answer = server.call(method, path, **request_)
    assert answer.status_code == 400
    assert problem in answer.json()["message"]
    assert active.policy() is before


def test_a_body_is_bounded(server: Server) -> None:
    answer = server.call("PUT", "/ext/v1/policy", content=b"#" * (MAX_BYTES + 1))
    assert answer.status_code == 413


def test_what_the_next_start_could_not_read_is_refused(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sglang_ext.tenancy.loader.MAX_BYTES", len(TEXT) + 100)
    before = active.policy()
    answer = server.call("PUT", "/ext/v1/tenants/z", json={"api_keys": [digest("1"), digest("2")]})
    assert answer.status_code == 400
    assert "too large" in answer.json()["message"]
    assert active.policy() is before


@pytest.mark.parametrize("seconds", ["-1", "301", "nan", "x"])
def test_a_wait_is_bounded(server: Server, seconds: str) -> None:
    answer = server.call("DELETE", f"/ext/v1/tenants/a?timeout={seconds}")
    assert answer.status_code == 400
    assert TenantId("a") in active.policy().tenants


def test_usage_of_all_replicas_together(server: Server) -> None:
    server.ranks[0].rig.insert(list(range(30)), "t:a")
    server.ranks[1].rig.insert(list(range(20)), "t:a")
    server.ranks[1].rig.insert(list(range(10)), "g:team")
    body = {"quota": {"hbm": "100tok", "hard": True}, "reserve": {"hbm": "50tok"}}
    server.call("PUT", "/ext/v1/tenants/a", json=body)
    assert server.call("GET", "/ext/v1/usage", "key-a").json() == {
        "tenants": {
            "a": {
                "owner": "t:a",
                "sessions": 0,
                "tiers": {
                    "hbm": {
                        "held_tokens": 50,
                        "quota_tokens": 200,
                        "hard": True,
                        "reserve_tokens": 100,
                    }
                },
            }
        }
    }
    (b,) = server.call("GET", "/ext/v1/usage", "key-b").json()["tenants"].items()
    assert (b[0], b[1]["owner"], b[1]["tiers"]["hbm"]["held_tokens"]) == ("b", "g:team", 10)
    everybody = server.call("GET", "/ext/v1/usage").json()["tenants"]
    assert set(everybody) == {"a", "b", "c", "system"}
    assert everybody["system"]["tiers"]["hbm"]["quota_tokens"] is None


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/ext/v1/policy"),
        ("PUT", "/ext/v1/policy"),
        ("GET", "/ext/v1/tenants/a"),
        ("PUT", "/ext/v1/tenants/a"),
        ("DELETE", "/ext/v1/tenants/a"),
        ("GET", "/ext/v1/usage/"),
        ("GET", "/openapi.json"),
    ],
)
def test_only_the_operator_may(server: Server, method: str, path: str) -> None:
    assert server.call(method, path, "key-a").status_code == 403
    assert server.call(method, path, "key-nobody").status_code == 401
