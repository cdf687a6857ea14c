"""Changes the policy of a running server: from the HTTP process to every scheduler and back.

    read, check    here, in a thread
    policy_check   every rank: does it fit the pools of this engine?
    policy_apply   every rank, between the same two steps
    callers        here: keys that are new work from now on, keys that are gone do not
    save           the policy file, where nobody else has changed it
    remove         requests, sessions and pages of who is gone

One change at a time. Until ``policy_apply`` nothing has changed, and nothing after it can fail for
what the policy says.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextvars import Context
from dataclasses import dataclass
from typing import Any

from sglang_ext import active
from sglang_ext.audit_log import AuditLog
from sglang_ext.errors import PolicyError, SglangExtError
from sglang_ext.leavers import Leaving, SeesOut
from sglang_ext.policy_file import PolicyFile
from sglang_ext.tenancy.auth import Callers
from sglang_ext.tenancy.changes import Change, check_live, diff
from sglang_ext.tenancy.document import version_of, write_yaml
from sglang_ext.tenancy.loader import build_policy, policy_text
from sglang_ext.tenancy.policy import Policy
from sglang_ext.tenancy.yaml_text import read_yaml

__all__ = ["Ask", "Edit", "Edited", "LivePolicy", "UnknownTenantError", "VersionError"]

logger = logging.getLogger(__name__)

Ask = Callable[[str, dict[str, Any]], Awaitable[list[dict[str, Any]]]]
"""Runs an operation in every scheduler; ValueError with the words of the one that refused."""


class VersionError(SglangExtError):
    """The policy in force is not the one that the change was made for."""


class UnknownTenantError(SglangExtError):
    """There is no such tenant in the policy in force."""


@dataclass(frozen=True)
class Edited:
    """A policy as plain data; ``text``: the same as the file shall hold it, None for any form."""

    document: Any
    text: str | None = None


Edit = Callable[[Mapping[str, Any]], Edited]
"""From the document in force to another one. Runs in a thread; errors refuse the change."""


class LivePolicy:
    """The one way to another policy, for the routes and for SIGHUP."""

    def __init__(
        self, file: PolicyFile, callers: Callers, log: AuditLog, ask: Ask, leavers: SeesOut
    ) -> None:
        self._file = file
        self._callers = callers
        self._log = log
        self._ask = ask
        self._leavers = leavers
        self._one_at_a_time = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    async def change(
        self,
        edit: Edit,
        by: str,
        *,
        if_match: str | None = None,
        leaving: Leaving | None = None,
        save: bool = True,
    ) -> dict[str, Any]:
        """Put another policy in force, or raise SglangExtError and change nothing.

        ``by`` goes into the audit log; ``if_match``: only where this version is in force;
        ``leaving``: what happens to requests of tenants that are gone. The answer names the new
        version, what changed, whether it outlives a restart, and what was removed.
        """
        async with self._one_at_a_time:
            old = active.policy()
            try:
                _check_version(old, if_match)
                new, text, changes = await asyncio.to_thread(_edited, old, edit)
                refused = await self._apply(new)
            except SglangExtError as error:
                self._log.write(by, "policy", "refused", reason=str(error))
                raise
            answer = {
                "version": version_of(new.document),
                "changes": [change.row() for change in changes],
                "refused_requests": refused,
                **await asyncio.to_thread(self._save, text, save),
            }
            self._log.write(by, "policy", "applied", **answer)
            removed = await self._leavers.remove(old, new, leaving or Leaving())
            if any(removed.values()):
                self._log.write(by, "removal", "done", **removed)
        return {**answer, "removed": removed}

    async def reload(self) -> None:
        """Read the policy file again; what is wrong with it is logged."""
        try:
            answer = await self.change(self._read_file, "SIGHUP", save=False)
        except SglangExtError as error:
            logger.error("policy file: %s; the policy in force stays as it is", error)
        else:
            logger.info("policy file read again: %d changes", len(answer["changes"]))

    def hang_up(self, *signal: Any) -> None:
        """Handle SIGHUP, in the thread and inside of the loop that serve HTTP."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            logger.warning("SIGHUP came before the server was ready; send it again")
            return
        # A signal may come in the middle of a tenant's request; the reload is the operator's.
        loop.call_soon_threadsafe(self._start_reload, context=Context())

    async def _apply(self, new: Policy) -> int:
        """Put ``new`` in force everywhere; return how many waiting requests it could not keep."""
        try:
            await self._ask("policy_check", {"document": new.document})
        except ValueError as error:
            raise PolicyError("", str(error)) from error
        answers = await self._ask("policy_apply", {"version": version_of(new.document)})
        active.use(new)
        self._callers.use(new)
        return sum(answer["refused_requests"] for answer in answers)

    def _save(self, text: str, save: bool) -> dict[str, Any]:
        """Write what is in force into the policy file, unless it comes from there."""
        if not save:
            self._file.accept(text)
        reason = self._file.save(text) if save else None
        return {"saved": reason is None, "not_saved_because": reason}

    def _read_file(self, _: Mapping[str, Any]) -> Edited:
        text = self._file.read()
        return Edited(read_yaml(text), text)

    def _start_reload(self) -> None:
        task = asyncio.get_running_loop().create_task(self.reload())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _check_version(old: Policy, if_match: str | None) -> None:
    version = version_of(old.document)
    if if_match not in (None, "*", version):
        raise VersionError(f"version {version} is in force, not {if_match}")


def _edited(old: Policy, edit: Edit) -> tuple[Policy, str, list[Change]]:
    """Return the new policy, as the file shall hold it too, and what it changes."""
    edited = edit(old.document)
    new = build_policy(edited.document)
    check_live(old, new)
    text = write_yaml(new.document) if edited.text is None else edited.text
    # The next start reads no larger file.
    policy_text(text.encode("utf-8"))
    return new, text, diff(old, new)
