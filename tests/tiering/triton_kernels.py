"""The Triton kernels under Triton's interpreter: what they write, and what they read.

Run by ``test_triton_pages.py``: the interpreter has to be chosen before Triton is first imported.
"""

import pytest
import torch

from sglang_ext.tiering.feedback import learn_feedback
from sglang_ext.tiering.folding import Folding
from sglang_ext.tiering.page_plan import PagePlan, plan_pages
from sglang_ext.tiering.quantizer import E4M3, E5M2, FORMATS, Channels, Format, quantize
from sglang_ext.tiering.triton_pages import Shifts, attend_pages, write_codes

_PAGE = 16


def _channels(seed: int, heads: int, dim: int) -> Channels:
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-5, -1, (heads, dim), generator=generator)
    return Channels(torch.exp2(exponents.float()), torch.randn(heads, dim, generator=generator))


def _with_feedback(channels: Channels) -> Channels:
    heads, dim = channels.scale.shape
    queries = torch.randn(heads, 3 * dim, dim, generator=torch.Generator().manual_seed(7))
    queries[..., 1:] += 2 * queries[..., :-1]
    moment = queries.transpose(1, 2) @ queries
    feedback = learn_feedback(moment, channels.scale, torch.ones(heads, dim))
    return Channels(channels.scale, channels.mean, feedback)


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("feedback", [False, True])
@pytest.mark.parametrize(("tokens", "dim"), [(1, 64), (37, 48), (16, 16)])
def test_codes_are_those_of_the_quantizer(
    format: Format, feedback: bool, tokens: int, dim: int
) -> None:
    channels = _channels(1, 2, dim)
    channels = _with_feedback(channels) if feedback else channels
    rows = torch.randn(tokens, 2, dim, generator=torch.Generator().manual_seed(2)).bfloat16()
    rows[0, 0, 0] = 1e30
    found = write_codes(rows, channels, format)
    assert found.dtype == format.dtype
    equal = found.float() == quantize(rows, channels, format).codes.float()
    # Sums in another order may tip a number that lies near a tie.
    assert equal.float().mean() >= (0.98 if feedback else 1.0)


def test_every_number_of_a_format_is_written_as_itself() -> None:
    for format in FORMATS.values():
        numbers = torch.arange(256, dtype=torch.uint8).view(format.dtype).float()
        rows = numbers[torch.isfinite(numbers)].view(1, 1, -1)
        neutral = Channels.neutral(1, rows.shape[-1])
        assert torch.equal(write_codes(rows, neutral, format).float(), rows)


class _Pool:
    """Codes of some requests in scattered pages, with shifts of tokens or without."""

    def __init__(
        self, format: Format, lengths: list[int], heads: int, dim: int, *, latent: int = 0
    ) -> None:
        generator = torch.Generator().manual_seed(3)
        pages = 8 * len(lengths)
        self.of_keys = _channels(1, heads, dim)
        self.of_values = _channels(2, heads, dim)
        if latent:
            scale, mean = self.of_keys.scale[:, :latent], self.of_keys.mean[:, :latent]
            self.of_values = Channels(scale, mean)
        rows = [
            torch.randn(pages * _PAGE, heads, dim, generator=generator)
            + torch.randn(pages * _PAGE, heads, 1, generator=generator)
            for _ in range(2)
        ]
        self.keys = quantize(rows[0], self.of_keys, format, per_token=True)
        self.values = self.keys
        if not latent:
            self.values = quantize(rows[1], self.of_values, format, per_token=True)
        self.width = latent or dim
        order = torch.randperm(pages, generator=generator).view(len(lengths), -1, 1)
        self.table = (order * _PAGE + torch.arange(_PAGE)).flatten(1).int()
        self.lengths = torch.tensor(lengths)

    @property
    def plan(self) -> PagePlan:
        return plan_pages(self.table, torch.arange(len(self.lengths)), self.lengths, _PAGE)

    def expected(self, query: torch.Tensor, scale: float, *, shifted: bool) -> torch.Tensor:
        """Float64 attention over what the codes stand for."""
        keys, values = (
            (
                each.codes.double()
                + (0 if each.shift is None or not shifted else each.shift.double().unsqueeze(-1))
            )[..., : of.scale.shape[1]]
            * of.scale.double()
            + of.mean.double()
            for each, of in ((self.keys, self.of_keys), (self.values, self.of_values))
        )
        group = query.shape[1] // keys.shape[1]
        answers = []
        for line, length in enumerate(self.lengths.tolist()):
            slots = self.table[line, :length].long()
            k, v = (each[slots].repeat_interleave(group, dim=1) for each in (keys, values))
            weights = torch.einsum("hd,thd->ht", query[line].double(), k) * scale
            answers.append(torch.einsum("ht,thd->hd", weights.softmax(dim=-1), v))
        return torch.stack(answers)


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("format", [E4M3, E5M2], ids=lambda format: format.name)
@pytest.mark.parametrize(
    ("query_heads", "kv_heads", "dim", "latent"),
    [(6, 2, 64, 0), (32, 2, 32, 0), (16, 1, 128 + 64, 128)],
    ids=["grouped", "wide group", "latent"],
)
def test_decode_over_pages_is_attention_over_what_they_stand_for(
    format: Format,
    shifted: bool,
    query_heads: int,
    kv_heads: int,
    dim: int,
    latent: int,
) -> None:
    pool = _Pool(format, [1, 16, 77, 128], kv_heads, dim, latent=latent)
    generator = torch.Generator().manual_seed(5)
    query = torch.randn(4, query_heads, dim, generator=generator) / dim**0.25
    folding = Folding(pool.of_keys, pool.of_values, query_heads)
    shifts = Shifts(pool.keys.shift, pool.values.shift) if shifted else None
    keys, values = pool.keys.codes, pool.values.codes[..., : pool.width]
    found = attend_pages(folding.query(query), keys, values, pool.plan, _PAGE, 0.1, shifts)
    output = folding.output(found)
    expected = pool.expected(query, 0.1, shifted=shifted)
    torch.testing.assert_close(output.double(), expected, rtol=1e-4, atol=1e-4)
