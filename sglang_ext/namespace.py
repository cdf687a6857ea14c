"""How owner, client key and LoRA share one string, so that no two combinations collide.

SGLang partitions its tree and its lower tiers by ``extra_key`` and appends the LoRA id to it
without a separator. We write ``<length>:<owner><length>:<client key>`` into ``extra_key``: both
lengths are known, so whatever follows the second field is the LoRA id. The client's ``cache_salt``
stays in SGLang's own field beside it.
"""

from typing import NamedTuple

from sglang_ext.types import SYSTEM_TENANT, Owner, TenantId

__all__ = ["SYSTEM_OWNER", "Namespace", "frame", "is_framed", "parse", "tenant_owner"]


class Namespace(NamedTuple):
    """The parts of an ``extra_key``: ``lora`` is empty for the base model."""

    owner: Owner
    client_key: str = ""
    lora: str = ""


def tenant_owner(tenant: TenantId) -> Owner:
    """Return the owner name of a tenant that shares with nobody."""
    return Owner(f"t:{tenant}")


SYSTEM_OWNER = tenant_owner(SYSTEM_TENANT)


def frame(owner: Owner, client_key: str = "") -> str:
    """Return the ``extra_key`` of a request of ``owner``; SGLang may append a LoRA id to it."""
    return f"{len(owner)}:{owner}{len(client_key)}:{client_key}"


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
    client_key, lora = _field(rest)
    if owner is None or client_key is None:
        return None
    return Namespace(Owner(owner), client_key, lora)


def _field(text: str) -> tuple[str | None, str]:
    """Split ``<length>:<value><rest>``; (None, text) when ``text`` is not of that form."""
    digits, colon, rest = text.partition(":")
    if not colon or not (digits.isascii() and digits.isdigit()) or int(digits) > len(rest):
        return None, text
    return rest[: int(digits)], rest[int(digits) :]
