"""Torch stand-ins for Triton kernels."""

import math

import torch

from sglang_ext.patches.cpu_kernels import cap_logits, last_locations


def test_last_locations_are_looked_up_or_minus_one() -> None:
    table = torch.tensor([[9, 9, 9], [4, 5, 6], [7, 8, 0]], dtype=torch.int32)
    found = last_locations(table, torch.tensor([1, 2, 0]), torch.tensor([3, 1, 0]))
    assert found.tolist() == [6, 7, -1]
    assert found.dtype == torch.int64


def test_logits_are_capped_in_place() -> None:
    logits = torch.tensor([[-1000.0, 0.0, 1.0]])
    capped = cap_logits(logits, 10.0)
    assert capped is logits
    expected = [-10.0, 0.0, 10 * math.tanh(0.1)]
    torch.testing.assert_close(capped, torch.tensor([expected]))
