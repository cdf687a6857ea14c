"""Our routes do what their OpenAPI description says, whatever a client sends."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from fastapi import FastAPI
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from sglang_ext import active, callers, http_routes, pin_routes, policy_routes, session_routes
from sglang_ext.tenancy.routes import Access, access_of
from tests.sglang_ext.live import Server, forget_policy

# What SGLang's handler of errors says of itself.
pytestmark = pytest.mark.filterwarnings("ignore:ORJSONResponse is deprecated")

_CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
_OTHERS = (http_routes, pin_routes, session_routes)
_ADMIN = {"authorization": "Bearer key-admin"}


async def _tokenize(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def _routes() -> list[tuple[str, str]]:
    app = FastAPI()
    for module in (policy_routes, *_OTHERS):
        app.include_router(module.router)
    return [(path, name) for path, item in app.openapi()["paths"].items() for name in item]


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The schema of the routes behind the middleware of a server with one scheduler."""
    forget_policy(monkeypatch)
    server = Server(tmp_path)
    monkeypatch.setattr(callers, "ask_schedulers", server.ask)
    for module in _OTHERS:
        server.app.include_router(module.router)
    for module in (http_routes, pin_routes):
        monkeypatch.setattr(module, "tokenize", _tokenize)
    return schemathesis.openapi.from_asgi("/openapi.json", server.guarded, headers=_ADMIN)


def _try(api: Any, route: tuple[str, str], examples: int, check: Callable[[Any], None]) -> None:
    """Call ``check`` with many cases of one route, right and wrong ones."""
    path, method = route
    operation = api[path][method]
    cases = st.one_of(operation.as_strategy(generation_mode=mode) for mode in GenerationMode)
    profile = settings(
        max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck)
    )
    profile(given(case=cases)(lambda case: check(case)))()


@pytest.mark.parametrize("route", _routes(), ids=str)
def test_every_route_answers_as_described(api: Any, route: tuple[str, str]) -> None:
    def check(case: Any) -> None:
        case.call_and_validate(headers=_ADMIN, checks=_CHECKS)
        assert active.policy().admin_keys, "the operator was shut out"

    _try(api, route, 40, check)


@pytest.mark.parametrize("route", _routes(), ids=str)
def test_no_route_but_its_own_answers_a_tenant(api: Any, route: tuple[str, str]) -> None:
    before = active.policy()

    def check(case: Any) -> None:
        answer = case.call(headers={"authorization": "Bearer key-a"})
        assert answer.status_code == 403 or access_of(route[0]) is Access.TENANT
        assert active.policy() is before

    _try(api, route, 5, check)
