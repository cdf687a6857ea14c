"""What is in force in this process: the policy, and the metrics of its requests.

``launch_server`` names the policy file in an environment variable, which every process of the
server inherits; each of them reads the file once.
"""

import functools
import os
from pathlib import Path

from sglang_ext.metrics import RequestMetrics
from sglang_ext.tenancy.loader import load_policy
from sglang_ext.tenancy.policy import Policy

__all__ = ["POLICY_VARIABLE", "has_policy", "policy", "request_metrics"]

POLICY_VARIABLE = "SGLANG_EXT_POLICY"


def has_policy() -> bool:
    """Tell whether this process belongs to a server that ``launch_server`` started."""
    return POLICY_VARIABLE in os.environ


@functools.cache
def policy() -> Policy:
    """Return the policy in force; raises PolicyError where the file is wrong."""
    return load_policy(Path(os.environ[POLICY_VARIABLE]))


@functools.cache
def request_metrics() -> RequestMetrics:
    """Return the one recorder of request metrics of this process."""
    return RequestMetrics(policy().metrics.tenants)
