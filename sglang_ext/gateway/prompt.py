"""The beginning of a request's text as a chain of blocks, to find what was sent before.

Engines name their pages in KV events by token ids. To name them so, the gateway would need each
model's tokenizer and chat template, and for 100 kB some 50 ms (SmolLM2's, measured) where it may
take 1.5 in all; and a listener to another machine's events gets all tenants' token ids from a
socket that asks for no key. So a text is taken as the client wrote it: equal text from the start
means equal pages, a block that differs means at most one block too few. Names are drawn with a key
of this process: they say nothing about the text, and no two owners have one in common.
"""

from collections.abc import Iterable, Iterator, Mapping
from hashlib import blake2b
from typing import Any

import orjson

from sglang_ext.tenancy.identity import Identity

__all__ = ["BLOCK_BYTES", "MOST_BYTES", "PROMPTED", "chain_of"]

PROMPTED = frozenset(
    {
        *("/generate", "/v1/completions", "/v1/chat/completions", "/v1/messages"),
        *("/v1/responses", "/api/chat", "/api/generate"),
    }
)
"""Routes whose requests leave pages."""

MOST_BYTES = 2**19
"""The largest body that is looked into; reading it takes some 2 ms."""

BLOCK_BYTES = 1024
"""Some 256 tokens: less is computed sooner than a busy engine gets to it."""

_MOST_BLOCKS = 256
_NAME_BYTES = 16
# Where these differ, equal text has other pages.
_DIVISION = ("model", "lora_path", "extra_key", "cache_salt")
# In the order in which chat templates put them before a model.
_TEXT = ("tools", "instructions", "system", "text", "prompt", "input_ids", "messages", "input")


def chain_of(caller: Identity, body: bytes, key: bytes) -> list[bytes]:
    """Return the names of the whole blocks of a request's text, each for all before it as well.

    ``key``: 32 secret bytes. Empty for what leaves no pages for long, or is no JSON object: what is
    wrong with it, the engine will say. O(body), at most 256 blocks.
    """
    if caller.no_store or caller.tag.ttl_ms is not None or len(body) > MOST_BYTES:
        return []
    try:
        request = orjson.loads(body)
    except ValueError:
        return []
    if not isinstance(request, dict):
        return []
    division = [caller.owner, *(request.get(name) for name in _DIVISION)]
    return _chain(key, _bytes(division), b"".join(_parts(request)))


def _chain(key: bytes, division: bytes, text: bytes) -> list[bytes]:
    names = []
    chained = blake2b(blake2b(division).digest(), digest_size=_NAME_BYTES, key=key)
    whole = min(len(text) // BLOCK_BYTES, _MOST_BLOCKS) * BLOCK_BYTES
    for start in range(0, whole, BLOCK_BYTES):
        chained.update(text[start : start + BLOCK_BYTES])
        names.append(chained.digest())
    return names


def _parts(request: Mapping[str, Any]) -> Iterator[bytes]:
    """Yield the text, so that a longer one begins with the shorter one that it continues."""
    for name in _TEXT:
        yield from (_bytes(item) for item in _items(request.get(name)) if item is not None)


def _items(value: Any) -> Iterable[Any]:
    """Return the messages of a list of them; text and token ids are one item."""
    is_list = isinstance(value, list) and bool(value) and not isinstance(value[0], int)
    return value if is_list else (value,)


def _bytes(value: Any) -> bytes:
    return value.encode() if isinstance(value, str) else orjson.dumps(value)
