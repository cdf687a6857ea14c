"""From text to a policy: defaults, merging, and what a person reads after a mistake."""

import copy
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_ext.errors import PolicyError
from sglang_ext.namespace import SYSTEM_OWNER, shares_public
from sglang_ext.tenancy.loader import load_policy, parse_policy
from sglang_ext.tenancy.policy import (
    ApiKey,
    EnginePolicy,
    HbmTier,
    Isolation,
    KvCacheDtype,
    MetricsPolicy,
    Policy,
    PublicPrefix,
    Quota,
    Sla,
    TenantPolicy,
    TierSizes,
    TiersPolicy,
    Ttl,
    TtlMode,
)
from sglang_ext.tenancy.units import parse_size
from sglang_ext.types import SYSTEM_TENANT, TenantId

DIGEST_A = "sha256:" + "a" * 64
DIGEST_B = "sha256:" + "b" * 64
EXAMPLES = Path(__file__).parents[2] / "examples"
FULL: dict[str, Any] = yaml.safe_load((EXAMPLES / "full-policy.yaml").read_text())

KEY_PROBLEM = "expected sha256:<64 hex digits>; run sglang-ext keygen"
SIZE_PROBLEM = "expected a size such as 256GB, 10GiB, 20% or 200ktok"
NAME_PROBLEM = "expected a name of 1 to 64 letters, digits, dots, dashes and underscores"


def parse(body: str) -> Policy:
    return parse_policy(f"version: 1\n{body}", check_supported=False)


def message(body: str) -> str:
    with pytest.raises(PolicyError) as caught:
        parse(body)
    return str(caught.value)


def tenant(policy: Policy, name: str) -> TenantPolicy:
    return policy.tenants[TenantId(name)]


def test_smallest_policy() -> None:
    policy = parse_policy("version: 1")
    assert policy == Policy(tenants={SYSTEM_TENANT: TenantPolicy(name=SYSTEM_TENANT)})
    assert policy.engine == EnginePolicy(page_size=16, kv_cache_dtype=KvCacheDtype.AUTO)
    assert policy.tiers == TiersPolicy(hbm=HbmTier(watermark=parse_size("5%")))
    assert policy.metrics == MetricsPolicy(tenants=50, public=False)
    assert policy.unknown_key is None


def test_tenant_without_fields_has_the_documented_defaults() -> None:
    acme = tenant(parse("tenants: {acme: {}}"), "acme")
    assert (acme.sla, acme.isolation, acme.weight) == (Sla.STANDARD, Isolation.PRIVATE, 1.0)
    assert (acme.quota, acme.reserve) == (Quota(), TierSizes())
    assert acme.ttl == Ttl(hbm=30, cpu=600, nvme=7 * 86400, mode=TtlMode.LAZY)
    assert (acme.max_queued, acme.encrypt, acme.gpus) == (256, False, ())


def test_tenants_are_read_only() -> None:
    assert isinstance(parse("tenants: {acme: {}}").tenants, MappingProxyType)


def test_tenant_sections_are_merged_field_by_field() -> None:
    policy = parse(
        "defaults: {weight: 2, quota: {hbm: 50%, cpu: 10GB}, ttl: {hbm: 1m, mode: strict}}\n"
        "tenants: {acme: {quota: {cpu: 5GB, hard: true}, ttl: {cpu: 1h}}, globex: {weight: 0.5}}"
    )
    acme, globex = tenant(policy, "acme"), tenant(policy, "globex")
    assert acme.weight == 2
    assert acme.quota == Quota(hbm=parse_size("50%"), cpu=parse_size("5GB"), hard=True)
    assert acme.ttl == Ttl(hbm=60, cpu=3600, mode=TtlMode.STRICT)
    assert globex.weight == 0.5
    assert globex.quota == Quota(hbm=parse_size("50%"), cpu=parse_size("10GB"))


@pytest.mark.parametrize(
    ("text", "weight"),
    [
        ("tenants: {acme: {sla: premium}}", 2),
        ("defaults: {sla: basic}\ntenants: {acme: {}}", 0.5),
        ("defaults: {sla: basic}\ntenants: {acme: {sla: standard}}", 1),
        ("tenants: {acme: {sla: premium, weight: 3}}", 3),
        ("defaults: {weight: 4}\ntenants: {acme: {sla: basic}}", 4),
    ],
)
def test_the_class_sets_the_weight_where_none_is_stated(text: str, weight: float) -> None:
    assert parse(text).tenants[TenantId("acme")].weight == weight


def test_built_in_tenant_takes_the_defaults_but_no_group_and_no_floor() -> None:
    policy = parse("defaults: {isolation: shared, weight: 3, reserve: {hbm: 10%}}")
    system = policy.tenants[SYSTEM_TENANT]
    assert (system.owner, system.weight, system.reserve) == ("t:system", 3, TierSizes())
    assert system.api_keys == ()


def test_owner_is_the_tenant_or_its_group() -> None:
    policy = parse(
        "tenants: {acme: {}, sales: {isolation: shared, group: intranet},"
        " hr: {isolation: shared, group: intranet}, vault: {isolation: sealed},"
        " bank: {isolation: dedicated, gpus: [1]}}"
    )
    names = ("acme", "sales", "hr", "vault", "bank")
    owners = [policy.tenants[TenantId(name)].owner for name in names]
    assert owners == ["t:acme", "g:intranet", "g:intranet", "s:vault", "s:bank"]
    assert [shares_public(owner) for owner in owners] == [True, True, True, False, False]


def test_the_built_in_tenant_is_never_sealed() -> None:
    """Its owner has one name everywhere, and what it computes is nobody's text."""
    policy = parse("defaults: {isolation: sealed}")
    assert policy.tenants[SYSTEM_TENANT].owner == SYSTEM_OWNER


def test_tenant_may_have_the_name_of_a_group() -> None:
    policy = parse("tenants: {sales: {}, hr: {isolation: shared, group: sales}}")
    assert tenant(policy, "sales").owner != tenant(policy, "hr").owner


def test_full_policy() -> None:
    text = (EXAMPLES / "full-policy.yaml").read_text()
    policy = parse_policy(text, check_supported=False)
    assert policy.engine.kv_scales == Path("scales.safetensors")
    assert policy.tiers.cpu is not None and policy.tiers.cpu.size == parse_size("256GB")
    assert policy.tiers.nvme is not None
    assert policy.tiers.nvme.path == Path("/var/lib/sglang-ext")
    assert policy.tiers.remote is not None and policy.tiers.remote.master == "kv-master:50051"
    prefix = PublicPrefix(name="assistant", system="You are a helpful assistant.")
    assert policy.public_prefixes == (prefix,)
    assert tenant(policy, "acme").sla is Sla.PREMIUM
    assert tenant(policy, "acme").reserve == TierSizes(hbm=parse_size("20%"))
    assert tenant(policy, "hr").encrypt
    assert tenant(policy, "free").quota.hard


def test_dedicated_tenant_has_an_engine_of_its_own() -> None:
    policy = parse_policy((EXAMPLES / "full-policy.yaml").read_text(), check_supported=False)
    bank = tenant(policy, "bank")
    assert bank.gpus == (6, 7)
    assert bank.engine == EnginePolicy(
        kv_cache_dtype=KvCacheDtype.BF16,
        kv_scales=Path("scales.safetensors"),
        flags=("--tp", "2"),
    )
    assert tenant(policy, "acme").engine == policy.engine


def test_tenants_may_be_called_no_or_42() -> None:
    assert {"no", "42"} < set(parse("tenants: {no: {}, 42: {}}").tenants)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("engnie: {}", "engnie: unknown field (did you mean engine?)"),
        ("xyz: 1", "xyz: unknown field"),
        ("engine: {page_size: 0}", "engine.page_size: found 0, expected a whole number from 1"),
        ("engine: {page_size: true}", "engine.page_size: found true, expected a whole number"),
        ("engine: {page_size: '16'}", "engine.page_size: found '16', expected a whole number"),
        (
            "engine: {kv_cache_dtype: fp8}",
            "engine.kv_cache_dtype: found 'fp8', expected one of auto, bf16, fp8_e5m2, fp8_e4m3",
        ),
        ("engine: 5", "engine: found 5, expected a mapping of fields"),
        ("engine:", "engine: found nothing, expected a mapping of fields"),
        ("engine: {kv_scales: ''}", "engine.kv_scales: found '', expected text"),
        ("tenants: [acme]", "tenants: found a list, expected a mapping of fields"),
        ("metrics: {tenants: 50}", "metrics.tenants: found 50, expected top N"),
        ("metrics: {tenants: top 0}", "metrics.tenants: found 'top 0', expected top N"),
        ("metrics: {public: yes}", "metrics.public: found 'yes', expected true or false"),
        ("tiers: {cpu: {}}", "tiers.cpu.size: missing, this field is required"),
        ("tiers: {cpu: {size: 50%}}", "tiers.cpu.size: found '50%', expected a size in bytes"),
        ("tiers: {cpu: {size: 0GB}}", "tiers.cpu.size: found '0GB', expected a size in bytes"),
        ("tiers: {hbm: {watermark: 5}}", f"tiers.hbm.watermark: found 5, {SIZE_PROBLEM}"),
        ("public_prefixes: {}", "public_prefixes: found a mapping, expected a list"),
        ("public_prefixes: [{name: a}]", "public_prefixes[0].system: missing"),
        ("tenants: {acme: {qouta: {}}}", "tenants.acme.qouta: unknown field (did you mean quota?)"),
        (
            "tenants: {acme: {quota: {hbm: 50}}}",
            f"tenants.acme.quota.hbm: found 50, {SIZE_PROBLEM}",
        ),
        (
            "tenants: {acme: {quota: {hbm: 150%}}}",
            "tenants.acme.quota.hbm: found '150%', expected a percentage from 0% to 100%",
        ),
        ("defaults: {ttl: {hbm: 30}}", "defaults.ttl.hbm: found 30, expected a duration such as"),
        ("defaults: {weight: 0}", "defaults.weight: found 0, expected a number from 0.001 to 1000"),
        ("defaults: {weight: true}", "defaults.weight: found true, expected a number"),
        ("defaults: {weight: 1e999}", "defaults.weight: found inf, expected a number"),
        ("defaults: {api_keys: []}", "defaults.api_keys: unknown field"),
        ("tenants: {acme: {gpus: [0, x]}}", "tenants.acme.gpus[1]: found 'x', expected a whole"),
    ],
)
def test_mistake_in_a_field(body: str, expected: str) -> None:
    assert message(body).startswith(expected)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "the file is empty, expected at least: version: 1"),
        ("tenants: {}", "version: missing, this field is required"),
        ("version: 2", "version: found 2, expected 1"),
        ("version: true", "version: found true, expected 1"),
        ("version: '1'", "version: found '1', expected 1"),
        ("[]", "found a list, expected a mapping of fields"),
        ("hello", "found 'hello', expected a mapping of fields"),
    ],
)
def test_mistake_in_the_whole_file(text: str, expected: str) -> None:
    with pytest.raises(PolicyError) as caught:
        parse_policy(text)
    assert str(caught.value) == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("system", "found 'system', expected another name (other, reject, system are reserved)"),
        ("other", "found 'other', expected another name"),
        ("reject", "found 'reject', expected another name"),
        ("-a", f"found '-a', {NAME_PROBLEM}"),
        ("a b", f"found 'a b', {NAME_PROBLEM}"),
        ("ä", f"found 'ä', {NAME_PROBLEM}"),
        ("a" * 65, f"found '{'a' * 60}...', {NAME_PROBLEM}"),
        ('"a\\n"', f"found 'a\\n', {NAME_PROBLEM}"),
        ("", f"found '', {NAME_PROBLEM}"),
    ],
)
def test_name_refused(name: str, expected: str) -> None:
    assert expected in message(f"tenants: {{{name or repr('')}: {{}}}}")
    group = message(f"tenants: {{a: {{isolation: shared, group: {name or repr('')}}}}}")
    assert group.startswith(f"tenants.a.group: {expected}")


def test_longest_name() -> None:
    assert "a" * 64 in parse(f"tenants: {{{'a' * 64}: {{}}}}").tenants


@pytest.mark.parametrize("key", ["my-secret", "sha256:abc", "sha256:" + "A" * 64, "[my-secret]"])
def test_key_in_clear_text_is_refused_and_not_repeated(key: str) -> None:
    text = message(f"tenants: {{acme: {{api_keys: ['{DIGEST_A}', {key}]}}}}")
    assert text == f"tenants.acme.api_keys[1]: {KEY_PROBLEM}"
    assert message(f"admin_keys: [{key}]") == f"admin_keys[0]: {KEY_PROBLEM}"


@pytest.mark.parametrize(
    ("item", "path", "expected"),
    [
        ("{}", "", "expected sha256:<64 hex digits>, or {key: "),
        ("{until: 2030-01-01T00:00:00Z}", "", "expected sha256:<64 hex digits>, or {key: "),
        ("{key: sgx-my_secret, my_secret: 1}", "", "expected sha256:<64 hex digits>, or {key: "),
        ("{key: sgx-my_secret}", ".key", KEY_PROBLEM),
        (f"{{key: '{DIGEST_A}', until: 2030-01-01}}", ".until", "found '2030-01-01', expected a"),
        (f"{{key: '{DIGEST_A}', until: 5}}", ".until", "found 5, expected a time with its zone"),
    ],
)
def test_a_wrong_key_with_a_time(item: str, path: str, expected: str) -> None:
    text = message(f"tenants: {{acme: {{api_keys: [{item}]}}}}")
    assert text.startswith(f"tenants.acme.api_keys[0]{path}: {expected}")
    assert "my_secret" not in text


def test_a_key_may_have_an_end() -> None:
    keys = f"['{DIGEST_A}', {{key: '{DIGEST_B}', until: 2030-06-01T02:00:00+02:00}}]"
    until = datetime(2030, 6, 1, tzinfo=UTC)
    expected = (ApiKey(DIGEST_A), ApiKey(DIGEST_B, until))
    assert tenant(parse(f"tenants: {{acme: {{api_keys: {keys}}}}}"), "acme").api_keys == expected
    assert parse(f"admin_keys: {keys}").admin_keys == expected


@pytest.mark.parametrize(
    "body",
    [
        "tenants: {acme: {api_keys: sgx-my_secret}}",
        "tenants: {acme: {api_keys: {sgx-my_secret: 1}}}",
        "tenants: {acme: sgx-my_secret}",
        "tenants: {acme: {sgx-my_secret: 1}}",
        "tenants: {sgx-my_secret: {}}",
        "tenants: {acme: {weight: sgx-my_secret}}",
        "tenants: {acme: {api_key: sgx-my_secret}}",
        "unknown_key: sgx-my_secret",
        "sgx-my_secret: 1\nsgx-my_secret: 2",
        "api_keys: *sgx-my_secret",
    ],
)
def test_key_in_a_wrong_place_is_not_repeated(body: str) -> None:
    assert "my_secret" not in message(body)


def test_message_is_one_line() -> None:
    assert "\n" not in message('"a\\nb": 1')


def test_repr_shows_no_digest() -> None:
    policy = parse(f"admin_keys: ['{DIGEST_B}']\ntenants: {{acme: {{api_keys: ['{DIGEST_A}']}}}}")
    assert "sha256" not in repr(policy)


def test_load_policy(tmp_path: Path) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text("version: 1\ntenants: {acme: {}}\n", encoding="utf-8-sig")
    assert set(load_policy(file).tenants) == {"system", "acme"}


def test_example_of_the_documentation() -> None:
    policy = load_policy(EXAMPLES / "tenants.yaml")
    assert list(policy.tenants) == ["system", "acme", "globex", "sales", "hr"]
    assert tenant(policy, "hr").owner == tenant(policy, "sales").owner == "g:intranet"


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"version: \xff", "not UTF-8 text (byte 9)"),
        ("version: 1".encode("utf-16"), "not UTF-8 text (byte 0)"),
        (b"#" * (4 * 2**20 + 1), "too large, expected at most 4194304 bytes"),
    ],
)
def test_file_refused(tmp_path: Path, content: bytes, problem: str) -> None:
    file = tmp_path / "policy.yaml"
    file.write_bytes(content)
    with pytest.raises(PolicyError) as caught:
        load_policy(file)
    assert str(caught.value) == problem


def test_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match="cannot be read: No such file or directory"):
        load_policy(tmp_path / "missing.yaml")
    with pytest.raises(PolicyError, match="cannot be read: Is a directory"):
        load_policy(tmp_path)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=8,
)


def places(value: object, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every value below ``value``."""
    items: list[tuple[Any, Any]] = []
    if isinstance(value, dict | list):
        items = list(value.items() if isinstance(value, dict) else enumerate(value))
    return [path] * bool(path) + [p for key, item in items for p in places(item, (*path, key))]


@settings(deadline=None)
@given(place=st.sampled_from(places(FULL)), value=JSON, extra=st.booleans())
def test_any_damage_is_a_policy_or_a_policy_error(
    place: tuple[Any, ...], value: object, extra: bool
) -> None:
    damaged = copy.deepcopy(FULL)
    parent = damaged
    for key in place[:-1]:
        parent = parent[key]
    if extra and isinstance(parent, dict):
        parent[f"{place[-1]}x"] = value
    else:
        parent[place[-1]] = value
    for check_supported in (False, True):
        try:
            parse_policy(yaml.safe_dump(damaged), check_supported=check_supported)
        except PolicyError as error:
            assert error.problem and "\n" not in str(error)
