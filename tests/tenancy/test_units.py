"""Sizes and durations."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.tenancy.units import Size, SizeUnit, parse_duration, parse_size

WHOLE_SIZES = st.builds(
    Size,
    st.sampled_from([SizeUnit.BYTES, SizeUnit.TOKENS]),
    st.integers(0, 10**15 - 1).map(Fraction),
)
PERCENTAGES = st.builds(
    Size,
    st.just(SizeUnit.FRACTION),
    st.integers(0, 10**8).map(lambda n: Fraction(n, 10**8)),
)


@pytest.mark.parametrize(
    ("text", "unit", "amount"),
    [
        ("0B", SizeUnit.BYTES, 0),
        ("256GB", SizeUnit.BYTES, 256 * 10**9),
        ("10GiB", SizeUnit.BYTES, 10 * 2**30),
        ("512 MB", SizeUnit.BYTES, 512 * 10**6),
        ("1.5kB", SizeUnit.BYTES, 1500),
        ("2TB", SizeUnit.BYTES, 2 * 10**12),
        ("20%", SizeUnit.FRACTION, Fraction(1, 5)),
        ("12.5%", SizeUnit.FRACTION, Fraction(1, 8)),
        ("100%", SizeUnit.FRACTION, 1),
        ("5000tok", SizeUnit.TOKENS, 5000),
        ("200ktok", SizeUnit.TOKENS, 200_000),
        ("1Mtok", SizeUnit.TOKENS, 10**6),
    ],
)
def test_size(text: str, unit: SizeUnit, amount: Fraction) -> None:
    assert parse_size(text) == Size(unit, Fraction(amount))


@pytest.mark.parametrize(
    "text", ["", "50", "GB", "-5GB", "5gb", "5Gb", "5 furlongs", "1e3GB", "5GB\n6", "٥GB", "5GBGB"]
)
def test_size_refused(text: str) -> None:
    with pytest.raises(ValueError, match="a size such as 256GB"):
        parse_size(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("101%", "a percentage from 0% to 100%"),
        ("0.5B", "a whole number of bytes"),
        ("0.0001ktok", "a whole number of tokens"),
    ],
)
def test_size_out_of_range(text: str, expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        parse_size(text)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("256GB", "256GB"),
        ("10GiB", "10GiB"),
        ("1500000tok", "1500ktok"),
        ("12.50%", "12.5%"),
        ("0GB", "0B"),
    ],
)
def test_size_shown_as_a_person_writes_it(text: str, shown: str) -> None:
    assert str(parse_size(text)) == shown


@given(WHOLE_SIZES | PERCENTAGES)
def test_size_round_trip(size: Size) -> None:
    assert parse_size(str(size)) == size


@given(st.text())
def test_any_text_is_a_size_or_a_value_error(text: str) -> None:
    try:
        assert parse_size(text).amount >= 0
    except ValueError as error:
        assert str(error)


@pytest.mark.parametrize(
    ("text", "tokens"),
    [("20%", 200), ("33.34%", 333), ("1000B", 10), ("1099B", 10), ("5ktok", 5000), ("0%", 0)],
)
def test_size_to_tokens_rounds_down(text: str, tokens: int) -> None:
    assert parse_size(text).to_tokens(capacity_tokens=1000, bytes_per_token=100) == tokens


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("250ms", 0.25), ("30s", 30), ("10m", 600), ("2h", 7200), ("7d", 604800), ("1.5 h", 5400)],
)
def test_duration(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "30", "s", "30 sec", "-1s", "1w", "1h30m"])
def test_duration_refused(text: str) -> None:
    with pytest.raises(ValueError, match="a duration such as 250ms"):
        parse_duration(text)
