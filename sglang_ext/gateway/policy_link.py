"""Carries a change of the policy to every engine: all of them take it, or none.

Stands where a server with one engine asks its schedulers, so that ``live_policy`` and its routes
are the same for both. An engine that ends in the middle of a change finds the new policy in its
file when it starts again; one of another machine is told when it comes back (see ``joining``).
"""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any

from sglang_ext.errors import ServerError
from sglang_ext.gateway.fan_out import FanOut
from sglang_ext.gateway.joining import document_for
from sglang_ext.gateway.merge import merged
from sglang_ext.gateway.policy_steps import STEP_ROUTE
from sglang_ext.gateway.supervisor import Engine
from sglang_ext.leavers import Leaving
from sglang_ext.tenancy.changes import gone_owners
from sglang_ext.tenancy.loader import build_policy
from sglang_ext.tenancy.policy import Policy
from sglang_ext.types import Owner

__all__ = ["PolicyLink"]


class PolicyLink:
    """Asks engines instead of schedulers, and sees tenants out of all of them.

    ``write`` puts a document into the file that an engine starts with; ``restart`` ends an engine
    that did not take what it had agreed to, so that it starts with that file; ``forget`` drops what
    the gateway itself knows of an owner that is gone.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        fan_out: FanOut,
        write: Callable[[Engine, Mapping[str, Any]], None],
        restart: Callable[[Engine], None],
        forget: Callable[[Owner], None],
    ) -> None:
        self._engines = engines
        self._fan_out = fan_out
        self._write = write
        self._restart = restart
        self._forget = forget
        self._documents: dict[str, dict[str, Any]] = {}
        self._told: list[Engine] = []

    async def ask(self, name: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """Run ``policy_check`` or ``policy_apply`` in every engine.

        Raises ValueError with the words of the one that refused, PolicyError for a tenant that no
        engine could serve.
        """
        if name == "policy_check":
            return await self._check(body["document"])
        return await self._apply()

    async def remove(self, old: Policy, new: Policy, leaving: Leaving) -> dict[str, Any]:
        """See out of every engine who is no longer in the policy; say how much, by tier."""
        for owner in gone_owners(old, new):
            self._forget(owner)
        step = {"step": "remove", "requests": leaving.requests, "seconds": leaving.seconds}
        answers = await asyncio.gather(
            *(self._step(engine, step) for engine in self._engines), return_exceptions=True
        )
        none: dict[str, Any] = {"aborted_requests": {}, "owners": {}}
        # An engine that has just ended holds nothing in memory any more.
        found = [answer for answer in answers if isinstance(answer, dict)]
        return dict(reduce(merged, found, none))

    async def _check(self, document: Mapping[str, Any]) -> list[dict[str, Any]]:
        self._documents = await asyncio.to_thread(self._narrowed, document)
        for engine in self._engines:
            if not engine.is_ready and not engine.spec.url:
                name = engine.spec.name
                raise ValueError(f"engine {name} is not running now; nothing was changed")
        self._told = [engine for engine in self._engines if engine.is_ready]
        checked = (
            self._step(engine, {"step": "check", "document": self._documents[engine.spec.name]})
            for engine in self._told
        )
        try:
            return list(await asyncio.gather(*checked))
        except ServerError as error:
            raise ValueError(str(error)) from error

    def _narrowed(self, document: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        policy = build_policy(document)
        return {
            engine.spec.name: document_for(engine, policy, self._engines)
            for engine in self._engines
        }

    async def _apply(self) -> list[dict[str, Any]]:
        for engine in self._engines:
            await asyncio.to_thread(self._write, engine, self._documents[engine.spec.name])
        return list(await asyncio.gather(*(self._applied(one) for one in self._told)))

    async def _applied(self, engine: Engine) -> dict[str, Any]:
        try:
            return await self._step(engine, {"step": "apply"})
        except ServerError:
            self._restart(engine)
            return {"refused_requests": 0}

    async def _step(self, engine: Engine, step: Mapping[str, Any]) -> dict[str, Any]:
        """Let one engine take a step. Raises ServerError with its words where it refuses."""
        body = json.dumps(step).encode()
        answer = await self._fan_out.ask(engine, "POST", STEP_ROUTE, body=body)
        data: dict[str, Any] = answer.json()
        if answer.status != 200:
            raise ServerError(data.get("message") or f"engine {engine.spec.name}: {data}")
        return data
