"""Who may flush what through HTTP: the operator everything, a tenant its own."""

from pathlib import Path
from typing import Any

import pytest

from sglang_ext import callers, http_routes
from tests.sglang_ext.live import Server, forget_policy

TEXT = [7] * 16


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Server:
    """A tree in which tenant a has two texts, and the group of b and c one."""
    forget_policy(monkeypatch)
    server = Server(tmp_path)

    async def tokenize(text: str) -> list[int]:
        return [int(word) for word in text.split()]

    monkeypatch.setattr(callers, "ask_schedulers", server.ask)
    monkeypatch.setattr(http_routes, "tokenize", tokenize)
    server.app.include_router(http_routes.router)
    rig = server.ranks[0].rig
    rig.insert(TEXT, "t:a")
    rig.insert([8] * 16, "t:a")
    rig.insert(TEXT, "g:team")
    return server


def flush(server: Server, key: str, body: dict[str, Any]) -> int:
    return server.call("POST", "/ext/v1/flush", key, json=body).status_code


def hits(server: Server) -> tuple[int, int, int]:
    """Return what is cached of the two texts of a, and of the group's."""
    rig = server.ranks[0].rig
    return rig.hit(TEXT, "t:a"), rig.hit([8] * 16, "t:a"), rig.hit(TEXT, "g:team")


@pytest.mark.parametrize("body", [{}, {"tenant": "a"}], ids=str)
def test_a_tenant_flushes_itself_and_nobody_else(server: Server, body: dict[str, Any]) -> None:
    assert flush(server, "key-a", body) == 200
    assert hits(server) == (0, 0, 16)
    assert '"by": "tenant:a"' in server.audit.read_text()


def test_a_tenant_flushes_one_prefix_of_its_own(server: Server) -> None:
    assert flush(server, "key-a", {"prefix": "7 " * 16}) == 200
    assert hits(server) == (0, 16, 16)


def test_a_member_flushes_its_group(server: Server) -> None:
    assert flush(server, "key-b", {}) == 200
    assert hits(server) == (16, 16, 0)


@pytest.mark.parametrize(
    "body",
    [
        {"tenant": "b"},
        {"tenant": "nobody"},
        {"tenant": None},
        {"tenant": ["b"]},
        {"all": True},
        {"all": False},
        {"tenant": "a", "all": True},
        {"tenant": "b", "prefix": TEXT},
        {"tenant": "system"},
    ],
    ids=str,
)
def test_whatever_reaches_further_needs_the_admin_key(server: Server, body: dict[str, Any]) -> None:
    answers = [server.call("POST", "/ext/v1/flush", "key-a", json=body)]
    answers.append(server.call("POST", "/ext/v1/flush", "key-a", json={"tenant": "no-such"}))
    assert {answer.status_code for answer in answers} == {403}
    assert len({answer.text for answer in answers}) == 1, "it tells who exists"
    assert hits(server) == (16, 16, 16)


def test_the_operator_flushes_whom_it_names_and_all(server: Server) -> None:
    assert flush(server, "key-admin", {}) == 400
    assert flush(server, "key-admin", {"tenant": "b"}) == 200
    assert hits(server) == (16, 16, 0)
    assert flush(server, "key-admin", {"all": True}) == 200
    assert hits(server) == (0, 0, 0)
