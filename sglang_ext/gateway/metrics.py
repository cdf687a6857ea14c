"""What the gateway counts: which engines serve, how often they ended, what it could not relay."""

from typing import Any

from sglang_ext.gateway.relay import Failure
from sglang_ext.gateway.supervisor import Engine
from sglang_ext.observe.catalog import make

__all__ = ["GatewayMetrics"]


class GatewayMetrics:
    """Make one a process."""

    def __init__(self) -> None:
        self._ready: Any = make("ready_engines")
        self._restarts: Any = make("engine_restarts_total")
        self._failures: Any = make("gateway_failures_total")
        self._counted: dict[str, int] = {}

    def note(self, engine: Engine) -> None:
        """Take in the state of an engine; called at every scrape."""
        name = engine.spec.name
        self._ready.labels(name).set(int(engine.is_ready))
        new = engine.life.restarts - self._counted.get(name, 0)
        self._restarts.labels(name).inc(new)
        self._counted[name] = engine.life.restarts

    def failed(self, engine: str, failure: Failure) -> None:
        """Count a request that an engine did not answer."""
        self._failures.labels(engine, failure.value).inc()
