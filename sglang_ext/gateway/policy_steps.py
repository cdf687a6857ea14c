"""A change of the policy in one of several engines: step by step, as its gateway asks.

    check    here and in every rank of this engine: nothing changes
    apply    every rank, then the keys
    remove   requests, sessions and pages of who is gone

The gateway changes all engines or none, so it needs the steps apart. Only it can call this route.
A question to it says who this is, for a gateway that did not start this engine.
"""

import asyncio
import secrets
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, HTTPException, Request
from pydantic import BaseModel

from sglang_ext import active
from sglang_ext.errors import PolicyError, SglangExtError
from sglang_ext.leavers import Leavers, Leaving, Requests
from sglang_ext.live_policy import Ask
from sglang_ext.tenancy.auth import Callers
from sglang_ext.tenancy.changes import check_live
from sglang_ext.tenancy.document import version_of
from sglang_ext.tenancy.loader import build_policy
from sglang_ext.tenancy.policy import Policy

__all__ = ["OWN_SECTIONS", "STEP_ROUTE", "PolicySteps", "Step", "router"]

STEP_ROUTE = "/ext/v1/engine/policy"

OWN_SECTIONS = ("engine", "tiers", "metrics")
"""Of the policy, what is about a machine and decided at its start."""

router = APIRouter(include_in_schema=False)


class Step(BaseModel):
    """One step. ``document``: of ``check``; the other two go on with it."""

    step: Literal["check", "apply", "remove"]
    document: dict[str, Any] = {}
    requests: Requests = Requests.FINISH
    seconds: float = Leaving.seconds


class PolicySteps:
    """Where a change stands. The gateway makes one at a time."""

    def __init__(self, callers: Callers, ask: Ask, leavers: Leavers) -> None:
        self._callers = callers
        self._ask = ask
        self._leavers = leavers
        self._next: Policy | None = None
        self._before = active.policy()
        self._run = secrets.token_hex(8)
        self._versioned: Policy | None = None
        self._version = ""

    def own(self) -> dict[str, Any]:
        """Return this start of the server, the policy in force, and what it says of the machine."""
        policy = active.policy()
        if policy is not self._versioned:
            self._versioned, self._version = policy, version_of(policy.document)
        own = {name: policy.document[name] for name in OWN_SECTIONS if name in policy.document}
        return {"run": self._run, "version": self._version, "own": own}

    async def check(self, document: Mapping[str, Any]) -> None:
        """Raise SglangExtError where this policy cannot be put in force here."""
        self._next = None
        # A thousand tenants take half a second, beside the requests.
        new = await asyncio.to_thread(build_policy, document)
        check_live(active.policy(), new)
        try:
            await self._ask("policy_check", {"document": document})
        except ValueError as error:
            raise PolicyError("", str(error)) from error
        self._next = new

    async def apply(self) -> int:
        """Put in force what was checked; return how many waiting requests it could not keep."""
        new = self._next
        if new is None:
            raise PolicyError("", "nothing was checked that could be applied")
        answers = await self._ask("policy_apply", {"version": version_of(new.document)})
        self._before, self._next = active.policy(), None
        active.use(new)
        self._callers.use(new)
        return sum(answer["refused_requests"] for answer in answers)

    async def remove(self, leaving: Leaving) -> dict[str, Any]:
        """See out who is no longer in the policy."""
        return await self._leavers.remove(self._before, active.policy(), leaving)


def _steps(request: Request) -> PolicySteps:
    steps: PolicySteps = request.app.state.policy_steps
    return steps


@router.get(STEP_ROUTE)
async def own(steps: Annotated[PolicySteps, Depends(_steps)]) -> dict[str, Any]:
    """Say who this is."""
    return steps.own()


@router.post(STEP_ROUTE)
async def take(step: Step, steps: Annotated[PolicySteps, Depends(_steps)]) -> dict[str, Any]:
    """Take one step; 400 says why not."""
    try:
        if step.step == "check":
            await steps.check(step.document)
            return {}
        if step.step == "apply":
            return {"refused_requests": await steps.apply()}
        return await steps.remove(Leaving(step.requests, step.seconds))
    except SglangExtError as error:
        raise HTTPException(400, str(error)) from error
