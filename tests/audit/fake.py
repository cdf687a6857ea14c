"""A small server that keeps tenants apart, but for the one leak that a test asks for."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from tests.serving.server import free_port

__all__ = ["Fake", "serving"]

NAMES = {"key-v": "victim", "key-a": "attacker"}
TOKEN_S = 1e-4
"""What computing a token takes where times tell."""
_VOCABULARY = list(range(1000, 3000))


class Fake:
    """Answers as SGLang's native route does. ``leak`` names the one thing that is wrong."""

    def __init__(self, leak: str = "") -> None:
        self.leak = leak
        self.seen: dict[str, list[list[int]]] = {}
        self.running: dict[str, bool] = {}
        self.sessions: dict[str, int] = {}
        self.total = 0
        self.dead = False
        self.last_text = ""
        routes = {
            "/tokenize": self.tokenize,
            "/generate": self.generate,
            "/abort_request": self.abort,
            "/open_session": self.open_session,
            "/close_session": self.close_session,
            "/flush_cache": self.flush,
            "/metrics": self.metrics,
            "/ext/v1/usage": self.usage,
            "/ext/v1/policy": self.policy,
            "/ext/v1/sessions": self.list_sessions,
            "/ext/v1/sessions/{id}": self.one_session,
            "/v1/completions": self.completions,
        }
        methods = ["GET", "POST", "PUT", "DELETE"]
        self.app = Starlette(
            routes=[Route(path, call, methods=methods) for path, call in routes.items()]
        )

    # ---- who asks

    def tenant(self, request: Request) -> str | None:
        key = request.headers.get("authorization", "").removeprefix("Bearer ")
        if not key and self.leak == "no key":
            return "attacker"
        return NAMES.get(key)

    def space(self, request: Request, body: Mapping[str, Any]) -> str:
        """Return whose cache a request uses."""
        tenant = str(self.tenant(request))
        if self.leak == "shared":
            return "everybody"
        if self.leak == "forged body" and "victim" in str(body.get("user")):
            return "victim"
        if self.leak == "forged header" and "victim" in request.headers.get("x-tenant", ""):
            return "victim"
        return tenant

    # ---- generation

    def cached(self, space: str, ids: list[int], remember: bool = True) -> int:
        known = self.seen.setdefault(space, [])
        found = max((_common(ids, other) for other in known), default=0)
        if remember:
            known.append(ids)
        return min(found, len(ids) - 1)

    async def generate(self, request: Request) -> Response:
        tenant = self.tenant(request)
        if tenant is None:
            return _refused(401, "unknown key")
        body = await _body(request)
        if self.leak == "deadly" and (self.dead or "custom_labels" in body):
            self.dead = True
            return _refused(500, "gone")
        if not isinstance(body, dict) or not ("input_ids" in body or "text" in body):
            told = self.last_text if self.leak == "error text" else "nothing"
            return _refused(400, f"expected input_ids or text, found {told}")
        if body.get("rid") in self.running and self.leak == "used id":
            return _refused(400, "this id is used")
        if tenant == "victim" and isinstance(body.get("text"), str):
            self.last_text = body["text"]
        prompts = _prompts(body)
        session = (body.get("session_params") or {}).get("id")
        extra = self.session_tokens(tenant, session)
        if extra is None:
            return _refused(400, "no such session")
        order = self.order(request, body, prompts)
        if body.get("stream"):
            return StreamingResponse(self.stream(request, body, prompts, order))
        hits = [self.cached(self.space(request, body), ids) for ids in prompts]
        self.total += tenant == "victim"
        if session is not None:
            self.sessions[f"{tenant}/{session}"] = len(prompts[0]) + extra
        return JSONResponse(_answer(body, len(prompts[0]) + extra, hits[0], 1))

    def session_tokens(self, tenant: str, session: str | None) -> int | None:
        """Return how many tokens a session continues; None for one that is not there."""
        if session is None:
            return 0
        if self.leak == "stolen session" and tenant == "attacker":
            return self.sessions.get(f"victim/{session}")
        return self.sessions.get(f"{tenant}/{session}")

    def order(self, request: Request, body: Any, prompts: list[list[int]]) -> list[int]:
        places = list(range(len(prompts)))
        if self.leak == "batch order":
            places.sort(key=lambda place: -self.cached("victim", prompts[place], False))
        return places

    async def stream(
        self, request: Request, body: Any, prompts: list[list[int]], order: list[int]
    ) -> AsyncIterator[str]:
        tokens, rid = body["sampling_params"]["max_new_tokens"], str(body.get("rid"))
        self.running[rid] = True
        for place in order:
            ids = prompts[place]
            hits = self.cached(self.space(request, body), ids)
            if self.leak == "time":
                await asyncio.sleep(TOKEN_S * (len(ids) - self.cached("victim", ids, False)))
            for number in range(1, tokens + 1):
                aborted = not self.running.get(rid, False)
                answer = _answer(body, len(ids), hits, number, tokens, aborted)
                yield f"data: {json.dumps({**answer, 'index': place})}\n\n"
                if aborted:
                    break
                await asyncio.sleep(self.gap(ids))
        self.running.pop(rid, None)
        yield "data: [DONE]\n\n"

    def gap(self, ids: list[int]) -> float:
        slow = self.leak == "gap" and not self.cached("victim", ids, False)
        return 0.006 if slow else 0.002

    async def completions(self, request: Request) -> Response:
        body = await _body(request)
        if "prompt" not in body:
            return _refused(400, "expected a prompt")
        ids = [hash(word) for word in body["prompt"].split()]
        space = "everybody" if self.leak == "one route" else str(self.tenant(request))
        details = {"cached_tokens": self.cached(space, ids)}
        return JSONResponse({"usage": {"prompt_tokens_details": details}})

    async def tokenize(self, request: Request) -> Response:
        return JSONResponse({"tokens": _VOCABULARY})

    # ---- what belongs to one tenant

    async def abort(self, request: Request) -> Response:
        body = await _body(request)
        allowed = self.leak == "abort" or self.tenant(request) == "victim"
        if allowed and body.get("rid") in self.running:
            self.running[body["rid"]] = False
        if self.leak == "abort all" and body.get("abort_all"):
            self.running = dict.fromkeys(self.running, False)
        return JSONResponse({})

    async def open_session(self, request: Request) -> Response:
        body = await _body(request)
        self.sessions[f"{self.tenant(request)}/{body['session_id']}"] = 0
        return JSONResponse(body["session_id"])

    async def close_session(self, request: Request) -> Response:
        id = (await _body(request))["session_id"]
        whose = "victim" if self.leak == "closed session" else self.tenant(request)
        self.sessions.pop(f"{whose}/{id}", None)
        return JSONResponse({})

    async def list_sessions(self, request: Request) -> Response:
        mine = [
            id
            for id in self.sessions
            if self.leak == "listed session" or id.startswith(f"{self.tenant(request)}/")
        ]
        return JSONResponse({"sessions": mine})

    async def one_session(self, request: Request) -> Response:
        there = f"victim/{request.path_params['id']}" in self.sessions
        told = there and self.leak == "told session"
        return _refused(403 if told else 404, "no such session")

    async def flush(self, request: Request) -> Response:
        if self.leak != "flush":
            return _refused(403, "for the operator")
        self.seen.clear()
        return PlainTextResponse("flushed")

    async def metrics(self, request: Request) -> Response:
        if self.leak == "metrics":
            return PlainTextResponse(f"requests_total {self.total}\n")
        if self.leak == "readable metrics":
            return PlainTextResponse("up 1\n")
        return _refused(403, "for the operator")

    async def usage(self, request: Request) -> Response:
        names = list(NAMES.values()) if self.leak == "usage" else [self.tenant(request)]
        return JSONResponse({"tenants": [{"tenant": name} for name in names]})

    async def policy(self, request: Request) -> Response:
        reads = self.leak == "policy" and request.method == "GET"
        return JSONResponse({"tenants": {}}) if reads else _refused(403, "for the operator")


def _common(one: list[int], other: list[int]) -> int:
    count = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        count += 1
    return count


def _prompts(body: Mapping[str, Any]) -> list[list[int]]:
    ids = body.get("input_ids")
    if ids is None:
        return [[hash(word) for word in str(body["text"]).split()] or [0]]
    return ids if ids and isinstance(ids[0], list) else [ids]


def _answer(
    body: Any, prompt: int, hits: int, number: int, tokens: int = 1, aborted: bool = False
) -> dict[str, Any]:
    reason = {"type": "abort"} if aborted else {"type": "length"} if number == tokens else None
    meta = {
        "id": body.get("rid", "r"),
        "prompt_tokens": prompt,
        "cached_tokens": hits,
        "completion_tokens": number,
        "finish_reason": reason,
    }
    return {"text": "x", "meta_info": meta}


def _refused(status: int, why: str) -> Response:
    return JSONResponse({"error": why}, status_code=status)


async def _body(request: Request) -> Any:
    try:
        return await request.json()
    except ValueError:
        return None


@contextmanager
def serving(fake: Fake) -> Iterator[str]:
    """Yield the address of a fake that listens on loopback."""
    port = free_port()
    server = uvicorn.Server(
        uvicorn.Config(fake.app, host="127.0.0.1", port=port, log_level="error")
    )
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        thread.join(0.01)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(10)
