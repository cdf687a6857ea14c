"""One engine as a tree of processes: started, asked to go, ended."""

import asyncio
import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress

__all__ = ["EngineProcess"]


class EngineProcess:
    """A running engine. It has a process group of its own: Ctrl-C in a terminal reaches us only."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, command: Sequence[str], variables: Mapping[str, str]) -> "EngineProcess":
        """Start ``command`` with ``variables`` added to the environment. Raises OSError."""
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            env={**os.environ, **variables},
            start_new_session=True,
        )
        return cls(process)

    @property
    def pid(self) -> int:
        """Id of its first process, and of its group."""
        return self._process.pid

    async def wait(self) -> int:
        """Return the exit status of its first process once no process of the group is left."""
        status = await self._process.wait()
        self.kill()
        return status

    def terminate(self) -> None:
        """Ask it to finish what runs, and to go."""
        with suppress(ProcessLookupError):
            self._process.terminate()

    def kill(self) -> None:
        """End every process of it now."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
