"""Requests are divided among data-parallel ranks by our router, or the server does not start."""

from typing import Any

from sglang_ext.errors import UnsupportedError
from sglang_ext.patches.rank_routing import RANK_METHOD

__all__ = ["check_ranks", "use_router"]


def use_router(server_args: Any) -> None:
    """Let our router choose ranks, where there are several and nothing else was asked for.

    ``server_args``: SGLang's, before it resolves them.
    """
    if _several(server_args) and server_args.load_balance_method == "auto":
        server_args.load_balance_method = RANK_METHOD


def check_ranks(server_args: Any) -> None:
    """Raise UnsupportedError for another way to choose ranks. ``server_args``: a resolved view."""
    method = server_args.load_balance_method
    if _several(server_args) and method != RANK_METHOD:
        raise UnsupportedError(
            f"--load-balance-method {method} is refused with several data-parallel ranks: a "
            "conversation's turns would be computed and held once in each of them, and one rank "
            "may be full while others are not; leave the flag out"
        )


def _several(server_args: Any) -> bool:
    return bool(server_args.dp_size > 1 or server_args.attn_dp_size > 1)
