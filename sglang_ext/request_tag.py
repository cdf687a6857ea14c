"""What a request says about its pages besides whose they are: its session, and a shorter life.

It travels to the scheduler in front of the namespace (``#<length>:<tag><namespace>``), the one
field that every kind of generation request carries and that no client can write: a client's key
always lies inside the frame of ``sglang_ext.namespace``, which begins with a digit. The scheduler
takes it off before the key is used, so it divides no cache.
"""

import re
from typing import NamedTuple

__all__ = ["NO_TAG", "RequestTag", "attach", "check_session_name", "detach"]

_SESSION_NAME = re.compile(r"[A-Za-z0-9._:@~+=-]{1,128}")
_MARK = "#"


class RequestTag(NamedTuple):
    """``session``: the client's name of its conversation. ``ttl_ms``: how long it wants its pages
    kept at most. Empty and None: it did not say."""

    session: str = ""
    ttl_ms: int | None = None


NO_TAG = RequestTag()


def check_session_name(name: str) -> str:
    """Return a client's name of a session; raises ValueError with what is expected of one."""
    if not _SESSION_NAME.fullmatch(name):
        raise ValueError("expected 1 to 128 of: letters, digits and . _ : @ ~ + = -")
    return name


def attach(tag: RequestTag, extra_key: str) -> str:
    """Return the cache key of a request with its tag in front."""
    if tag == NO_TAG:
        return extra_key
    text = f"{'' if tag.ttl_ms is None else tag.ttl_ms}/{tag.session}"
    return f"{_MARK}{len(text)}:{text}{extra_key}"


def detach(extra_key: str | None) -> tuple[RequestTag, str | None]:
    """Undo ``attach``; a key without a tag is returned as it is."""
    if extra_key is None or not extra_key.startswith(_MARK):
        return NO_TAG, extra_key
    length, _, rest = extra_key[len(_MARK) :].partition(":")
    ttl, _, session = rest[: int(length)].partition("/")
    return RequestTag(session, int(ttl) if ttl else None), rest[int(length) :]
