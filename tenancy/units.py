"""Sizes and durations as the policy file writes them: ``256GB``, ``20%``, ``200ktok``, ``30s``."""

import re
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction

__all__ = ["Size", "SizeUnit", "parse_duration", "parse_size"]

_SIZE_EXPECTED = "a size such as 256GB, 10GiB, 20% or 200ktok"
_DURATION_EXPECTED = "a duration such as 250ms, 30s, 10m, 2h or 7d"

# Bounded digits: a number from a file never becomes an integer that is slow to compute with.
_QUANTITY = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,6})?) ?([A-Za-z%]+)")


class SizeUnit(StrEnum):
    """What the amount of a `Size` counts."""

    BYTES = "bytes"
    FRACTION = "fraction"
    TOKENS = "tokens"


# In ascending order of scale within a unit, which `Size.__str__` relies on.
_SIZE_SUFFIXES: dict[str, tuple[SizeUnit, Fraction]] = {
    "%": (SizeUnit.FRACTION, Fraction(1, 100)),
    "tok": (SizeUnit.TOKENS, Fraction(1)),
    "ktok": (SizeUnit.TOKENS, Fraction(10**3)),
    "Mtok": (SizeUnit.TOKENS, Fraction(10**6)),
    "B": (SizeUnit.BYTES, Fraction(1)),
    "kB": (SizeUnit.BYTES, Fraction(10**3)),
    "KB": (SizeUnit.BYTES, Fraction(10**3)),
    "KiB": (SizeUnit.BYTES, Fraction(2**10)),
    "MB": (SizeUnit.BYTES, Fraction(10**6)),
    "MiB": (SizeUnit.BYTES, Fraction(2**20)),
    "GB": (SizeUnit.BYTES, Fraction(10**9)),
    "GiB": (SizeUnit.BYTES, Fraction(2**30)),
    "TB": (SizeUnit.BYTES, Fraction(10**12)),
    "TiB": (SizeUnit.BYTES, Fraction(2**40)),
}

_SECONDS = {
    "ms": Fraction(1, 1000),
    "s": Fraction(1),
    "m": Fraction(60),
    "h": Fraction(3600),
    "d": Fraction(86400),
}


@dataclass(frozen=True)
class Size:
    """A part of a tier.

    ``amount`` is a whole number of bytes or tokens, or a fraction of the tier from 0 to 1. It is
    exact, so that ten reserves of 10% are the whole tier and not a little less.
    """

    unit: SizeUnit
    amount: Fraction

    def to_tokens(self, capacity_tokens: int, bytes_per_token: int) -> int:
        """Whole tokens in this size, rounded down and not limited to the tier's capacity."""
        if self.unit is SizeUnit.FRACTION:
            return int(self.amount * capacity_tokens)
        if self.unit is SizeUnit.BYTES:
            return int(self.amount // bytes_per_token)
        return int(self.amount)

    def __str__(self) -> str:
        """The shortest text that `parse_size` reads as this size."""
        if self.unit is SizeUnit.FRACTION:
            percent = f"{float(self.amount * 100):.6f}".rstrip("0").rstrip(".")
            return f"{percent}%"
        floor = max(self.amount, Fraction(1))
        fitting = [
            (name, scale)
            for name, (unit, scale) in _SIZE_SUFFIXES.items()
            if unit is self.unit and scale <= floor and self.amount % scale == 0
        ]
        name, scale = fitting[-1]
        return f"{self.amount / scale}{name}"


def parse_size(text: str) -> Size:
    """Read ``256GB``, ``10GiB``, ``20%``, ``200ktok``.

    Decimal suffixes count in 1000, binary ones (``GiB``) in 1024. Raises ValueError that says what
    was expected.
    """
    number, suffix = _split(text, _SIZE_EXPECTED)
    if suffix not in _SIZE_SUFFIXES:
        raise ValueError(f"{_SIZE_EXPECTED} (units: {', '.join(_SIZE_SUFFIXES)})")
    unit, scale = _SIZE_SUFFIXES[suffix]
    amount = number * scale
    if unit is SizeUnit.FRACTION and amount > 1:
        raise ValueError("a percentage from 0% to 100%")
    if unit is not SizeUnit.FRACTION and amount.denominator != 1:
        raise ValueError(f"a whole number of {unit}")
    return Size(unit, amount)


def parse_duration(text: str) -> float:
    """Read ``250ms``, ``30s``, ``10m``, ``2h``, ``7d`` as seconds.

    Raises ValueError that says what was expected.
    """
    number, suffix = _split(text, _DURATION_EXPECTED)
    if suffix not in _SECONDS:
        raise ValueError(_DURATION_EXPECTED)
    return float(number * _SECONDS[suffix])


def _split(text: str, expected: str) -> tuple[Fraction, str]:
    match = _QUANTITY.fullmatch(text.strip())
    if match is None:
        raise ValueError(expected)
    return Fraction(match[1]), match[2]
