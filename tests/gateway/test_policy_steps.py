"""An engine takes another policy in the gateway's steps, and nothing before the second."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from sglang_ext import active
from sglang_ext.errors import PolicyError
from sglang_ext.gateway.policy_steps import PolicySteps
from sglang_ext.leavers import Leavers, Leaving, Requests
from sglang_ext.tenancy.auth import Callers
from sglang_ext.tenancy.keys import digest
from sglang_ext.tenancy.loader import build_policy
from sglang_ext.types import TenantId

BEFORE = {"version": 1, "tenants": {"a": {"api_keys": [digest("key-a")]}, "b": {}}}
AFTER = {"version": 1, "tenants": {"a": {"api_keys": [digest("key-new")]}}}


class Ranks:
    """What the schedulers were asked; ``refuses``: what they say to a check."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.refuses = ""

    async def ask(self, name: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        self.asked.append(name)
        if name == "policy_check" and self.refuses:
            raise ValueError(self.refuses)
        return [{"refused_requests": 2, "freed": {"hbm": 16}, "left": {"hbm": 0}}]


@pytest.fixture
def callers() -> Iterator[Callers]:
    kept = list(active._in_force)
    active.use(build_policy(BEFORE))
    yield Callers(active.policy())
    active._in_force[:] = kept


def steps(callers: Callers, ranks: Ranks) -> PolicySteps:
    leavers = Leavers(ranks.ask, lambda tenant: [], lambda tenant: 3)
    return PolicySteps(callers, ranks.ask, leavers)


def known(callers: Callers, key: str) -> bool:
    return callers.read().keys.lookup(key) is not None


def test_the_three_steps(callers: Callers) -> None:
    async def test() -> None:
        ranks = Ranks()
        taken = steps(callers, ranks)
        await taken.check(AFTER)
        assert ranks.asked == ["policy_check"]
        assert known(callers, "key-a")
        assert TenantId("b") in active.policy().tenants
        assert await taken.apply() == 2
        assert not known(callers, "key-a")
        assert known(callers, "key-new")
        assert TenantId("b") not in active.policy().tenants
        gone = await taken.remove(Leaving(Requests.ABORT))
        assert gone["aborted_requests"] == {"b": 3}
        assert gone["owners"] == {"t:b": {"freed": {"hbm": 16}, "left": {"hbm": 0}}}

    asyncio.run(test())


def test_what_is_refused_changes_nothing(callers: Callers) -> None:
    async def test() -> None:
        ranks = Ranks()
        taken = steps(callers, ranks)
        ranks.refuses = "tenants.a.reserve.hbm: too much"
        with pytest.raises(PolicyError, match="too much"):
            await taken.check(AFTER)
        with pytest.raises(PolicyError, match="page_size"):
            await taken.check({**AFTER, "engine": {"page_size": 64}})
        with pytest.raises(PolicyError, match="nothing was checked"):
            await taken.apply()
        assert known(callers, "key-a")
        assert "policy_apply" not in ranks.asked

    asyncio.run(test())


def test_a_checked_policy_is_applied_once(callers: Callers) -> None:
    async def test() -> None:
        taken = steps(callers, Ranks())
        await taken.check(AFTER)
        await taken.apply()
        with pytest.raises(PolicyError, match="nothing was checked"):
            await taken.apply()

    asyncio.run(test())
