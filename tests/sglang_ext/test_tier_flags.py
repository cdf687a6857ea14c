"""From a policy's tiers to SGLang's flags: exact sizes, and a given flag wins."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_ext.errors import KeyRingError, UnsupportedError
from sglang_ext.launch_flags import with_defaults
from sglang_ext.tenancy.loader import parse_policy
from sglang_ext.tenancy.policy import Policy
from sglang_ext.tier_flags import (
    STORAGE_CONFIG,
    check_master_key,
    check_remote,
    check_tiers,
    ranks,
    set_cpu_size,
)

_STORAGE = "--hicache-storage-backend"
_CONFIG = "--hicache-storage-backend-extra-config"


def policy(tiers: str = "{}") -> Policy:
    return parse_policy(f"version: 1\ntiers: {tiers}\ntenants: {{a: {{}}}}")


CPU = policy("{cpu: {size: 1500MB}}")
BOTH = policy("{cpu: {size: 1500MB}, nvme: {size: 1GB, path: /pages}}")


def argv(policy: Policy, *given: str, on_cpu: bool = True) -> list[str]:
    return with_defaults(given, policy, on_cpu=on_cpu, demo_model=None)


def args(**changes: Any) -> SimpleNamespace:
    fields = {
        "tp_size": 1,
        "pp_size": 1,
        "dp_size": 1,
        "enable_dp_attention": False,
        "hicache_size": 0,
        "hicache_storage_backend": "dynamic",
        "hicache_storage_backend_extra_config": json.dumps(STORAGE_CONFIG),
        "speculative_algorithm": None,
        "enable_hierarchical_cache": True,
        "enable_return_routed_experts": False,
        "enable_return_indexer_topk": False,
    }
    return SimpleNamespace(**{**fields, **changes})


def test_without_tiers_nothing_is_added() -> None:
    assert not [word for word in argv(policy()) if "hicache" in word or "hierarchical" in word]


def test_a_cpu_tier_turns_the_hierarchical_cache_on() -> None:
    words = argv(CPU)
    assert "--enable-hierarchical-cache" in words
    assert words[words.index("--hicache-write-policy") + 1] == "write_through"
    assert words[words.index("--hicache-io-backend") + 1] == "direct"
    assert words[words.index("--hicache-mem-layout") + 1] == "layer_first"
    assert _STORAGE not in words


def test_an_accelerator_keeps_sglangs_own_copies() -> None:
    words = argv(CPU, on_cpu=False)
    assert "--enable-hierarchical-cache" in words
    assert not {"--hicache-io-backend", "--hicache-mem-layout"} & set(words)


def test_an_nvme_tier_names_our_store() -> None:
    words = argv(BOTH)
    assert words[words.index(_STORAGE) + 1] == "dynamic"
    assert json.loads(words[words.index(_CONFIG) + 1]) == STORAGE_CONFIG


@pytest.mark.parametrize(
    "given",
    [
        ("--hicache-write-policy", "write_back"),
        ("--hicache-io-backend=kernel",),
        ("--enable-hicache",),
    ],
    ids=lambda given: given[0],
)
def test_a_given_flag_wins(given: tuple[str, ...]) -> None:
    words = argv(BOTH, *given)
    name = given[0].partition("=")[0]
    found = [word for word in words if word.partition("=")[0] == name]
    assert len(found) == 1
    assert words[-len(given) :] == list(given)


def test_another_storage_backend_takes_the_place_of_the_nvme_tier() -> None:
    assert _CONFIG not in argv(BOTH, _STORAGE, "file")


def test_all_ranks_together_get_the_bytes_of_the_tier() -> None:
    server_args = args(tp_size=2, pp_size=3)
    set_cpu_size(server_args, CPU, set())
    assert server_args.hicache_size * 1e9 * 6 == pytest.approx(1_500_000_000)


@pytest.mark.parametrize("flag", ["--hicache-size", "--hicache-ratio"])
def test_a_given_size_wins(flag: str) -> None:
    server_args = args()
    set_cpu_size(server_args, CPU, {flag})
    assert server_args.hicache_size == 0


def test_without_a_cpu_tier_no_size_is_set() -> None:
    server_args = args()
    set_cpu_size(server_args, policy(), set())
    assert server_args.hicache_size == 0


def test_replicas_count_unless_they_share_their_ranks() -> None:
    assert ranks(args(tp_size=2, dp_size=2)) == 4
    assert ranks(args(tp_size=4, dp_size=2, enable_dp_attention=True)) == 4


@pytest.mark.parametrize(
    ("changes", "flag"),
    [
        ({"speculative_algorithm": "EAGLE"}, "--speculative-algorithm"),
        ({"dp_size": 2}, "--dp-size"),
    ],
)
def test_a_mode_that_the_store_cannot_serve_is_refused(changes: dict[str, Any], flag: str) -> None:
    with pytest.raises(UnsupportedError, match=flag):
        check_tiers(args(**changes))
    check_tiers(args(**changes, hicache_storage_backend=None))
    check_tiers(args(**changes, hicache_storage_backend_extra_config=None))


def test_replicas_under_dp_attention_have_folders_of_their_own() -> None:
    check_tiers(args(dp_size=2, enable_dp_attention=True))


@pytest.mark.trial(44)
@pytest.mark.parametrize("field", ["enable_return_routed_experts", "enable_return_indexer_topk"])
def test_what_sglang_keeps_by_slot_is_refused_where_pages_come_back(field: str) -> None:
    with pytest.raises(UnsupportedError, match=field.replace("_", "-")):
        check_tiers(args(**{field: True}))
    check_tiers(args(**{field: True, "enable_hierarchical_cache": False}))


def test_a_master_key_that_cannot_be_used_is_refused_before_anything_starts(
    tmp_path: Path,
) -> None:
    key = tmp_path / "key"
    keyed = policy(f"{{cpu: {{size: 1GB}}, nvme: {{size: 1GB, path: /p, master_key: {key}}}}}")
    with pytest.raises(KeyRingError, match="No such file"):
        check_master_key(keyed)
    key.write_text("ab" * 32)
    key.chmod(0o644)
    with pytest.raises(KeyRingError, match="chmod 600"):
        check_master_key(keyed)
    key.chmod(0o600)
    check_master_key(keyed)
    check_master_key(BOTH)


def test_a_remote_tier_without_its_client_is_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing() -> None:
        raise UnsupportedError("tiers.remote: not installed")

    monkeypatch.setattr("sglang_ext.tier_flags.check_installed", missing)
    nvme = "nvme: {size: 1GB, path: /p}"
    remote = "remote: {backend: mooncake, master: 'kv:1', size: 1GB}"
    with pytest.raises(UnsupportedError, match="not installed"):
        check_remote(policy(f"{{cpu: {{size: 1GB}}, {nvme}, {remote}}}"))
    check_remote(BOTH)
