"""Which engines a policy asks for, and that none of them is told of another's tenants."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.errors import PolicyError, UnsupportedError
from sglang_ext.gateway.plan import EngineSpec, narrowed, needs_engines, plan_engines
from sglang_ext.tenancy.loader import build_policy
from sglang_ext.tenancy.policy import Policy

DIGEST = "sha256:" + "%064x"


def policy(tenants: dict[str, dict[str, Any]], **more: Any) -> Policy:
    return build_policy({"version": 1, "tenants": tenants, **more})


def bank(gpu: int = 0, **more: Any) -> dict[str, Any]:
    return {"isolation": "dedicated", "gpus": [gpu], **more}


def names(specs: tuple[EngineSpec, ...]) -> list[str]:
    return [spec.name for spec in specs]


def test_one_engine_is_enough_without_dedicated_tenants() -> None:
    assert not needs_engines(policy({"a": {}}), 1)
    assert needs_engines(policy({"a": {}}), 2)
    assert needs_engines(policy({"a": {}, "b": bank()}), 1)


def test_engines_and_their_shares_of_the_machine() -> None:
    specs = plan_engines(policy({"a": {}, "b": bank()}), 2, ())
    assert names(specs) == ["shared-0", "shared-1", "b"]
    assert [(spec.index, spec.count) for spec in specs] == [(0, 3), (1, 3), (2, 3)]
    assert names(plan_engines(policy({"a": {}, "b": bank()}), 1, ())) == ["shared", "b"]
    assert names(plan_engines(policy({"b": bank()}), 1, ())) == ["b"]


def test_gpus_that_no_dedicated_tenant_has_are_divided() -> None:
    specs = plan_engines(policy({"a": {}, "b": bank(6)}), 2, range(8))
    assert [spec.gpus for spec in specs] == [(0, 1, 2), (3, 4, 5), (6,)]


@pytest.mark.parametrize(
    ("tenants", "replicas", "gpus", "error", "words"),
    [
        ({"a": {}, "b": bank(9)}, 1, (0, 1), PolicyError, "tenants.b.gpus: found 9"),
        ({"a": {}, "b": bank(0)}, 1, (0,), UnsupportedError, "0 GPUs are left"),
        ({"a": {}, "shared": bank()}, 1, (), PolicyError, "tenants.shared: the name of"),
        ({"a": {}, "shared-1": bank()}, 2, (), PolicyError, "tenants.shared-1: the name of"),
        ({"a": {}, "gateway": bank()}, 1, (), PolicyError, "tenants.gateway: the name of"),
        (
            {"a": {}, "b": bank(engine={"flags": ["--tp=1", "--port=3"]})},
            *(1, (), PolicyError, r"tenants.b.engine.flags\[1\]: found --port"),
        ),
    ],
)
def test_what_cannot_be_is_refused(
    tenants: dict[str, Any], replicas: int, gpus: tuple[int, ...], error: type, words: str
) -> None:
    with pytest.raises(error, match=words):
        plan_engines(policy(tenants), replicas, gpus)


def test_each_engine_reads_its_own_part() -> None:
    whole = policy(
        {"a": {}, "b": bank(engine={"page_size": 32, "flags": ["--tp", "2"]})},
        engine={"page_size": 16, "kv_cache_dtype": "bf16"},
        unknown_key="b",
        admin_keys=[DIGEST % 9],
        public_prefixes=[{"name": "p", "system": "Hello."}],
        tiers={
            "cpu": {"size": "10GB"},
            "nvme": {"size": "1TB", "path": "/data", "master_key": "env:KEY"},
        },
    )
    specs = plan_engines(whole, 1, ())
    shared, own = (narrowed(whole, spec, specs) for spec in specs)
    assert list(shared["tenants"]) == ["a"]
    assert list(own["tenants"]) == ["b"]
    assert "unknown_key" not in shared
    assert own["unknown_key"] == "b"
    assert shared["engine"] == {"page_size": 16, "kv_cache_dtype": "bf16"}
    assert own["engine"] == {"page_size": 32, "kv_cache_dtype": "bf16"}
    assert "public_prefixes" not in own
    assert shared["tiers"]["cpu"]["size"] == own["tiers"]["cpu"]["size"] == "5000000000B"
    assert shared["tiers"]["nvme"]["path"] == "/data"
    assert own["tiers"]["nvme"]["path"] == str(Path("/data/b.engine"))
    assert own["admin_keys"] == shared["admin_keys"] == [DIGEST % 9]
    # The document in force is not touched.
    assert whole.document["tiers"]["cpu"]["size"] == "10GB"
    assert build_policy(own).engine.page_size == 32


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ({}, {"kv_cache_dtype": "fp8_e4m3", "kv_scales": "shared"}),
        ({"kv_cache_dtype": "fp8_e4m3"}, {"kv_cache_dtype": "fp8_e4m3", "kv_scales": "shared"}),
        ({"kv_cache_dtype": "bf16"}, {"kv_cache_dtype": "bf16"}),
        (
            {"kv_cache_dtype": "fp8_e5m2", "kv_scales": "own"},
            {"kv_cache_dtype": "fp8_e5m2", "kv_scales": "own"},
        ),
    ],
)
def test_a_dedicated_tenant_may_have_another_type_of_page(
    own: dict[str, str], expected: dict[str, str]
) -> None:
    """Scales of the shared type would be refused by an engine of another."""
    engine = {"kv_cache_dtype": "fp8_e4m3", "kv_scales": "shared"}
    whole = policy({"a": {}, "b": bank(engine=own)}, engine=engine)
    specs = plan_engines(whole, 1, ())
    shared, dedicated = (narrowed(whole, spec, specs)["engine"] for spec in specs)
    assert shared == engine
    assert dedicated == expected


def test_a_tenant_that_comes_later_needs_a_shared_engine() -> None:
    specs = plan_engines(policy({"b": bank()}), 1, ())
    with pytest.raises(PolicyError, match="tenants.new: no engine for it runs"):
        narrowed(policy({"b": bank(), "new": {}}), specs[0], specs)


def test_floors_are_those_of_each_engine() -> None:
    floors = {"reserve": {"hbm": "60%"}, "quota": {"hbm": "100%"}}
    whole = policy({"a": floors, "b": bank(**floors)})
    specs = plan_engines(whole, 1, ())
    assert [build_policy(narrowed(whole, spec, specs)) for spec in specs]
    with pytest.raises(PolicyError, match="sums to 120%"):
        policy({"a": floors, "c": floors, "b": bank()})


@given(
    shared=st.sets(st.sampled_from("abcdef"), max_size=6),
    dedicated=st.sets(st.sampled_from("uvwxyz"), max_size=6),
    replicas=st.integers(1, 4),
)
def test_every_tenant_and_key_is_in_its_engines_and_in_no_other(
    shared: set[str], dedicated: set[str], replicas: int
) -> None:
    keys = {name: DIGEST % ord(name) for name in shared | dedicated}
    tenants: dict[str, dict[str, Any]] = {name: {"api_keys": [keys[name]]} for name in shared}
    for gpu, name in enumerate(sorted(dedicated)):
        tenants[name] = bank(gpu, api_keys=[keys[name]])
    whole = policy(tenants)
    specs = plan_engines(whole, replicas, ())
    for spec in specs:
        document = narrowed(whole, spec, specs)
        expected = shared if spec.tenant is None else {spec.tenant}
        assert set(document["tenants"]) == expected
        told = str(document)
        assert {name for name, key in keys.items() if key in told} == expected
        build_policy(document)
    assert len({spec.name for spec in specs}) == len(specs)
    assert [spec.index for spec in specs] == list(range(len(specs)))
