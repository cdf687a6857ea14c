"""What is in force in this process: the policy, and the metrics of its requests.

``launch_server`` reads the policy file once and hands its text to every process of the server: in
memory that nobody can write to and that ends with the launcher, named by an environment variable. A
change at run time reaches each process by itself (see ``live_policy``).
"""

import fcntl
import functools
import hashlib
import os
from pathlib import Path

from sglang_ext.errors import PolicyError
from sglang_ext.metrics import RequestMetrics
from sglang_ext.tenancy.loader import parse_policy, policy_text
from sglang_ext.tenancy.policy import Policy

__all__ = [
    "DIGEST_VARIABLE",
    "POLICY_VARIABLE",
    "hand_over",
    "has_policy",
    "policy",
    "request_metrics",
    "use",
]

POLICY_VARIABLE = "SGLANG_EXT_POLICY"
"""Where the policy's text can be read."""
DIGEST_VARIABLE = "SGLANG_EXT_POLICY_SHA256"

_in_force: list[Policy] = []


def hand_over(text: str) -> Policy:
    """Let this policy be in force here and in every process that is started from now on.

    Raises PolicyError where it is wrong.
    """
    checked = parse_policy(text)
    data = text.encode("utf-8")
    os.environ[POLICY_VARIABLE] = f"/proc/{os.getpid()}/fd/{_sealed(data)}"
    os.environ[DIGEST_VARIABLE] = hashlib.sha256(data).hexdigest()
    use(checked)
    return checked


def _sealed(data: bytes) -> int:
    """Return the descriptor of memory that holds ``data`` for good. It is never closed."""
    descriptor = os.memfd_create("sglang-ext-policy", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with open(descriptor, "wb", closefd=False) as memory:
        memory.write(data)
    seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


def has_policy() -> bool:
    """Tell whether this process belongs to a server that ``launch_server`` started."""
    return POLICY_VARIABLE in os.environ


def policy() -> Policy:
    """Return the policy in force; raises PolicyError where it is not what was handed over."""
    if not _in_force:
        _in_force.append(_handed_over())
    return _in_force[0]


def use(changed: Policy) -> None:
    """Let this policy be in force in this process from now on."""
    _in_force[:] = [changed]


def _handed_over() -> Policy:
    try:
        data = Path(os.environ[POLICY_VARIABLE]).read_bytes()
    except OSError as error:
        raise PolicyError("", f"cannot be taken over from the launcher: {error}") from error
    if hashlib.sha256(data).hexdigest() != os.environ[DIGEST_VARIABLE]:
        raise PolicyError("", "not what the launcher handed over; start the server again")
    return parse_policy(policy_text(data))


@functools.cache
def request_metrics() -> RequestMetrics:
    """Return the one recorder of request metrics of this process."""
    return RequestMetrics(policy().metrics.tenants, list(policy().tenants))
