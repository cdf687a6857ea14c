"""Rules between fields."""

import pytest

from sglang_ext.errors import PolicyError
from sglang_ext.tenancy.loader import parse_policy
from sglang_ext.tenancy.policy import Policy
from sglang_ext.types import TenantId

DIGEST_A = "sha256:" + "a" * 64
DIGEST_B = "sha256:" + "b" * 64
DISK = "tiers: {cpu: {size: 100GB}, nvme: {size: 1TB, path: /kv}}\n"


def parse(body: str) -> Policy:
    return parse_policy(f"version: 1\n{body}", check_supported=False)


def message(body: str) -> str:
    with pytest.raises(PolicyError) as caught:
        parse(body)
    return str(caught.value)


@pytest.mark.parametrize(
    ("tenant", "expected"),
    [
        ("isolation: shared", "group: missing, isolation shared needs the name of a group"),
        ("group: g", "group: set, but isolation is private; expected isolation shared with it"),
        ("isolation: dedicated", "gpus: missing, isolation dedicated needs GPUs of its own"),
        ("isolation: dedicated, gpus: []", "gpus: missing, isolation dedicated needs GPUs"),
        ("isolation: sealed, gpus: [0]", "gpus: set, but isolation is sealed; expected isolation"),
        ("engine: {page_size: 32}", "engine: set, but isolation is private; expected isolation"),
    ],
)
def test_field_that_needs_another_isolation(tenant: str, expected: str) -> None:
    assert message(f"tenants: {{acme: {{{tenant}}}}}").startswith(f"tenants.acme.{expected}")


def test_shared_as_the_default_needs_a_group_of_every_tenant() -> None:
    defaults = "defaults: {isolation: shared}\n"
    assert message(defaults + "tenants: {acme: {}}").startswith("tenants.acme.group: missing")
    policy = parse(defaults + "tenants: {acme: {isolation: private}, hr: {group: g}}")
    assert [tenant.owner for tenant in policy.tenants.values()] == ["t:system", "t:acme", "g:g"]


def test_two_tenants_with_one_key() -> None:
    acme, globex = (f"{name}: {{api_keys: ['{DIGEST_A}']}}" for name in ("acme", "globex"))
    text = message(f"tenants: {{{acme}, {globex}}}")
    assert text == (
        "tenants.globex.api_keys[0]: the same key as tenants.acme.api_keys[0], expected another"
    )


def test_tenant_with_an_admin_key() -> None:
    text = message(
        f"admin_keys: ['{DIGEST_B}', '{DIGEST_A}']\ntenants: {{acme: {{api_keys: ['{DIGEST_A}']}}}}"
    )
    assert text == "tenants.acme.api_keys[0]: the same key as admin_keys[1], expected another"


def test_one_key_twice() -> None:
    assert message(f"admin_keys: ['{DIGEST_A}', '{DIGEST_A}']").startswith(
        "admin_keys[1]: the same"
    )


def test_two_tenants_with_one_gpu() -> None:
    a, b = (f"{name}: {{isolation: dedicated, gpus: [{gpus}]}}" for name, gpus in ("a0", "b0"))
    assert message(f"tenants: {{{a}, {b}}}").startswith("tenants.b.gpus[0]: the same GPU as")


def test_two_prefixes_with_one_name() -> None:
    text = message("public_prefixes: [{name: a, system: x}, {name: a, system: y}]")
    assert text.startswith("public_prefixes[1].name: the same name as public_prefixes[0].name")


def test_unknown_key_belongs_to_a_tenant_of_the_file() -> None:
    assert parse("unknown_key: free\ntenants: {free: {}}").unknown_key == "free"
    assert parse("unknown_key: reject").unknown_key is None


@pytest.mark.parametrize(
    ("value", "found"),
    [("fre", "'fre'"), ("system", "'system'")],
)
def test_unknown_key_refused(value: str, found: str) -> None:
    text = message(f"unknown_key: {value}\ntenants: {{free: {{}}}}")
    assert text.startswith(f"unknown_key: found {found}, expected reject or a tenant of this file")


def test_unknown_key_names_the_nearest_tenant() -> None:
    assert message("unknown_key: fre\ntenants: {free: {}}").endswith("(did you mean free?)")


@pytest.mark.parametrize(
    ("quota", "reserve", "found"),
    [
        (
            "hbm: 20%",
            "hbm: 30%",
            "hbm: found '30%', expected at most the tenant's own quota of 20%",
        ),
        ("cpu: 1GB", "cpu: 2GB", "cpu: found '2GB', expected at most"),
        ("nvme: 1ktok", "nvme: 2ktok", "nvme: found '2ktok', expected at most"),
        ("cpu: 10%", "cpu: 20GB", "cpu: found '20GB', expected at most"),
        ("nvme: 100GB", "nvme: 20%", "nvme: found '20%', expected at most"),
    ],
)
def test_reserve_above_the_own_quota(quota: str, reserve: str, found: str) -> None:
    text = message(DISK + f"tenants: {{acme: {{quota: {{{quota}}}, reserve: {{{reserve}}}}}}}")
    assert text.startswith(f"tenants.acme.reserve.{found}")


@pytest.mark.parametrize(
    ("quota", "reserve"),
    [
        ("hbm: 20%", "hbm: 20%"),
        ("hbm: 1GB", "hbm: 50%"),
        ("cpu: 10%", "cpu: 10GB"),
        ("cpu: 1ktok", "cpu: 50%"),
        ("hbm: 10%", "cpu: 50%"),
    ],
)
def test_reserve_that_may_fit(quota: str, reserve: str) -> None:
    assert parse(DISK + f"tenants: {{acme: {{quota: {{{quota}}}, reserve: {{{reserve}}}}}}}")


def test_reserve_above_the_default_quota() -> None:
    text = message("defaults: {quota: {hbm: 10%}}\ntenants: {acme: {reserve: {hbm: 20%}}}")
    assert text.startswith("tenants.acme.reserve.hbm: found '20%'")


def test_reserves_of_all_tenants_fit_the_tier() -> None:
    ten = ", ".join(f"t{n}: {{reserve: {{hbm: 10%}}}}" for n in range(10))
    assert parse(f"tenants: {{{ten}}}")
    assert message(f"tenants: {{{ten}, more: {{reserve: {{hbm: 0.5%}}}}}}") == (
        "tenants: reserve.hbm of all tenants sums to 100.5%, expected at most 100%"
    )


def test_reserves_in_bytes_count_where_the_file_says_how_large_the_tier_is() -> None:
    text = message(DISK + "tenants: {a: {reserve: {cpu: 60GB}}, b: {reserve: {cpu: 50%}}}")
    assert text.startswith("tenants: reserve.cpu of all tenants sums to 110%")


MEMBER = "isolation: shared, group: intranet"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("sla", "basic"),
        ("weight", "2"),
        ("quota", "{hbm: 10%}"),
        ("quota", "{hard: true}"),
        ("reserve", "{cpu: 10%}"),
        ("ttl", "{hbm: 5m}"),
    ],
)
def test_members_of_a_group_state_the_same(field: str, value: str) -> None:
    text = message(f"tenants: {{hr: {{{MEMBER}}}, sales: {{{MEMBER}, {field}: {value}}}}}")
    assert text == (
        f"tenants.sales.{field}: not the same as tenants.hr.{field}, "
        "expected equal ones, both share the pages of group intranet"
    )
    assert parse(f"tenants: {{hr: {{{MEMBER}, {field}: {value}}}, x: {{{field}: {value}}}}}")


def test_the_reserve_of_a_group_counts_once() -> None:
    members = ", ".join(f"t{n}: {{{MEMBER}, reserve: {{hbm: 60%}}}}" for n in range(3))
    assert parse(f"tenants: {{{members}}}")
    text = message(f"tenants: {{{members}, a: {{reserve: {{hbm: 50%}}}}}}")
    assert text.startswith("tenants: reserve.hbm of all tenants sums to 110%")


@pytest.mark.parametrize(
    ("tenant", "why"),
    [
        ("encrypt: true", "encrypted"),
        ("isolation: sealed", "sealed"),
        ("isolation: dedicated, gpus: [1]", "dedicated"),
    ],
)
def test_encrypted_pages_need_a_master_key(tenant: str, why: str) -> None:
    tenants = f"tenants: {{a: {{}}, b: {{{tenant}}}}}\n"
    expected = f"tiers.nvme.master_key: missing, tenants.b is {why}: expected a file"
    assert message(DISK + tenants).startswith(expected)
    keyed = DISK.replace("path: /kv", "path: /kv, master_key: /key")
    policy = parse(keyed + tenants)
    assert policy.encrypted_owners == {policy.tenants[TenantId("b")].owner}
    assert parse(tenants).tiers.nvme is None, "without a disk there is nothing to encrypt"


def test_metrics_for_everybody_would_show_a_sealed_tenant() -> None:
    public = "metrics: {public: true}\n"
    text = message(public + "tenants: {a: {}, b: {isolation: sealed}}")
    assert text.startswith("metrics.public: found true, expected false: everybody would see what")
    assert "tenants.b" in text
    assert parse(public + "tenants: {a: {}}").metrics.public


def test_one_member_is_enough_to_encrypt_its_group() -> None:
    keyed = DISK.replace("path: /kv", "path: /kv, master_key: 'env:KEY'")
    members = "a: {isolation: shared, group: g}, b: {isolation: shared, group: g, encrypt: true}"
    assert parse(f"{keyed}tenants: {{{members}}}").encrypted_owners == {"g:g"}


def test_the_master_key_itself_is_refused_and_not_repeated() -> None:
    secret = "ab" * 32
    keyed = DISK.replace("path: /kv", f"path: /kv, master_key: '{secret}'")
    assert "found the key itself" in message(keyed)
    assert secret not in message(keyed)


REMOTE = "remote: {backend: mooncake, master: 'kv:50051', size: 1TB}"


def test_the_remote_tier_needs_a_disk_on_this_machine() -> None:
    expected = "tiers.remote: set without tiers.nvme, expected both"
    assert message(f"tiers: {{cpu: {{size: 1GB}}, {REMOTE}}}").startswith(expected)
    remote = parse(f"{DISK[:-2]}, {REMOTE}}}").tiers.remote
    assert remote is not None
    assert (remote.metadata, remote.admin) == ("P2PHANDSHAKE", None)


@pytest.mark.parametrize("master", ["kv", "kv:", ":50051", "kv:0", "kv:65536", "http://kv:1", "5"])
def test_a_master_without_a_machine_or_port_is_refused(master: str) -> None:
    remote = f"remote: {{backend: mooncake, master: '{master}', size: 1TB}}"
    said = message(f"{DISK[:-2]}, {remote}}}")
    assert said.startswith(f"tiers.remote.master: found '{master}', expected a machine and a port")


def test_a_reserve_in_the_remote_tier_fits_its_quota_and_the_tier() -> None:
    tiers = f"{DISK[:-2]}, {REMOTE}}}\n"
    tenants = "tenants: {a: {reserve: {remote: 2TB}}}"
    assert "200%" in message(f"{tiers}{tenants}")
    tenants = "tenants: {a: {reserve: {remote: 20GB}, quota: {remote: 10GB}}}"
    assert message(f"{tiers}{tenants}").startswith("tenants.a.reserve.remote: found")


def test_pages_of_the_remote_tier_live_as_long_as_on_the_disk_unless_said() -> None:
    tenants = parse("defaults: {ttl: {nvme: 3d}}\ntenants: {a: {}, b: {ttl: {remote: 1d}}}").tenants
    assert (tenants[TenantId("a")].ttl.remote, tenants[TenantId("b")].ttl.remote) == (None, 86400)
