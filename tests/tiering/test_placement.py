"""The rule by which a page leaves a tier, in every case."""

import pytest

from sglang_ext.tiering.placement import Lifetime, Verdict, judge
from sglang_ext.types import Tier

LAZY = Lifetime(hbm_ms=10, cpu_ms=20, nvme_ms=30)
STRICT = Lifetime(hbm_ms=10, cpu_ms=20, nvme_ms=30, strict=True)


@pytest.mark.parametrize("lifetime", [LAZY, STRICT], ids=["lazy", "strict"])
@pytest.mark.parametrize("copied", [True, False])
@pytest.mark.parametrize(("tier", "limit"), [(Tier.HBM, 10), (Tier.CPU, 20), (Tier.NVME, 30)])
def test_nothing_goes_before_its_time(
    tier: Tier, limit: int, copied: bool, lifetime: Lifetime
) -> None:
    young = judge(tier, limit - 1, lifetime, lowest=Tier.NVME, copied=copied)
    old = judge(tier, limit, lifetime, lowest=Tier.NVME, copied=copied)
    assert young is Verdict.KEEP
    assert old is not Verdict.KEEP


@pytest.mark.parametrize(
    ("tier", "lowest", "copied", "lazy", "strict"),
    [
        (Tier.HBM, Tier.NVME, True, Verdict.YIELD, Verdict.DEMOTE),
        (Tier.HBM, Tier.NVME, False, Verdict.YIELD, Verdict.YIELD),
        (Tier.HBM, Tier.HBM, False, Verdict.YIELD, Verdict.DROP),
        (Tier.CPU, Tier.NVME, True, Verdict.YIELD, Verdict.DEMOTE),
        (Tier.CPU, Tier.CPU, False, Verdict.YIELD, Verdict.DROP),
        (Tier.NVME, Tier.NVME, False, Verdict.DROP, Verdict.DROP),
    ],
)
def test_what_becomes_of_an_old_copy(
    tier: Tier, lowest: Tier, copied: bool, lazy: Verdict, strict: Verdict
) -> None:
    assert judge(tier, 99, LAZY, lowest=lowest, copied=copied) is lazy
    assert judge(tier, 99, STRICT, lowest=lowest, copied=copied) is strict
