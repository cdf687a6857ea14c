"""Whether bytes are worth their way up: from measured times, loading or computing again.

Each way up is a line, ``seconds = fixed + per_token * tokens``, fitted by least squares over what
was measured, in which every new measurement takes a tenth of the weight. Of computing only the
slope counts: a request runs the model once in any case, whatever of its text is loaded.
"""

from collections.abc import Iterable, Mapping
from enum import StrEnum
from math import ceil, inf

from sglang_ext.types import Tier

__all__ = ["NEVER", "Choice", "Line", "LoadOrCompute"]

NEVER = 2**40
"""Tokens from which loading pays off where it never does."""

_NEW = 0.1
_NANO = 1e9
_TRY_EVERY = 32


class Choice(StrEnum):
    """How a request came to tokens that a lower tier holds or may hold."""

    LOAD = "load"
    RECOMPUTE = "recompute"


class Line:
    """Seconds by tokens, fitted to what was measured lately. O(1) a measurement."""

    def __init__(self) -> None:
        self._weight = 0.0
        self._tokens = self._seconds = self._squares = self._products = 0.0

    def __bool__(self) -> bool:
        return self._weight > 0

    def measured(self, tokens: int, seconds: float) -> None:
        """Take in that ``tokens`` tokens, at least one, took ``seconds``."""
        new = _NEW if self else 1.0
        self._weight = 1.0
        self._tokens += new * (tokens - self._tokens)
        self._seconds += new * (seconds - self._seconds)
        self._squares += new * (tokens * tokens - self._squares)
        self._products += new * (tokens * seconds - self._products)

    @property
    def per_token(self) -> float:
        """Seconds for each further token."""
        spread = self._squares - self._tokens**2
        if spread <= 1e-6 * self._squares:
            # One size only says nothing about the fixed part.
            return self._seconds / self._tokens if self else 0.0
        slope = (self._products - self._tokens * self._seconds) / spread
        return min(max(slope, 0.0), self._seconds / self._tokens)

    @property
    def fixed(self) -> float:
        """Seconds however few tokens there are, never negative."""
        return max(0.0, self._seconds - self.per_token * self._tokens)


class LoadOrCompute:
    """The three ways of one rank, and the answers that all ranks agreed on.

    ``proposal`` is what this rank would say; ``agree`` takes the greatest of all ranks for each
    number, so that the slowest rank decides. Between two such rounds answers stay as they are.
    """

    def __init__(self, default_tokens: int) -> None:
        """``default_tokens``: from how many tokens on a fetch pays off as long as nobody knows."""
        self.always = False
        """Load whatever is there, however long it takes, up to SGLang's own time limits."""
        self._default = default_tokens
        self._lines = {Tier.CPU: Line(), Tier.NVME: Line()}
        self._compute = Line()
        self._least = {Tier.CPU: 1, Tier.NVME: default_tokens}
        self._computing = 0
        self._declined = dict.fromkeys(self._lines, 0)
        self._proposal: list[int] | None = None

    def loaded(self, tier: Tier, tokens: int, seconds: float) -> None:
        """Take in how long tokens took from ``tier`` to the tier above it."""
        self._lines[tier].measured(tokens, seconds)
        self._proposal = None

    def computed(self, tokens: int, seconds: float) -> None:
        """Take in how long a prefill of so many tokens took."""
        self._compute.measured(tokens, seconds)
        self._proposal = None

    def proposal(self) -> list[int]:
        """Return what this rank would answer, as whole numbers to be agreed on. O(1)."""
        if self._proposal is None:
            least = [self._break_even(self._ways(tier), tier) for tier in self._lines]
            self._proposal = [*least, round(self._compute.per_token * _NANO)]
        return self._proposal

    def agree(self, greatest: Iterable[int]) -> None:
        """Answer so from now on: for each number of ``proposal`` the greatest of all ranks."""
        cpu, nvme, self._computing = greatest
        self._least = {Tier.CPU: cpu, Tier.NVME: nvme}

    @property
    def least(self) -> Mapping[Tier, int]:
        """From how many tokens on loading them from a tier is quicker than computing them."""
        return self._least

    def choose(self, tier: Tier, tokens: int) -> Choice:
        """Return what to do about ``tokens`` tokens that ``tier`` holds or may hold.

        What is never tried is never measured again: every 32nd answer is to load all the same.
        """
        if self.always or tokens >= self._least[tier]:
            return Choice.LOAD
        self._declined[tier] += 1
        tried = self._declined[tier] % _TRY_EVERY == 0 and tokens >= self._default
        return Choice.LOAD if tried else Choice.RECOMPUTE

    def patience(self, tokens: int) -> float | None:
        """Return the seconds that computing ``tokens`` takes: so long is a fetch worth waiting for.

        None while nothing was measured, and where everything is loaded.
        """
        if self.always or not self._computing:
            return None
        return tokens * self._computing / _NANO

    def _ways(self, tier: Tier) -> list[Line]:
        """Return the ways from ``tier`` to HBM."""
        return [line for below, line in self._lines.items() if tier is below or below is Tier.CPU]

    def _break_even(self, ways: list[Line], tier: Tier) -> int:
        if not (self._compute and self._lines[tier]):
            return self._default if tier is Tier.NVME else 1
        gain = self._compute.per_token - sum(line.per_token for line in ways)
        fixed = sum(line.fixed for line in ways)
        tokens = fixed / gain if gain > 0 else inf
        return max(1, ceil(min(tokens, NEVER)))
