"""From a policy and a cluster to the tokens that each tier holds."""

from sglang_ext.plan.hardware import Cluster
from sglang_ext.plan.tiers import Sizes
from sglang_ext.tenancy.policy import Policy

__all__ = ["sizes_of"]


def sizes_of(cluster: Cluster, policy: Policy | None, block: int) -> Sizes:
    """Return what fits: HBM beside the weights, the other tiers as the policy says.

    A policy's sizes are those of all ranks together. Raises PlanError where the weights do not fit.
    """
    tiers = None if policy is None else policy.tiers
    cpu = 0 if tiers is None or tiers.cpu is None else int(tiers.cpu.size.amount)
    nvme = 0 if tiers is None or tiers.nvme is None else int(tiers.nvme.size.amount)
    return Sizes(
        hbm=cluster.kv_tokens,
        cpu=int(cpu // cluster.kv_bytes),
        nvme=int(nvme // cluster.kv_bytes),
        kv_bytes=cluster.kv_bytes,
        block=block,
    )
