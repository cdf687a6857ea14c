"""Every mode that would serve without tenant identity is refused, with SGLang's real parser."""

import json
import socket
from types import SimpleNamespace

import pytest
from sglang.srt.server_args import prepare_server_args

from sglang_ext.errors import UnsupportedError
from sglang_ext.launch_checks import check_environment, check_modes, check_port, check_sealed
from sglang_ext.tenancy.loader import parse_policy
from sglang_ext.tier_flags import STORAGE_CONFIG

_MODEL = ["--model-path", "unused", "--device", "cpu", "--radix-cache-backend", "sglang_ext"]


@pytest.mark.parametrize(
    "flags",
    [
        ["--tokenizer-worker-num", "2"],
        ["--grpc-port", "31999"],
        ["--smg-grpc-mode"],
        ["--use-ray"],
        ["--encoder-only"],
        ["--disaggregation-mode", "prefill"],
        ["--disable-radix-cache"],
        ["--enable-lmcache"],
        ["--enable-flexkv"],
        ["--enable-response-store"],
        ["--radix-cache-backend", "other"],
        ["--enable-custom-logit-processor"],
        ["--speculative-algorithm", "NGRAM"],
        ["--trust-mm-content-hashes"],
        ["--api-key", "secret"],
        ["--admin-api-key", "secret"],
    ],
    ids=lambda flags: flags[0],
)
def test_mode_is_refused(flags: list[str]) -> None:
    with pytest.raises(UnsupportedError, match=flags[0]) as refusal:
        check_modes(prepare_server_args([*_MODEL, *flags]))
    assert "secret" not in str(refusal.value)


def test_an_abbreviated_flag_is_seen() -> None:
    """SGLang's parser takes abbreviations, which the check of the command line does not know."""
    with pytest.raises(UnsupportedError, match="--radix-cache-backend"):
        check_modes(prepare_server_args([*_MODEL, "--radix-cache-back", "other"]))


def test_an_ordinary_server_is_not_refused() -> None:
    check_modes(prepare_server_args(_MODEL))


@pytest.mark.parametrize(
    ("fields", "flag"),
    [
        ({"speculative_algorithm": "EAGLE"}, "--speculative-algorithm"),
        ({"hicache_storage_backend": "file"}, "--hicache-storage-backend"),
        ({"hicache_storage_backend": "dynamic"}, "--hicache-storage-backend"),
    ],
)
def test_what_would_keep_text_of_a_sealed_tenant_is_refused(
    fields: dict[str, str], flag: str
) -> None:
    args = SimpleNamespace(
        **{
            **dict.fromkeys(("speculative_algorithm", "hicache_storage_backend")),
            "hicache_storage_backend_extra_config": None,
            **fields,
        }
    )
    private, sealed = (
        parse_policy(f"version: 1\ntenants: {{bank: {{isolation: {level}}}}}")
        for level in ("private", "sealed")
    )
    check_sealed(args, private)
    with pytest.raises(UnsupportedError, match=rf"tenants.bank.isolation: sealed .*{flag}"):
        check_sealed(args, sealed)


def test_the_nvme_tier_may_hold_pages_of_a_sealed_tenant() -> None:
    args = SimpleNamespace(
        speculative_algorithm=None,
        hicache_storage_backend="dynamic",
        hicache_storage_backend_extra_config=json.dumps(STORAGE_CONFIG),
    )
    check_sealed(args, parse_policy("version: 1\ntenants: {bank: {isolation: sealed}}"))


@pytest.mark.parametrize("value", ["1", "true"])
def test_the_rust_server_is_refused(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("SGLANG_RUST_SERVER", value)
    with pytest.raises(UnsupportedError, match="SGLANG_RUST_SERVER"):
        check_environment()


def test_the_rust_server_may_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_RUST_SERVER", "0")
    check_environment()


def test_port_in_use_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UnsupportedError, match=f"port {port} on 127.0.0.1 is taken"):
            check_port("127.0.0.1", port)
    check_port("127.0.0.1", port)


def test_foreign_address_is_named() -> None:
    with pytest.raises(UnsupportedError, match="cannot listen on 192.0.2.1"):
        check_port("192.0.2.1", 30000)
