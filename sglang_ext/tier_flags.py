"""From the tiers of a policy to SGLang's flags for its hierarchical cache."""

import json
from collections.abc import Set
from typing import Any

from sglang_ext.errors import UnsupportedError
from sglang_ext.tenancy.policy import Policy
from sglang_ext.tiering.encryption import master_key
from sglang_ext.tiering.remote_mooncake import check_installed

__all__ = [
    "STORAGE_CONFIG",
    "check_master_key",
    "check_remote",
    "check_tiers",
    "ranks",
    "set_cpu_size",
    "tier_flags",
    "tier_switches",
]

_SWITCH = "--enable-hierarchical-cache"
_STORAGE = "--hicache-storage-backend"
_STORAGE_CONFIG = "--hicache-storage-backend-extra-config"
_SIZES = {"--hicache-size", "--hicache-ratio"}

STORAGE_CONFIG = {
    "backend_name": "sglang_ext",
    "module_path": "sglang_ext.tiering.storage_backend",
    "class_name": "ExtStorage",
    "interface_v1": 1,
}
"""What names our store to SGLang. Folder, size and weights are added once the model is loaded."""

_BY_SLOT = {
    "enable_return_routed_experts": "--enable-return-routed-experts",
    "enable_return_indexer_topk": "--enable-return-indexer-topk",
}

_CPU_COPIES = {"--hicache-io-backend": "direct", "--hicache-mem-layout": "layer_first"}


def tier_switches(policy: Policy, given: Set[str]) -> list[str]:
    """Return the flags without a value that the tiers need."""
    wanted = policy.tiers.cpu is not None and _SWITCH not in given
    return [_SWITCH] if wanted else []


def tier_flags(policy: Policy, given: Set[str], *, on_cpu: bool) -> dict[str, str]:
    """Return the flags that the tiers need, with their values; none where no CPU tier is wanted.

    Copies go down as soon as a page is computed, so that freeing one later costs nothing. A
    storage backend on the command line takes the place of the NVMe tier.
    """
    if policy.tiers.cpu is None:
        return {}
    flags = {"--hicache-write-policy": "write_through"}
    if on_cpu:
        flags |= _CPU_COPIES
    if policy.tiers.nvme is not None and _STORAGE not in given:
        flags |= {_STORAGE: "dynamic", _STORAGE_CONFIG: json.dumps(STORAGE_CONFIG)}
    return flags


def ranks(server_args: Any) -> int:
    """Return how many schedulers of this engine have pools of their own."""
    replicas = 1 if server_args.enable_dp_attention else server_args.dp_size
    return int(server_args.tp_size * server_args.pp_size * replicas)


def set_cpu_size(server_args: Any, policy: Policy, given: Set[str]) -> None:
    """Give the host pools of all ranks together the bytes of the CPU tier.

    SGLang's flag takes whole gigabytes, the field behind it any number. Each rank rounds up to
    whole pages, one more than fit at most. A size or ratio on the command line wins.
    """
    if policy.tiers.cpu is not None and not given & _SIZES:
        server_args.hicache_size = float(policy.tiers.cpu.size.amount) / 1e9 / ranks(server_args)


def check_master_key(policy: Policy) -> None:
    """Raise KeyRingError when the policy names a master key that cannot be used."""
    nvme = policy.tiers.nvme
    if nvme is not None and nvme.master_key is not None:
        master_key(nvme.master_key)


def check_remote(policy: Policy) -> None:
    """Raise UnsupportedError where the policy has a remote tier whose client is not installed."""
    if policy.tiers.remote is not None:
        check_installed()


def check_tiers(server_args: Any) -> None:
    """Raise UnsupportedError where pages that come back would not be all that was computed.

    ``server_args`` is a resolved view of SGLang's ServerArgs.
    """
    for field, flag in _BY_SLOT.items():
        if server_args.enable_hierarchical_cache and getattr(server_args, field):
            raise UnsupportedError(
                f"tiers.cpu does not work with {flag}: SGLang keeps what that returns by the place "
                "of a token in GPU memory, where a page that came back finds what was there before "
                "it; remove one of the two"
            )
    config = server_args.hicache_storage_backend_extra_config or ""
    if server_args.hicache_storage_backend != "dynamic" or '"ExtStorage"' not in config:
        return
    if server_args.speculative_algorithm is not None:
        raise UnsupportedError(
            "tiers.nvme does not work with --speculative-algorithm yet: what the draft model "
            "computes is not stored; remove one of the two"
        )
    if server_args.dp_size > 1 and not server_args.enable_dp_attention:
        raise UnsupportedError(
            "tiers.nvme does not work with --dp-size above 1 yet: the replicas would share one "
            "folder; start one server for each, with a folder of its own"
        )
