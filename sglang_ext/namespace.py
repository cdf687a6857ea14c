"""How owner, client key and LoRA share one string, so that no two combinations collide.

SGLang partitions its tree and its lower tiers by ``extra_key`` and appends the LoRA id to it
without a separator. We write three fields ``<length>:<value>`` into ``extra_key`` (owner, client
key, and a random word for a request that must leave nothing behind): all lengths are known, so
whatever follows is the LoRA id. The client's ``cache_salt`` stays in SGLang's own field beside it.
"""

import re
from typing import NamedTuple

from sglang_ext.types import SYSTEM_TENANT, Owner, TenantId

__all__ = [
    "SYSTEM_OWNER",
    "Namespace",
    "frame",
    "is_framed",
    "is_sealed",
    "parse",
    "shares_public",
    "tenant_owner",
]

_LENGTH = re.compile("0|[1-9][0-9]{0,9}")


class Namespace(NamedTuple):
    """The parts of an ``extra_key``.

    ``once`` is empty, or unique to one request that neither reads nor leaves cached pages;
    ``lora`` is empty for the base model.
    """

    owner: Owner
    client_key: str = ""
    once: str = ""
    lora: str = ""


def tenant_owner(tenant: TenantId) -> Owner:
    """Return the owner name of a tenant that shares with nobody."""
    return Owner(f"t:{tenant}")


def is_sealed(owner: Owner) -> bool:
    """Tell whether an owner's pages are zeroed when freed, encrypted below, and named to nobody.

    The owner's name alone decides, so that a request in flight keeps its answer when a policy
    changes.
    """
    return owner.startswith("s:")


def shares_public(owner: Owner) -> bool:
    """Tell whether an owner's text may be public; a sealed tenant computes even that for itself."""
    return not is_sealed(owner)


SYSTEM_OWNER = tenant_owner(SYSTEM_TENANT)


def frame(owner: Owner, client_key: str = "", once: str = "") -> str:
    """Return the ``extra_key`` of a request of ``owner``; SGLang may append a LoRA id to it."""
    return "".join(f"{len(field)}:{field}" for field in (owner, client_key, once))


def parse(extra_key: str | None) -> Namespace:
    """Undo ``frame``; a key that we did not frame belongs to the system tenant.

    Only requests that no hook saw (SGLang's own warm-up) carry a foreign key, and they must never
    fall into a customer's namespace.
    """
    return _parse(extra_key or "") or Namespace(SYSTEM_OWNER, extra_key or "")


def is_framed(extra_key: str | None) -> bool:
    """Tell whether ``frame`` made this key, a LoRA id behind it or not."""
    return _parse(extra_key or "") is not None


def _parse(extra_key: str) -> Namespace | None:
    owner, rest = _field(extra_key)
    client_key, rest = _field(rest)
    once, lora = _field(rest)
    if owner is None or client_key is None or once is None:
        return None
    return Namespace(Owner(owner), client_key, once, lora)


def _field(text: str) -> tuple[str | None, str]:
    """Split ``<length>:<value><rest>``; (None, text) when ``frame`` did not write ``text``."""
    digits, _, rest = text.partition(":")
    if not _LENGTH.fullmatch(digits) or int(digits) > len(rest):
        return None, text
    return rest[: int(digits)], rest[int(digits) :]
