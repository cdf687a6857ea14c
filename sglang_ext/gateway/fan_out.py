"""Asks several engines the same, and makes one answer of theirs."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from functools import reduce
from typing import Any, NamedTuple

import aiohttp
from yarl import URL

from sglang_ext.errors import ServerError
from sglang_ext.gateway.merge import merged
from sglang_ext.gateway.place import SECRET_HEADER
from sglang_ext.gateway.relay import request_target
from sglang_ext.gateway.supervisor import Engine

__all__ = ["Answer", "FanOut", "passed_on", "together"]

_MOST_BYTES = 2**22
_ONE_FILE = "/ext/v1/usage/export"
_SECONDS = 400.0
"""The longest that a route of ours may take: a tenant's last requests, and what they hold."""


class Answer(NamedTuple):
    """What an engine answered."""

    engine: str
    status: int
    body: bytes
    content_type: str = "application/json"

    def json(self) -> Any:
        """Return the body as data. Raises ServerError where it is none."""
        try:
            return json.loads(self.body)
        except ValueError as error:
            raise ServerError(f"engine {self.engine}: no JSON: {self.body[:200]!r}") from error


class FanOut:
    """Speaks to engines for the gateway itself, with its own key, or for a caller."""

    def __init__(self, session: aiohttp.ClientSession, secret: str) -> None:
        self._session = session
        self._secret = secret

    async def ask(
        self,
        engine: Engine,
        method: str,
        target: str,
        *,
        headers: Mapping[str, str] | None = None,
        body: bytes | None = None,
        seconds: float = _SECONDS,
    ) -> Answer:
        """Send one request; without ``headers`` as the operator.

        Raises ServerError, also where no answer came within ``seconds``.
        """
        own = {"authorization": f"Bearer {self._secret}", "content-type": "application/json"}
        sent = {**(own if headers is None else headers), SECRET_HEADER.decode(): self._secret}
        try:
            async with self._session.request(
                method,
                URL(engine.url + target, encoded=True),
                headers=sent,
                data=body,
                timeout=aiohttp.ClientTimeout(total=seconds),
            ) as answer:
                kind = answer.headers.get("content-type", "application/json")
                return Answer(engine.spec.name, answer.status, await answer.read(), kind)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise ServerError(f"engine {engine.spec.name}: {error or 'no answer'}") from error

    async def all(
        self, engines: Sequence[Engine], method: str, target: str, **request: Any
    ) -> list[Answer]:
        """Ask all at once. Raises ServerError for the first that does not answer."""
        asked = (self.ask(engine, method, target, **request) for engine in engines)
        return list(await asyncio.gather(*asked))

    async def relay(
        self,
        engines: Sequence[Engine],
        scope: MutableMapping[str, Any],
        receive: Callable[[], Awaitable[MutableMapping[str, Any]]],
    ) -> Answer:
        """Ask all of ``engines`` what a client asked, and return their answers as one.

        Raises ServerError where one does not run.
        """
        body = await _whole(receive)
        down = [engine.spec.name for engine in engines if not engine.is_ready]
        if down:
            raise ServerError(f"engine {down[0]} is not running now; nothing was done")
        headers = passed_on(scope)
        question = (scope["method"], request_target(scope))
        if scope["path"] == _ONE_FILE:
            # All engines write into it, and each answers with what is in it once its own is.
            in_turn = [await self.ask(one, *question, headers=headers) for one in engines]
            return _first_refusal(in_turn) or in_turn[-1]
        return together(await self.all(engines, *question, headers=headers, body=body))


_PASSED_ON = ("authorization", "x-api-key", "content-type", "accept", "if-match")


def passed_on(scope: Mapping[str, Any]) -> dict[str, str]:
    """Return the headers of a caller that an engine needs to see."""
    given = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
    return {name: given[name] for name in _PASSED_ON if name in given}


async def _whole(receive: Callable[[], Awaitable[MutableMapping[str, Any]]]) -> bytes:
    body = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if len(body) > _MOST_BYTES:
            raise ServerError(f"the body is too large, expected at most {_MOST_BYTES} bytes")
        if not message.get("more_body", False):
            return body


def together(answers: Sequence[Answer]) -> Answer:
    """Return one answer out of several; the first that refuses speaks for all."""
    refused = _first_refusal(answers)
    if refused is not None:
        return refused
    if any("json" not in answer.content_type for answer in answers):
        return answers[-1]
    whole = reduce(merged, (_named(answer) for answer in answers))
    if isinstance(whole, dict) and isinstance(whole.get("sessions"), list):
        # Conversations come last used first, whichever engine they are in.
        whole["sessions"].sort(key=lambda row: row["idle_seconds"])
    return answers[0]._replace(body=json.dumps(whole).encode())


def _first_refusal(answers: Sequence[Answer]) -> Answer | None:
    return next((answer for answer in answers if answer.status >= 400), None)


def _named(answer: Answer) -> Any:
    """Return an answer in which each rank of a tree says which engine it is of."""
    data = answer.json()
    ranks = data.get("ranks") if isinstance(data, dict) else None
    if not isinstance(ranks, list):
        return data
    return {**data, "ranks": [{"engine": answer.engine, **rank} for rank in ranks]}
