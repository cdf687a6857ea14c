"""One string for owner, client key, once and LoRA, in which no two combinations meet."""

import uuid
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.utils import get_hash_str, get_storage_hash_str, storage_namespace_seed

from sglang_ext.namespace import SYSTEM_OWNER, Namespace, frame, is_framed, parse, tenant_owner
from sglang_ext.types import Owner, TenantId

_PAGE = 16
_NAMES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,8}", fullmatch=True)
_OWNERS = st.builds(lambda kind, name: Owner(f"{kind}:{name}"), st.sampled_from("tg"), _NAMES)
# Digits and colons are what the framing itself is made of.
_TEXTS = st.text(alphabet=st.sampled_from("0123456789:tga-é\n"), max_size=12) | st.text(max_size=8)
_HEX = st.uuids(version=4).map(lambda value: value.hex)
_NAMESPACES = st.builds(
    Namespace, _OWNERS, _TEXTS, st.just("") | _HEX, st.sampled_from(["", uuid.uuid4().hex]) | _HEX
)


def _key(namespace: Namespace) -> str:
    """Return the key as SGLang makes it: it appends the LoRA id."""
    return frame(namespace.owner, namespace.client_key, namespace.once) + namespace.lora


@given(_NAMESPACES, _NAMESPACES)
def test_no_two_combinations_collide(one: Namespace, other: Namespace) -> None:
    assert (_key(one) == _key(other)) == (one == other)


@given(_NAMESPACES)
def test_parse_inverts_frame(namespace: Namespace) -> None:
    assert parse(_key(namespace)) == namespace
    assert is_framed(_key(namespace))


@given(_TEXTS, st.just("") | _HEX)
def test_a_foreign_key_belongs_to_the_system(text: str, lora: str) -> None:
    """Only what ``frame`` wrote is read as framed, so nothing else can be a tenant's."""
    parsed = parse(text + lora)
    if is_framed(text + lora):
        assert _key(parsed) == text + lora
    else:
        assert parsed == Namespace(SYSTEM_OWNER, text + lora)


@given(_HEX)
def test_a_lora_id_alone_is_not_a_namespace(lora: str) -> None:
    """SGLang makes such a key for an embedding request with an adapter."""
    assert not is_framed(lora)


@pytest.mark.parametrize(
    "key",
    [
        None,
        "",
        "t:a",
        "3:t:a",
        "3:t:a0:",
        "03:t:a0:0:",
        "3:t:a00:0:",
        "+3:t:a0:0:",
        " 3:t:a0:0:",
        "3\n:t:a0:0:",
        "٣:t:a0:0:",
        "-1:t:a0:0:",
        "4:t:a0:",
        "9" * 5000 + ":x",
    ],
)
def test_not_framed(key: str | None) -> None:
    assert not is_framed(key)
    assert parse(key).owner == SYSTEM_OWNER


def _tree_key(extra_key: str | None, lora: str = "", salt: str | None = None) -> RadixKey:
    """Return SGLang's key; its Req appends the LoRA id in the same way."""
    namespace = (extra_key or "") + lora if lora else extra_key
    return RadixKey(array("q", range(_PAGE)), namespace, cache_salt=salt)


_CONFUSABLE = [
    _tree_key(frame(tenant_owner(TenantId("x")))),
    _tree_key(frame(SYSTEM_OWNER), lora="x"),
    _tree_key(frame(SYSTEM_OWNER, "x")),
    _tree_key(frame(SYSTEM_OWNER), salt="x"),
    _tree_key(frame(SYSTEM_OWNER, once="x")),
    _tree_key(frame(Owner("g:x"))),
    _tree_key(frame(Owner("s:x"))),
    _tree_key(frame(tenant_owner(TenantId("y"))), lora="x"),
    _tree_key(frame(tenant_owner(TenantId("y")), "x")),
    _tree_key(frame(tenant_owner(TenantId("y"))), salt="x"),
    _tree_key(frame(tenant_owner(TenantId("y"))), salt=frame(tenant_owner(TenantId("x")))),
    _tree_key("x"),
    _tree_key(None, salt="x"),
    _tree_key(None),
]


@pytest.mark.trial(12)
def test_trial_12_lora_name_tenant_and_salt_never_meet() -> None:
    """The same word "x" as tenant (sealed or not), group, client key, salt and adapter."""
    children = {key.child_key(_PAGE) for key in _CONFUSABLE}
    assert len(children) == len(_CONFUSABLE)
    seeds = {storage_namespace_seed(key.extra_key, key.cache_salt) for key in _CONFUSABLE}
    assert len(seeds) == len(_CONFUSABLE)
    pages = {tuple(get_storage_hash_str(key, page_size=_PAGE)) for key in _CONFUSABLE}
    assert len(pages) == len(_CONFUSABLE)


@pytest.mark.trial(15)
def test_trial_15_page_hashes_are_sha256_of_the_whole_prefix() -> None:
    """256 bits each, chained, so that nobody can make a page that passes for another's."""
    tokens = array("q", range(2 * _PAGE))
    first, second = get_hash_str(RadixKey(tokens), page_size=_PAGE)
    assert len(bytes.fromhex(first)) == len(bytes.fromhex(second)) == 32
    assert get_hash_str(RadixKey(tokens), page_size=_PAGE) == [first, second]
    assert get_hash_str(RadixKey(array("q", [7, *tokens[1:]])), page_size=_PAGE)[1] != second
    assert get_hash_str(RadixKey(tokens), first, page_size=_PAGE)[0] != first


@pytest.mark.trial(15)
def test_trial_15_the_function_is_sha256_itself() -> None:
    """A fast hash of the same length would pass the test above."""
    import hashlib

    data = b"".join(token.to_bytes(4, "little") for token in range(_PAGE))
    page = RadixKey(array("q", range(_PAGE)))
    assert get_hash_str(page, page_size=_PAGE) == [hashlib.sha256(data).hexdigest()]
    seed = storage_namespace_seed("x", None)
    assert seed is not None
    chained = hashlib.sha256(bytes.fromhex(seed) + data).hexdigest()
    assert get_hash_str(page, seed, page_size=_PAGE) == [chained]
