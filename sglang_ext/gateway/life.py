"""The life of one engine: started, ready, ended, started again after a while. Times are given."""

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

__all__ = ["Drain", "DrainState", "Life", "State"]

_FIRST_DELAY_S = 0.5
_LONGEST_DELAY_S = 30.0
_STEADY_S = 60.0
"""An engine that served for so long has not failed to start."""


class State(StrEnum):
    """What an engine does now."""

    STARTING = "starting"
    READY = "ready"
    WAITING = "waiting"
    """It ended, and starts again at ``Life.again_at``."""
    FAILED = "failed"
    """It ended before it ever served: no retry would change that."""
    STOPPED = "stopped"
    AWAY = "away"
    """An engine of another machine that does not answer, or not as it should."""


@dataclass
class Life:
    """One engine's state. Each method is an event; ``now`` is in seconds of any steady clock."""

    state: State = State.STOPPED
    starts: int = 0
    again_at: float = 0.0
    _delay: float = _FIRST_DELAY_S
    _ready_since: float | None = None
    _ever_ready: bool = False

    @property
    def restarts(self) -> int:
        """How often it was started again."""
        return max(0, self.starts - 1)

    def started(self) -> None:
        """A process was started."""
        self.state = State.STARTING
        self.starts += 1
        self._ready_since = None

    def became_ready(self, now: float) -> None:
        """The process answers."""
        self.state = State.READY
        self._ready_since = now
        self._ever_ready = True

    def ended(self, now: float) -> None:
        """The process is gone without having been asked to go."""
        if not self._ever_ready:
            self.state = State.FAILED
            return
        if self._ready_since is not None and now - self._ready_since >= _STEADY_S:
            self._delay = _FIRST_DELAY_S
        self.state = State.WAITING
        self.again_at = now + self._delay
        self._delay = min(2 * self._delay, _LONGEST_DELAY_S)

    def away(self) -> None:
        """It does not answer, and is not ours to start."""
        self.state = State.AWAY

    def stopped(self) -> None:
        """Nothing starts it again."""
        self.state = State.STOPPED


class DrainState(StrEnum):
    """How far it is."""

    DRAINING = "draining"
    DRAINED = "drained"


@dataclass
class Drain:
    """``sessions``: conversations that it had; ``moved``: of these, all that only they use."""

    state: DrainState = DrainState.DRAINING
    sessions: int = 0
    moved: int = 0
    note: str | None = None

    def row(self) -> dict[str, Any]:
        """Return it as plain data, for the operator."""
        return asdict(self)
