"""What must hold before a server with tenants may start."""

import errno
import os
import socket
from typing import Any

from sglang_ext.errors import UnsupportedError
from sglang_ext.namespace import is_sealed
from sglang_ext.tenancy.policy import Policy

__all__ = ["check_environment", "check_modes", "check_port", "check_sealed"]

_FALSE = {"", "0", "false", "no", "off"}

# NGRAM is not among them: it drafts from the text of every tenant, and how fast it is tells of it.
_OWN_DRAFTS = (
    *(None, "EAGLE", "EAGLE3", "NEXTN", "STANDALONE"),
    *("FROZEN_KV_MTP", "DFLASH", "DSPARK", "UNO"),
)

# Field of SGLang's ServerArgs, its flag, the only values that are supported, why.
_MODES: tuple[tuple[str, str, tuple[Any, ...], str], ...] = (
    ("tokenizer_worker_num", "--tokenizer-worker-num", (1,), "its workers bypass tenant identity"),
    ("grpc_port", "--grpc-port", (None,), "gRPC bypasses tenant identity"),
    ("smg_grpc_mode", "--smg-grpc-mode", (False,), "gRPC bypasses tenant identity"),
    ("grpc_mode", "--grpc-mode", (False,), "gRPC bypasses tenant identity"),
    ("use_ray", "--use-ray", (False,), "Ray's workers bypass tenant identity"),
    ("encoder_only", "--encoder-only", (False,), "it has no tenant identity"),
    ("disaggregation_mode", "--disaggregation-mode", ("null",), "it is not supported yet"),
    ("disable_radix_cache", "--disable-radix-cache", (False,), "tenants live in the radix cache"),
    ("radix_cache_backend", "--radix-cache-backend", ("sglang_ext",), "sglang_ext sets it"),
    ("enable_lmcache", "--enable-lmcache", (False,), "it replaces the tenant cache"),
    ("enable_flexkv", "--enable-flexkv", (False,), "it replaces the tenant cache"),
    (
        "enable_response_store",
        "--enable-response-store",
        (False,),
        "SGLang keeps the stored responses of all tenants in one place",
    ),
    (
        "enable_custom_logit_processor",
        "--enable-custom-logit-processor",
        (False,),
        "it runs code that a client sends",
    ),
    (
        "speculative_algorithm",
        "--speculative-algorithm",
        _OWN_DRAFTS,
        "only an algorithm that drafts without the text of other tenants is supported",
    ),
    (
        "trust_mm_content_hashes",
        "--trust-mm-content-hashes",
        (False,),
        "a client could name another tenant's image",
    ),
    ("api_key", "--api-key", (None,), "keys belong into the tenant policy (api_keys)"),
    ("admin_api_key", "--admin-api-key", (None,), "use admin_keys of the tenant policy"),
)


def check_environment() -> None:
    """Raise UnsupportedError where an environment variable selects a mode without identity."""
    if os.environ.get("SGLANG_RUST_SERVER", "").lower() not in _FALSE:
        raise UnsupportedError("SGLANG_RUST_SERVER bypasses tenant identity; unset it")


def check_modes(server_args: Any) -> None:
    """Raise UnsupportedError for a mode that would serve without tenant identity.

    ``server_args`` is a resolved view of SGLang's ServerArgs, so that modes chosen by environment
    variables are seen as well.
    """
    for field, flag, supported, reason in _MODES:
        if getattr(server_args, field) not in supported:
            raise UnsupportedError(f"{flag} is refused with tenants: {reason}")


def check_sealed(server_args: Any, policy: Policy) -> None:
    """Raise UnsupportedError where a flag would keep text of a sealed tenant that nobody zeroes.

    What depends on the model is refused once it is loaded (``sglang_ext.sealing``).
    """
    sealed = [tenant for tenant in policy.tenants.values() if is_sealed(tenant.owner)]
    if not sealed:
        return
    what = f"tenants.{sealed[0].name}.isolation: {sealed[0].isolation} does not work with"
    if server_args.speculative_algorithm is not None:
        flag = "--speculative-algorithm yet: the draft model keeps pages of its own"
        raise UnsupportedError(f"{what} {flag}")
    if server_args.hicache_storage_backend is not None and not _is_ours(server_args):
        flag = "--hicache-storage-backend, which does not encrypt; use tiers.nvme"
        raise UnsupportedError(f"{what} {flag}")


def _is_ours(server_args: Any) -> bool:
    config = server_args.hicache_storage_backend_extra_config or ""
    return server_args.hicache_storage_backend == "dynamic" and '"ExtStorage"' in config


def check_port(host: str, port: int) -> None:
    """Raise UnsupportedError when nothing can listen on ``host:port``."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise UnsupportedError(_why_not(host, port, error)) from error


def _why_not(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} on {host} is taken; stop what listens there or choose another --port"
    return f"cannot listen on {host}:{port}: {error.strerror}"
