"""SGLang's warm-up goes through HTTP like any client, so it needs a key while it lasts."""

import hmac
from contextlib import ExitStack
from typing import Any

from sglang_ext.tenancy.keys import new_key

__all__ = ["WarmUp"]


class WarmUp:
    """Lends SGLang's warm-up a key that is known to nobody else and ends with it."""

    def __init__(self) -> None:
        self._key = new_key()
        self._ended = False
        self._lent = ExitStack()

    def is_own_key(self, key: str) -> bool:
        """Tell, in constant time, whether ``key`` is the warm-up's and still good."""
        same = hmac.compare_digest(key.encode(), self._key.encode())
        return same and not self._ended

    def run(self, server_args: Any) -> bool:
        """Run SGLang's warm-up requests; they carry whatever ``--api-key`` says."""
        from sglang.srt.entrypoints.http_server import _execute_server_warmup
        from sglang.srt.runtime_context import get_serving

        self._lent.enter_context(get_serving().override(api_key=self._key))
        return bool(_execute_server_warmup(server_args))

    def finish(self) -> None:
        """End the key once SGLang has also frozen its garbage collector through HTTP."""
        self._lent.close()
        self._ended = True
