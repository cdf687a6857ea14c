"""Hooks: registered and proven as one, and each target is what this release was written for."""

import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import ModuleType
from typing import Any

import pytest
from sglang.srt.plugins.hook_registry import HookRegistry

from sglang_ext.errors import HookError, UnsupportedError
from sglang_ext.patches import hooks, versions
from sglang_ext.patches.admin_channel import admin_channel_hooks
from sglang_ext.patches.hooks import Hook
from sglang_ext.patches.prefill_rate import prefill_rate_hooks
from sglang_ext.patches.refusal_status import refusal_status_hooks
from sglang_ext.patches.scheduler import namespace_hooks, scheduler_hooks
from sglang_ext.patches.shutdown import shutdown_hooks
from sglang_ext.patches.tokenizer_manager import identity_hooks
from sglang_ext.patches.trace_attributes import trace_hooks
from sglang_ext.patches.versions import SGLANG_VERSION, check_signature, check_version
from sglang_ext.patches.weight_updates import weight_update_hooks
from sglang_ext.tenancy.loader import parse_policy

_MODULE = "sglang_ext_hook_targets"


class _Silent:
    """An observer that counts nothing."""

    def request(self, tenant: str) -> Any:
        return nullcontext(lambda output: None)


def _no_observer() -> Any:
    raise AssertionError("a hook observes only when it runs")


def _around(original: Callable[[int], int], value: int) -> int:
    return original(value) + 100


def _hook(name: str, *parameters: str) -> Hook:
    return Hook(f"{_MODULE}.{name}", _around, parameters or ("value",))


@pytest.fixture
def targets(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A module to hook, and hook registries that are empty for the time of one test."""
    module: Any = ModuleType(_MODULE)
    exec("def one(value): return value\ndef two(value): return 2 * value", vars(module))
    monkeypatch.setitem(sys.modules, _MODULE, module)
    monkeypatch.setattr(hooks, "_installed", [])
    monkeypatch.setattr(HookRegistry, "_hooks", type(HookRegistry._hooks)(list))
    monkeypatch.setattr(HookRegistry, "_patched", set())
    yield module


def test_installed_hooks_work_once_applied(targets: Any) -> None:
    hooks.install([_hook("one"), _hook("two")])
    HookRegistry.apply_hooks()
    hooks.verify()
    assert (targets.one(1), targets.two(1)) == (101, 102)


def test_installing_again_changes_nothing(targets: Any) -> None:
    for _ in range(2):
        hooks.install([_hook("one")])
        HookRegistry.apply_hooks()
    assert targets.one(1) == 101
    assert len(HookRegistry._hooks[f"{_MODULE}.one"]) == 1


def test_nothing_installed_is_not_verified(targets: Any) -> None:
    with pytest.raises(HookError, match="did not run"):
        hooks.verify()


def test_a_hook_that_was_not_applied_is_named(targets: Any) -> None:
    hooks.install([_hook("one")])
    with pytest.raises(HookError, match=f"{_MODULE}.one"):
        hooks.verify()


def test_a_hook_that_somebody_took_off_is_named(targets: Any) -> None:
    plain = targets.two
    hooks.install([_hook("one"), _hook("two")])
    HookRegistry.apply_hooks()
    targets.two = plain
    with pytest.raises(HookError, match=f"hook on {_MODULE}.two;"):
        hooks.verify()


def test_hooks_of_others_may_wrap_ours(targets: Any) -> None:
    hooks.install([_hook("one")])
    HookRegistry.register(f"{_MODULE}.one", lambda result, value: result)
    HookRegistry.apply_hooks()
    hooks.verify()
    assert targets.one(1) == 101


@pytest.mark.parametrize("broken", [_hook("two", "value", "more"), _hook("three")])
def test_a_changed_target_is_an_error_and_stays_one(targets: Any, broken: Hook) -> None:
    """SGLang swallows the first error, so the rest of the plugin's work must not look complete."""
    with pytest.raises(HookError):
        hooks.install([_hook("one"), broken])
    HookRegistry.apply_hooks()
    with pytest.raises(HookError):
        hooks.verify()


def test_a_plugin_that_fails_before_its_last_hook_is_not_verified(targets: Any) -> None:
    with pytest.raises(HookError):
        hooks.install([_hook("one", "changed"), _hook("two")])
    HookRegistry.apply_hooks()
    with pytest.raises(HookError, match=f"{_MODULE}.one, {_MODULE}.two"):
        hooks.verify()


def test_signatures() -> None:
    def function(self: Any, rid: str = "", *, abort: bool = False) -> None: ...

    check_signature(function, ("self", "rid", "abort"))
    for other in ((), ("self", "rid"), ("rid", "self", "abort"), ("self", "rid", "abort", "x")):
        with pytest.raises(HookError, match=SGLANG_VERSION):
            check_signature(function, other)


def test_only_one_version_is_supported(monkeypatch: pytest.MonkeyPatch) -> None:
    check_version()
    monkeypatch.setattr(versions, "version", lambda name: "0.5.24")
    with pytest.raises(UnsupportedError, match=r"sglang 0\.5\.24 .* exactly 0\.5\.23"):
        check_version()


def _all_hooks() -> list[Hook]:
    policy = parse_policy("version: 1\ntenants: {a: {}}")
    return [
        *identity_hooks(_Silent()),
        *namespace_hooks(lambda: policy),
        *admin_channel_hooks({}),
        *refusal_status_hooks(),
        *scheduler_hooks(policy, _no_observer),
        *shutdown_hooks(),
        *trace_hooks(lambda cached, sources: {}),
        *weight_update_hooks(),
        *prefill_rate_hooks(),
    ]


@pytest.mark.parametrize("hook", _all_hooks(), ids=lambda hook: hook.target)
def test_every_target_is_in_sglang_as_expected(hook: Hook) -> None:
    """Fails when SGLang changes: then read the target again and adapt the hook."""
    check_signature(hooks._resolve(hook.target), hook.parameters)
