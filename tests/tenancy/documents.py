"""Policies for property tests, as the plain data of their files."""

from typing import Any

from hypothesis import strategies as st

from sglang_ext.tenancy.keys import digest

_TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12)
_SCALARS = st.none() | st.booleans() | st.integers(-(10**15), 10**15) | _TEXTS

documents = st.dictionaries(
    _TEXTS.filter(bool),
    st.recursive(
        _SCALARS | st.floats(0.001, 1000),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXTS, inner, max_size=3),
        max_leaves=8,
    ),
    max_size=4,
)
"""Any plain data, whether it is a policy or not."""

_NAMES = st.sampled_from(["a", "b", "c", "no", "1e5", "a.b"])
_KEYS = st.integers(0, 10**6).map(lambda number: digest(str(number)))
_SIZES = st.sampled_from(["5%", "20ktok", "1GiB"])
_TENANT = st.fixed_dictionaries(
    {},
    optional={
        "sla": st.sampled_from(["premium", "standard", "basic"]),
        "weight": st.floats(0.5, 3),
        "quota": st.fixed_dictionaries({}, optional={"hbm": _SIZES, "hard": st.booleans()}),
        "ttl": st.fixed_dictionaries({}, optional={"hbm": st.just("5s"), "cpu": st.just("9m")}),
        "max_queued": st.integers(1, 9),
        "api_keys": st.lists(_KEYS, max_size=2),
    },
)


def _without_repeated_keys(document: dict[str, Any]) -> dict[str, Any]:
    seen: set[str] = set()
    for tenant in document["tenants"].values():
        fresh = [key for key in dict.fromkeys(tenant.get("api_keys", ())) if key not in seen]
        seen.update(fresh)
        if "api_keys" in tenant:
            tenant["api_keys"] = fresh
    return document


policies = st.fixed_dictionaries(
    {"version": st.just(1), "tenants": st.dictionaries(_NAMES, _TENANT, max_size=4)}
).map(_without_repeated_keys)
"""Documents that the loader accepts."""
