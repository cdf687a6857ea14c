"""How often one address may send a wrong key. A right key is never asked about here."""

import ipaddress
import math
import time
from collections import OrderedDict
from collections.abc import Callable

__all__ = ["FailedKeys"]

_BURST = 20
_SECONDS_EACH = 3.0
_MOST_CLIENTS = 4096
_IPV6_SITE_BITS = 64


class FailedKeys:
    """A wrong key in 3 seconds from one address, after the first 20, which may come at once.

    A leaky bucket for each address that failed of late: the time at which it will be empty. Of more
    than ``most_clients`` those are forgotten whose last failure is longest ago. O(1).
    """

    def __init__(
        self,
        burst: int = _BURST,
        seconds_each: float = _SECONDS_EACH,
        most_clients: int = _MOST_CLIENTS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._allowance = (burst - 1) * seconds_each
        self._seconds_each = seconds_each
        self._most_clients = most_clients
        self._clock = clock
        self._empty_at: OrderedDict[str, float] = OrderedDict()

    def failed(self, client: str) -> int:
        """Note a wrong key; return 0, or after how many seconds the next one may come."""
        now, site = self._clock(), _site(client)
        empty_at = max(self._empty_at.get(site, now), now)
        wait = empty_at - now - self._allowance
        self._empty_at[site] = empty_at if wait > 0 else empty_at + self._seconds_each
        self._empty_at.move_to_end(site)
        if len(self._empty_at) > self._most_clients:
            self._empty_at.popitem(last=False)
        return math.ceil(wait) if wait > 0 else 0


def _site(client: str) -> str:
    """Return what one client can hardly change: its address, of IPv6 the network part."""
    try:
        address = ipaddress.ip_address(client)
    except ValueError:
        return client
    if address.version == 4:
        return client
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((int(address), _IPV6_SITE_BITS), strict=False))
