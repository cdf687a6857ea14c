"""Keys, digests and whose key it is."""

import hashlib
import re
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.tenancy.keys import (
    KeyRing,
    Principal,
    digest,
    fingerprint,
    is_digest,
    new_key,
)
from sglang_ext.tenancy.loader import parse_policy
from sglang_ext.types import TenantId


def make_ring(unknown_key: str = "reject") -> KeyRing:
    return KeyRing(
        parse_policy(
            f"version: 1\nunknown_key: {unknown_key}\n"
            f"admin_keys: ['{digest('root')}']\n"
            "tenants:\n"
            f"  acme: {{api_keys: ['{digest('old')}', '{digest('new')}']}}\n"
            f"  globex: {{api_keys: ['{digest('glob')}']}}\n"
            "  free: {}\n"
        )
    )


def test_new_key_has_256_random_bits() -> None:
    keys = {new_key() for _ in range(100)}
    assert len(keys) == 100
    assert all(re.fullmatch(r"sgx-[A-Za-z0-9_-]{43}", key) for key in keys)


def test_digest() -> None:
    assert digest("abc") == "sha256:" + hashlib.sha256(b"abc").hexdigest()


@given(st.text(alphabet=st.characters()))
def test_every_key_has_a_digest(key: str) -> None:
    assert is_digest(digest(key))


@pytest.mark.parametrize("text", ["", "abc", "sha256:" + "A" * 64, "sha256:" + "a" * 64 + "\n"])
def test_not_a_digest(text: str) -> None:
    assert not is_digest(text)


@pytest.mark.parametrize(
    ("key", "principal"),
    [
        ("old", Principal(TenantId("acme"), False)),
        ("new", Principal(TenantId("acme"), False)),
        ("glob", Principal(TenantId("globex"), False)),
        ("root", Principal(None, True)),
        ("Old", None),
        ("old ", None),
        ("nobody", None),
        ("", None),
        (digest("old"), None),
        ("\udcff", None),
    ],
)
def test_lookup(key: str, principal: Principal | None) -> None:
    assert make_ring().lookup(key) == principal


def test_unknown_key_belongs_to_the_tenant_that_the_policy_names() -> None:
    ring = make_ring(unknown_key="free")
    assert ring.lookup("nobody") == Principal(TenantId("free"), False)
    assert ring.lookup("old") == Principal(TenantId("acme"), False)
    assert ring.lookup("root") == Principal(None, True)


def test_request_without_a_key_belongs_to_nobody() -> None:
    assert make_ring(unknown_key="free").lookup("") is None


def test_no_key_leads_to_the_built_in_tenant() -> None:
    for key in ("system", "t:system", digest("system")):
        assert make_ring().lookup(key) is None


def test_repr_shows_no_key_and_no_digest() -> None:
    assert "sha256" not in repr(make_ring())


@pytest.mark.parametrize(("now", "known"), [(-1.0, True), (0.0, False), (1.0, False)])
def test_a_key_ends_at_its_time(now: float, known: bool) -> None:
    text = "2030-01-01T01:00:00+01:00"
    until = datetime(2030, 1, 1, tzinfo=UTC).timestamp()
    policy = parse_policy(
        "version: 1\nunknown_key: free\ntenants:\n  free: {}\n"
        f"  acme: {{api_keys: [{{key: '{digest('old')}', until: {text}}}, '{digest('new')}']}}"
    )
    ring = KeyRing(policy)
    assert (ring.lookup("old", until + now) is not None) is known
    assert ring.lookup("new", until + now) == Principal(TenantId("acme"), False)


def test_a_fingerprint_tells_keys_apart_and_is_none() -> None:
    principal = make_ring().lookup("old")
    assert principal is not None
    assert principal.fingerprint == fingerprint(digest("old")) == digest("old")[:15]
