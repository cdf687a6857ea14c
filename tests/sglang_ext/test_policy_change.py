"""Another policy where there are lower tiers: their limits change, and who goes leaves them all."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_ext import active
from sglang_ext.patches.scheduling import TenantScheduling
from sglang_ext.policy_change import policy_operations
from sglang_ext.residency import Residency, lifetimes
from sglang_ext.tenancy.document import version_of
from sglang_ext.tenancy.yaml_text import read_yaml
from sglang_ext.types import Owner, Tier
from tests.sglang_ext.live import forget_policy
from tests.sglang_ext.tiered import TieredRig, tiered

TIERS = "version: 1\ntiers: {load: measured, cpu: {size: 1GB}, nvme: {size: 1GB, path: /unused}}\n"
OLD = TIERS + "tenants: {a: {}, b: {}}\n"
TEXT = list(range(1, 17))


class Scheduler:
    """A scheduler's process over a tree with three tiers."""

    def __init__(self, rig: TieredRig) -> None:
        self.rig = rig
        self.tenant_scheduling = TenantScheduling(active.hand_over(OLD), lambda: None)
        rig.cache.residency = Residency(rig.cache, lifetimes(active.policy()))
        self._scheduler = SimpleNamespace(
            tree_cache=rig.cache,
            tenant_scheduling=self.tenant_scheduling,
            waiting_queue=[],
        )
        self._operations = policy_operations()

    def run(self, name: str, **body: Any) -> dict[str, Any]:
        return self._operations[name](self._scheduler, body)

    def change(self, text: str, load: str = "measured") -> None:
        document = read_yaml(TIERS.replace("measured", load) + text)
        assert isinstance(document, dict)
        self.run("policy_check", document=document)
        self.run("policy_apply", version=version_of(document))


@pytest.fixture
def scheduler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scheduler]:
    forget_policy(monkeypatch)
    with tiered(tmp_path) as rig:
        yield Scheduler(rig)


def test_limits_of_every_tier_change(scheduler: Scheduler) -> None:
    scheduler.change("tenants: {a: {quota: {hbm: 8tok, cpu: 12tok, nvme: 16tok, hard: true}}}")
    cache = scheduler.rig.cache
    owner = Owner("t:a")
    assert [cache.limits(owner, tier).quota for tier in (Tier.HBM, Tier.CPU)] == [8, 12]
    assert cache.store.limits(owner).quota == 16
    usage = scheduler.run("usage", tenants=["a", "b"])["tenants"]
    assert [row["quota_tokens"] for row in usage["a"]["tiers"].values()] == [8, 12, 16]
    assert list(usage) == ["a"], "b is gone"


def test_a_hard_quota_of_the_disk_holds_at_once(scheduler: Scheduler) -> None:
    cache, owner = scheduler.rig.cache, Owner("t:a")
    scheduler.rig.write(TEXT)
    assert cache.store.held_bytes()[owner] > 0
    scheduler.change("tenants: {a: {quota: {nvme: 0tok, hard: true}}}")
    assert cache.store.held_bytes().get(owner, 0) == 0


def test_times_change_for_pages_that_are_there(scheduler: Scheduler) -> None:
    rig = scheduler.rig
    rig.write(TEXT)
    scheduler.change("tenants: {a: {ttl: {hbm: 1s, cpu: 2s, mode: strict}}, b: {}}")
    rig.later(1500)
    rig.later(200)
    held = [rig.cache.ledger.usage(Owner("t:a"), tier).tokens for tier in (Tier.HBM, Tier.CPU)]
    assert held == [0, len(TEXT)]


def test_that_everything_is_loaded_may_be_asked_for_and_taken_back(scheduler: Scheduler) -> None:
    worth = scheduler.rig.cache.worth
    for load in ("always", "measured"):
        scheduler.change("tenants: {a: {}, b: {}}", load)
        assert worth.always == (load == "always")


def test_who_goes_leaves_every_tier(scheduler: Scheduler) -> None:
    for owner in ("t:a", "t:b"):
        scheduler.rig.write(TEXT, owner)
    usage = scheduler.run("usage", tenants=["a"])["tenants"]["a"]["tiers"]
    assert {tier: row["held_tokens"] > 0 for tier, row in usage.items()} == {
        "hbm": True,
        "cpu": True,
        "nvme": True,
    }
    answer = scheduler.run("remove_owner", owner="t:a")
    assert answer["freed"]["hbm_tokens"] == answer["freed"]["cpu_tokens"] == len(TEXT)
    assert answer["freed"]["nvme_bytes"] > 0
    assert answer["left"] == {"hbm_tokens": 0, "cpu_tokens": 0, "nvme_bytes": 0}
    other = scheduler.run("usage", tenants=["b"])["tenants"]["b"]["tiers"]
    assert all(row["held_tokens"] > 0 for row in other.values())


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("tenants: {a: {reserve: {cpu: 1ktok}}}", "reserve.cpu: 1ktok is 1000 tokens"),
        ("tenants: {a: {reserve: {nvme: 90Mtok}}}", "reserve.nvme: 90Mtok is"),
        ("tenants: {a: {encrypt: true}}", "tiers.nvme.master_key: missing"),
    ],
)
def test_what_does_not_fit_a_lower_tier_is_refused(
    scheduler: Scheduler, text: str, problem: str
) -> None:
    before = active.policy()
    with pytest.raises(ValueError, match=problem):
        scheduler.change(text)
    assert active.policy() is before
    assert scheduler.tenant_scheduling.policy is before
