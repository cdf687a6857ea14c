"""What calibration learns about a layer's channels, and the scale and mean that follow from it."""

import torch

from sglang_ext.tiering.quantizer import Channels, Format, require_finite

__all__ = ["HEADROOM", "ChannelStatistics"]

HEADROOM = 0.5
"""Share of the format's range that the calibration text may fill; the rest is for other text."""


class ChannelStatistics:
    """Running extremes and moments of each channel of K or V, over any number of tokens."""

    def __init__(self, heads: int, dim: int) -> None:
        self.tokens = 0
        self._sum = torch.zeros(heads, dim, dtype=torch.float64)
        self._squares = torch.zeros(heads, dim, dtype=torch.float64)
        self._lowest = torch.full((heads, dim), torch.inf)
        self._highest = torch.full((heads, dim), -torch.inf)

    def add(self, rows: torch.Tensor) -> None:
        """Take in rows [tokens, heads, dim]; raise ``ValueError`` when they are not finite."""
        require_finite(rows, "the calibration text's K or V")
        rows = rows.float()
        self.tokens += rows.shape[0]
        self._sum += rows.double().sum(dim=0)
        self._squares += rows.double().square().sum(dim=0)
        self._lowest = torch.minimum(self._lowest, rows.amin(dim=0))
        self._highest = torch.maximum(self._highest, rows.amax(dim=0))

    def channels(self, format: Format, *, centred: bool = True) -> Channels:
        """Return the smallest power-of-two scales that keep the text within ``HEADROOM``.

        ``centred`` takes each channel's mean off first. A channel that was always equal to its
        mean has scale 1.
        """
        if self.tokens == 0:
            raise ValueError("no token was seen; a calibration text must have at least one")
        mean = (self._sum / self.tokens).float() if centred else torch.zeros_like(self._lowest)
        reach = torch.maximum(self._highest - mean, mean - self._lowest)
        exponent = torch.ceil(torch.log2(reach / (format.largest * HEADROOM)))
        scale = torch.where(reach > 0, torch.exp2(exponent), torch.ones_like(reach))
        return Channels(scale, mean)

    def power(self, channels: Channels) -> torch.Tensor:
        """Return each channel's mean square in the normalised domain, float64 [heads, dim]."""
        mean, mu = self._sum / self.tokens, channels.mean.double()
        square = self._squares / self.tokens - 2 * mu * mean + mu.square()
        return square / channels.scale.double().square()
