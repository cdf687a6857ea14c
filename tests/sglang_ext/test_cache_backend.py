"""Registration, and what the factory refuses because tenants could not be kept apart."""

from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.mem_cache import registry
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_cache.tree_core_registry import registered_tree_core_backends

from sglang_ext import cache_backend
from sglang_ext.cache_backend import BACKEND, create_cache, register_backend
from sglang_ext.errors import UnsupportedError
from sglang_ext.prefix_cache import TenantRadixCache
from sglang_ext.radix.component import TenantFullComponent
from sglang_ext.radix.public import PublicPrefixes
from sglang_ext.radix.tree_core import TenantTreeCore
from tests.radix.caches import make_params

PUBLIC_PREFIXES = PublicPrefixes([[1, 2, 3, 4]], 4)


def make_context(hierarchical: bool = False, **changes: Any) -> SimpleNamespace:
    params = make_params(64, 4, **changes)
    return SimpleNamespace(params=params, enable_hierarchical_cache=hierarchical)


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand in for SGLang's builder, which needs a whole engine around it."""

    def build(ctx: Any, *, cache_class: Any) -> Any:
        return cache_class(ctx.params)

    monkeypatch.setattr(cache_backend, "create_unified_radix_cache", build)


def test_registering_twice_is_a_no_op() -> None:
    register_backend()
    register_backend()
    assert registry.registered_radix_cache_backends().count(BACKEND) == 1
    assert registered_tree_core_backends().count(BACKEND) == 1


@pytest.mark.usefixtures("built")
def test_the_factory_builds_our_cache_over_our_tree_with_the_given_prefixes() -> None:
    register_backend()
    cache = create_cache(make_context(), lambda ctx: PUBLIC_PREFIXES)
    assert type(cache) is TenantRadixCache
    assert type(cache.tree_core) is TenantTreeCore
    assert type(cache.components[ComponentType.FULL]) is TenantFullComponent
    assert cache.tree_core.public is PUBLIC_PREFIXES


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("changes", [{"eviction_policy": "LRU"}, {"enable_kv_cache_events": True}])
def test_what_works_is_not_refused(changes: dict[str, Any]) -> None:
    register_backend()
    assert create_cache(make_context(**changes)) is not None


@pytest.mark.parametrize(
    ("changes", "flag"),
    [
        ({"eviction_policy": "lfu"}, "--radix-eviction-policy lfu"),
        ({"enable_session_radix_cache": True}, "--enable-session-radix-cache"),
        ({"hierarchical": True}, "--hicache-host-memory-mode"),
    ],
)
def test_a_mode_that_cannot_keep_tenants_apart_is_refused_by_its_flag(
    changes: dict[str, Any], flag: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = SimpleNamespace(hicache_host_memory_mode="buffer_only")
    monkeypatch.setattr(cache_backend, "get_memory", lambda: memory)
    with pytest.raises(UnsupportedError, match=flag):
        create_cache(make_context(**changes), lambda ctx: PUBLIC_PREFIXES)
