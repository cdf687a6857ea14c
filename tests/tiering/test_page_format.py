"""The bytes of a page, and every way in which they can be wrong."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.tiering.page_format import (
    HEADER_BYTES,
    MAX_KEY_BYTES,
    Fingerprint,
    PageHeader,
    Reject,
    check_page,
    decode,
    lay_out,
    parse_header,
    set_tag,
    stamp,
)
from sglang_ext.types import PUBLIC, Owner
from tests.tiering.stores import ALICE, BOB, FINGERPRINT

KEY = b"k" * 32
BODY = bytes(range(256)) * 20
# Where each field of the fixed part lies: [first, last).
FIELDS = {
    "magic": (0, 8),
    "version": (8, 12),
    "used": (12, 16),
    "checksum": (16, 32),
    "tag": (32, 48),
    "salt": (48, 64),
    "nonce": (64, 76),
    "body_bytes": (76, 84),
    "written_ms": (84, 92),
    "lengths": (92, 102),
    "names": (102, 200),
    "body": (HEADER_BYTES, HEADER_BYTES + len(BODY)),
}


def make_page(
    owner: Owner = ALICE, key: bytes = KEY, fingerprint: Fingerprint = FINGERPRINT
) -> memoryview:
    page = memoryview(bytearray(HEADER_BYTES + len(BODY)))
    page[HEADER_BYTES:] = BODY
    lay_out(page, PageHeader(fingerprint.groups, owner, key, len(BODY), 5))
    stamp(page, len(BODY))
    return page


@pytest.mark.parametrize("owner", [ALICE, PUBLIC, Owner("g:größe")])
def test_round_trip(owner: Owner) -> None:
    page = make_page(owner)
    body = decode(page, FINGERPRINT, owner, KEY)
    assert isinstance(body, memoryview)
    assert bytes(body) == BODY
    assert parse_header(page) == PageHeader(FINGERPRINT.groups, owner, KEY, len(BODY), 5)


@pytest.mark.trial(48)
@pytest.mark.trial(49)
@pytest.mark.trial(66)
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model_id": "other"}, Reject.OTHER_MODEL),
        ({"weights_hash": "other"}, Reject.OTHER_MODEL),
        ({"kv_dtype": "fp8_e4m3"}, Reject.OTHER_FORMAT),
        ({"scales": "other"}, Reject.OTHER_FORMAT),
        ({"layout": "page_first"}, Reject.OTHER_FORMAT),
        ({"page_size": 32}, Reject.OTHER_FORMAT),
        ({"tp_rank": 1}, Reject.OTHER_RANK),
        ({"tp_size": 2}, Reject.OTHER_RANK),
        ({"pp_rank": 1}, Reject.OTHER_RANK),
        ({"pp_size": 2}, Reject.OTHER_RANK),
    ],
)
def test_a_page_of_another_engine_is_refused(change: dict[str, object], reason: Reject) -> None:
    page = make_page(fingerprint=replace(FINGERPRINT, **change))  # type: ignore[arg-type]
    assert decode(page, FINGERPRINT, ALICE, KEY) is reason


def test_fields_of_a_fingerprint_do_not_run_into_each_other() -> None:
    left = replace(FINGERPRINT, model_id="ab", weights_hash="c")
    right = replace(FINGERPRINT, model_id="a", weights_hash="bc")
    assert left.groups != right.groups


@pytest.mark.trial(63)
def test_a_whole_page_of_somebody_else_is_refused() -> None:
    assert decode(make_page(), FINGERPRINT, BOB, KEY) is Reject.OTHER_OWNER
    assert decode(make_page(), FINGERPRINT, ALICE, b"x" * 32) is Reject.OTHER_KEY


@pytest.mark.trial(70)
@pytest.mark.parametrize("field", FIELDS)
def test_one_flipped_bit_anywhere_is_refused(field: str) -> None:
    first, last = FIELDS[field]
    for place in range(first, min(last, first + 256)):
        for bit in range(8):
            page = make_page()
            page[place] ^= 1 << bit
            assert isinstance(decode(page, FINGERPRINT, ALICE, KEY), Reject), (place, bit)


def test_reasons_of_damage() -> None:
    assert check_page(memoryview(bytes(8192))) is Reject.EMPTY
    assert check_page(memoryview(b"x" * 8192)) is Reject.NOT_A_PAGE
    assert check_page(make_page()[:100]) is Reject.TRUNCATED
    assert check_page(make_page()[:-1]) is Reject.TRUNCATED
    page = make_page()
    page[8] += 1
    assert check_page(page) is Reject.VERSION
    page = make_page()
    page[HEADER_BYTES] ^= 1
    assert check_page(page) is Reject.CORRUPT


@given(st.binary(max_size=300), st.integers(0, 200))
def test_no_bytes_make_it_raise(noise: bytes, place: int) -> None:
    page = make_page()
    page[place : place + len(noise)] = noise
    for view in (page, page[: len(noise)], memoryview(noise)):
        assert decode(view, FINGERPRINT, ALICE, KEY) is not None


def test_the_tag_is_covered_by_the_checksum() -> None:
    page = make_page()
    set_tag(page, b"t" * 16)
    assert check_page(page) is Reject.CORRUPT


def test_names_that_do_not_fit_are_a_programming_error() -> None:
    with pytest.raises(ValueError, match="too long"):
        make_page(key=b"k" * (MAX_KEY_BYTES + 1))
    with pytest.raises(ValueError, match="too long"):
        make_page(owner=Owner("x" * HEADER_BYTES))
