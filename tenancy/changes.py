"""What changed from one policy to the next, and what may change while the server runs."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from sglang_ext.errors import PolicyError
from sglang_ext.tenancy.document import KEY_FIELDS
from sglang_ext.tenancy.fields import join
from sglang_ext.tenancy.policy import Isolation, Policy
from sglang_ext.types import Owner, TenantId

__all__ = ["Change", "check_live", "diff", "gone_owners", "gone_tenants"]

_HIDDEN = KEY_FIELDS | {"public_prefixes"}
_TIER_FIELDS = (
    ("cpu", "size"),
    ("nvme", "size"),
    ("nvme", "path"),
    ("nvme", "master_key"),
    ("remote", "backend"),
    ("remote", "master"),
    ("remote", "metadata"),
    ("remote", "admin"),
    ("remote", "size"),
)
_RESTART = "cannot change while the server runs; change the file and start it again"

Path = tuple[str, ...]


class Change(NamedTuple):
    """One field that was added, removed or changed. Keys and prompts show no value."""

    path: str
    change: str
    old: Any = None
    new: Any = None

    def row(self) -> dict[str, Any]:
        """Return it as JSON, without the values that are not there."""
        values = {"old": self.old, "new": self.new}
        shown = {name: value for name, value in values.items() if value is not None}
        return {"path": self.path, "change": self.change, **shown}


def diff(old: Policy, new: Policy) -> list[Change]:
    """Return what differs between the files of two policies, by path. O(fields)."""
    before, after = (dict(_leaves(policy.document, ())) for policy in (old, new))
    paths = sorted(before.keys() | after.keys())
    return [_change(path, before, after) for path in paths if _differs(path, before, after)]


def check_live(old: Policy, new: Policy) -> None:
    """Raise PolicyError with path, value and reason for what only a restart can put in force."""
    for path, before, after in _fixed(old, new):
        if before != after:
            reason = f"found {_shown(after)}, in force is {_shown(before)}"
            raise PolicyError(path, f"{reason}; this {_RESTART}")


def gone_tenants(old: Policy, new: Policy) -> list[TenantId]:
    """Return who is a tenant of ``old`` only."""
    return [name for name in old.tenants if name not in new.tenants]


def gone_owners(old: Policy, new: Policy) -> list[Owner]:
    """Return who owns pages by ``old`` only: tenants that left, or that joined a group."""
    before, after = ({tenant.owner for tenant in one.tenants.values()} for one in (old, new))
    return sorted(before - after)


def _leaves(value: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    """Yield every field with its path; of a section that it is there."""
    if isinstance(value, Mapping):
        if path:
            yield path, {}
        for name, item in value.items():
            yield from _leaves(item, (*path, name))
    else:
        yield path, value


def _differs(path: Path, before: Mapping[Path, Any], after: Mapping[Path, Any]) -> bool:
    return path not in before or path not in after or before[path] != after[path]


def _change(path: Path, before: Mapping[Path, Any], after: Mapping[Path, Any]) -> Change:
    if path in before and path in after:
        kind = "changed"
    else:
        kind = "removed" if path in before else "added"
    name = ""
    for part in path:
        name = join(name, part)
    if _HIDDEN & set(path):
        return Change(name, kind)
    return Change(name, kind, before.get(path), after.get(path))


def _fixed(old: Policy, new: Policy) -> Iterator[tuple[str, Any, Any]]:
    """Yield path, value in force and new value of what was decided at the start."""
    for field in ("page_size", "kv_cache_dtype", "kv_scales"):
        yield f"engine.{field}", getattr(old.engine, field), getattr(new.engine, field)
    for tier, field in _TIER_FIELDS:
        before, after = (getattr(one.tiers, tier) for one in (old, new))
        yield f"tiers.{tier}.{field}", _of(before, field), _of(after, field)
    yield from _fixed_prefixes(old, new)
    yield "metrics.tenants", old.metrics.tenants, new.metrics.tenants
    for name in {**old.tenants, **new.tenants}:
        for field in ("gpus", "engine"):
            yield f"tenants.{name}.{field}", _own(old, name, field), _own(new, name, field)


def _fixed_prefixes(old: Policy, new: Policy) -> Iterator[tuple[str, Any, Any]]:
    """Texts stand for themselves only where names agree, so that no message repeats one."""
    before, after = (one.public_prefixes for one in (old, new))
    names, others = ([prefix.name for prefix in one] for one in (before, after))
    yield "public_prefixes", names, others
    same = [prefix.system for prefix in before] == [prefix.system for prefix in after]
    yield "public_prefixes", "their texts", "their texts" if same else "other texts"


def _of(section: Any, field: str) -> Any:
    return None if section is None else getattr(section, field)


def _own(policy: Policy, name: TenantId, field: str) -> Any:
    """Return what a tenant with an engine of its own has set, None for all the others."""
    tenant = policy.tenants.get(name)
    if tenant is None or tenant.isolation is not Isolation.DEDICATED:
        return None
    return getattr(tenant, field)


def _shown(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value)) or "nothing"
    return "nothing" if value is None else str(value)
