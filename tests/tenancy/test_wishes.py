"""What a client asks for in headers, and how a wrong value is refused."""

import pytest

from sglang_ext.request_tag import NO_TAG, RequestTag
from sglang_ext.tenancy.wishes import no_store, request_tag


@pytest.mark.parametrize(
    ("headers", "tag"),
    [
        ([], NO_TAG),
        ([(b"x-session-id", b"chat-1")], RequestTag("chat-1")),
        ([(b"X-Session-Id", b" chat-1 ")], RequestTag("chat-1")),
        ([(b"x-kv-ttl", b"30s")], RequestTag("", 30_000)),
        ([(b"x-kv-ttl", b"250ms"), (b"x-session-id", b"s")], RequestTag("s", 250)),
        ([(b"x-kv-ttl", b"0s")], RequestTag("", 1)),
        ([(b"x-kv-ttl", b"7d")], RequestTag("", 7 * 24 * 3600 * 1000)),
    ],
    ids=str,
)
def test_read(headers: list[tuple[bytes, bytes]], tag: RequestTag) -> None:
    assert request_tag(headers) == tag


@pytest.mark.parametrize(
    ("headers", "words"),
    [
        ([(b"x-session-id", b"")], "X-Session-Id: expected 1 to 128"),
        ([(b"x-session-id", b"a/b")], "X-Session-Id: expected 1 to 128"),
        ([(b"x-session-id", b"x" * 129)], "X-Session-Id: expected 1 to 128"),
        ([(b"x-session-id", b"\xff")], "X-Session-Id: expected 1 to 128"),
        ([(b"x-session-id", b"a"), (b"x-session-id", b"b")], "X-Session-Id: found 2"),
        ([(b"x-kv-ttl", b"30")], "X-KV-TTL: found '30', expected a duration such as"),
        ([(b"x-kv-ttl", b"-1s")], "X-KV-TTL: found '-1s'"),
        ([(b"x-kv-ttl", b"soon")], "X-KV-TTL: found 'soon'"),
        ([(b"x-kv-ttl", b"")], "X-KV-TTL: found ''"),
        ([(b"x-kv-ttl", b"1s"), (b"X-KV-TTL", b"1s")], "X-KV-TTL: found 2"),
    ],
    ids=str,
)
def test_refused_in_words(headers: list[tuple[bytes, bytes]], words: str) -> None:
    with pytest.raises(ValueError) as error:
        request_tag(headers)
    assert words in str(error.value)


def test_no_store_is_read_from_any_of_its_headers() -> None:
    assert no_store([(b"cache-control", b"max-age=0"), (b"Cache-Control", b"private, no-store")])
    assert not no_store([(b"cache-control", b"no-cache"), (b"x", b"no-store")])
