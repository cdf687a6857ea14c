"""Errors that a person reads. Each says what was wrong, where, and what to do.

SglangExtError                 catch this one
├── PolicyError                the policy file: path, value, what was expected
├── UnsupportedError           a version, mode or feature that this release refuses
├── HookError                  a hook on SGLang that did not apply; the server must not start
├── DemoModelError             the demo model could not be fetched or converted
├── FolderError                there is no folder to keep files in
├── NodesError                 the file of nodes, or the secret that they share, cannot be used
├── PlanError                  a model, trace or cluster that cannot be planned with
├── ScalesError                a file of FP8 scales that cannot be made, read or used
├── ServerError                a running server did not answer, or refused to
├── StoreError                 the folder of the NVMe tier could not be opened
├── UsageError                 the usage file could not be opened
└── KeyRingError               the master key or the folder of wrapped keys cannot be used

Results in the data path are values, never exceptions: a lost page means recompute.
"""

__all__ = [
    "DemoModelError",
    "FolderError",
    "HookError",
    "KeyRingError",
    "NodesError",
    "PlanError",
    "PolicyError",
    "ScalesError",
    "ServerError",
    "SglangExtError",
    "StoreError",
    "UnsupportedError",
    "UsageError",
]


class SglangExtError(Exception):
    """Base of every error that this package raises on purpose."""


class PolicyError(SglangExtError):
    """A field of the policy file is wrong.

    ``path`` is dotted (``tenants.acme.quota.hbm``; empty for the file itself), ``problem`` says
    what the value was and what was expected.
    """

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(f"{path}: {problem}" if path else problem)
        self.path = path
        self.problem = problem


class UnsupportedError(SglangExtError):
    """A version, mode or feature that this release refuses, with the reason."""


class HookError(SglangExtError):
    """A hook on SGLang did not apply, so isolation cannot be promised."""


class FolderError(SglangExtError):
    """There is no folder to keep files in."""


class NodesError(SglangExtError):
    """The file that names other machines, or the secret that they share, cannot be used."""


class PlanError(SglangExtError):
    """A model, trace or cluster cannot be planned with: what is missing or does not fit."""


class DemoModelError(SglangExtError):
    """The demo model could not be fetched, checked or converted."""


class ScalesError(SglangExtError):
    """A file of FP8 scales could not be made or read, or belongs to other weights."""


class ServerError(SglangExtError):
    """A running server did not answer, or refused what it was asked for."""


class StoreError(SglangExtError):
    """The folder of the NVMe tier could not be opened: taken, not writable, or not a folder."""


class KeyRingError(SglangExtError):
    """The master key is missing, readable by others or not the one that wrapped the keys."""


class UsageError(SglangExtError):
    """The usage file cannot be used; the message says which file and why."""
