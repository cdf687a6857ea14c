"""How an engine of another machine joins: asked who it is, then told the policy in force.

A node has its own pools, disk and page settings in its own file; whose keys are whose is the
gateway's to say. What cannot change in a running server keeps it out, with the reason: public
prefixes, say, that are others there.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from sglang_ext import active
from sglang_ext.errors import ServerError, SglangExtError
from sglang_ext.gateway.fan_out import FanOut
from sglang_ext.gateway.plan import narrowed
from sglang_ext.gateway.policy_steps import OWN_SECTIONS, STEP_ROUTE
from sglang_ext.gateway.supervisor import Engine
from sglang_ext.tenancy.policy import Policy

__all__ = ["Joining", "document_for"]

logger = logging.getLogger(__name__)

_SECONDS = 5.0
_CHANGE_S = 30.0


def document_for(engine: Engine, policy: Policy, engines: Sequence[Engine]) -> dict[str, Any]:
    """Return the policy of one engine; a node's is about its own machine where that matters."""
    document = narrowed(policy, engine.spec, [one.spec for one in engines])
    if not engine.spec.url:
        return document
    kept = {name: value for name, value in document.items() if name not in OWN_SECTIONS}
    return {**kept, **engine.own}


class Joining:
    """Watches over nodes. A node that has joined serves the policy that is in force here.

    It is told again when it started again, when its own file was read again, and when the policy
    here is another one.
    """

    def __init__(self, engines: Sequence[Engine], fan_out: FanOut) -> None:
        self._engines = engines
        self._fan_out = fan_out
        self._found: dict[str, dict[str, Any]] = {}
        self._policies: dict[str, Policy] = {}

    async def serves(self, node: Engine) -> bool:
        """Tell whether a node answers and has the policy in force, which it is given if not."""
        try:
            await self._see(node)
        except SglangExtError as error:
            if str(error) != node.problem:
                logger.warning("node %s does not serve: %s", node.spec.name, error)
            node.problem = str(error)
            return False
        node.problem = None
        return True

    async def _see(self, node: Engine) -> None:
        found = await self._ask(node, "GET", None, _SECONDS)
        if not isinstance(found.get("own"), dict):
            raise ServerError(f"{node.url} answered, and not as a node of this release does")
        name, policy = node.spec.name, active.policy()
        if self._policies.get(name) is policy and self._found.get(name) == found:
            return
        if self._found.get(name, {}).get("run") != found.get("run"):
            node.life.started()
        node.own = found["own"]
        for step in (
            {"step": "check", "document": document_for(node, policy, self._engines)},
            {"step": "apply"},
            {"step": "remove"},
        ):
            await self._ask(node, "POST", step, _CHANGE_S)
        self._found[name] = await self._ask(node, "GET", None, _SECONDS)
        self._policies[name] = policy

    async def _ask(
        self, node: Engine, method: str, step: Mapping[str, Any] | None, seconds: float
    ) -> dict[str, Any]:
        body = None if step is None else json.dumps(step).encode()
        answer = await self._fan_out.ask(node, method, STEP_ROUTE, body=body, seconds=seconds)
        data = answer.json() if answer.status in (200, 400) else None
        if answer.status == 200 and isinstance(data, dict):
            return data
        raise ServerError(_reason(node, answer.status, data))


def _reason(node: Engine, status: int, data: Any) -> str:
    if isinstance(data, dict) and data.get("message"):
        return str(data["message"])
    advice = "is it started with --gateway-secret and the secret of this gateway?"
    return f"{node.url} answered {status}; {advice if status in (401, 403, 404) else 'see its log'}"
