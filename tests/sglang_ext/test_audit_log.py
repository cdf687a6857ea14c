"""What goes into the audit log, and what never does."""

import json
from pathlib import Path
from typing import Any

import pytest
from fastapi import APIRouter, Depends, HTTPException

from sglang_ext import callers, http_routes
from sglang_ext.audit_log import AuditLog, audited
from sglang_ext.tenancy.keys import digest
from sglang_ext.tenancy.routes import Access
from tests.sglang_ext.live import Server, forget_policy

# What SGLang's handler of errors says of itself.
pytestmark = pytest.mark.filterwarnings("ignore:ORJSONResponse is deprecated")

_ADMIN = digest("key-admin")[:15]


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Server:
    forget_policy(monkeypatch)
    server = Server(tmp_path)
    monkeypatch.setattr(callers, "ask_schedulers", server.ask)
    server.app.include_router(http_routes.router)
    return server


def lines(server: Server) -> list[dict[str, Any]]:
    return [json.loads(line) for line in server.audit.read_text().splitlines()]


def test_a_flush_is_noted_with_what_it_freed(server: Server) -> None:
    server.ranks[0].rig.insert(list(range(10)), "t:a")
    assert server.call("POST", "/ext/v1/flush", json={"tenant": "a"}).status_code == 200
    (line,) = lines(server)
    assert (line["by"], line["action"]) == (_ADMIN, "POST /ext/v1/flush")
    assert (line["outcome"], line["of"]) == ("done", "a")
    assert line["ranks"][0]["freed"]["hbm_tokens"] == 10


def test_what_was_refused_is_noted_without_its_words(server: Server) -> None:
    body = {"tenant": "my secret prompt"}
    assert server.call("POST", "/ext/v1/flush", json=body).status_code == 400
    assert lines(server)[0]["outcome"] == "refused: 400"
    assert "secret" not in server.audit.read_text()


def test_a_question_is_not_noted(server: Server) -> None:
    assert server.call("GET", "/ext/v1/tree").status_code == 200
    assert not server.audit.exists()


def test_a_tenant_is_named_and_a_failure_is_noted(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sglang_ext.tenancy.auth.access_of", lambda path: Access.TENANT)
    router = APIRouter(dependencies=[Depends(audited)])

    @router.post("/own/{how}")
    async def own(how: str) -> None:
        if how == "fail":
            raise RuntimeError("broken")
        if how == "refuse":
            raise HTTPException(409, "no")

    server.app.include_router(router)
    server.call("POST", "/own/x", "key-a")
    server.call("POST", "/own/refuse", "key-a")
    with pytest.raises(RuntimeError, match="broken"):
        server.call("POST", "/own/fail", "key-b")
    rows = [(line["by"], line["outcome"]) for line in lines(server)]
    assert rows == [("tenant:a", "done"), ("tenant:a", "refused: 409"), ("tenant:b", "failed")]


def test_a_line_is_one_line_whatever_is_in_it(tmp_path: Path) -> None:
    log = AuditLog(tmp_path / "audit")
    log.write("a\nb", "x", "done", path="\u2028\ud800", number=1)
    log.write("c", "x", "done")
    first, second = (tmp_path / "audit").read_text("ascii").splitlines()
    assert json.loads(first)["by"] == "a\nb"
    assert json.loads(second)["by"] == "c"
