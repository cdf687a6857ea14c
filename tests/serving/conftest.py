"""One real server for each configuration and test run."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.serving.observed import Observed
from tests.serving.server import Client, ServerProcess, policy_file, running
from tests.serving.tiered import Tiers

SMALL_POOL = ["--max-total-tokens", "20000", "--mem-fraction-static", "0.3", "--sleep-on-idle"]
GROUP = """
  sales: {api_keys: ["%s"], isolation: shared, group: intranet}
  hr: {api_keys: ["%s"], isolation: shared, group: intranet}
"""


def run_server(policy: Path, *flags: str) -> Iterator[ServerProcess]:
    """Yield a ready server with a small pool."""
    with running(["--tenant-policy", str(policy), *SMALL_POOL, *flags]) as server:
        yield server


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """The server that most tests share: five private tenants, five sealed ones, a group of two."""
    from sglang_ext.tenancy.keys import digest

    more = GROUP % (digest("key-sales"), digest("key-hr"))
    for name in "abcde":
        more += f'  s{name}: {{api_keys: ["{digest(f"key-s{name}")}"], isolation: sealed}}\n'
    policy = policy_file(tmp_path_factory.mktemp("policy"), ["a", "b", "c", "d", "e"], more)
    yield from run_server(policy, "--page-size", "16")


@pytest.fixture(scope="package")
def observed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Observed]:
    """The server that the tests of usage, rules, dashboard and page share."""
    observed = Observed(tmp_path_factory.mktemp("observed"))
    try:
        yield observed
        observed.end()
    finally:
        observed.server.kill()


def _client(server: ServerProcess, tenant: str) -> Client:
    return Client(server.url, f"key-{tenant}")


@pytest.fixture(params=["", "s"], ids=["private", "sealed"])
def level(request: pytest.FixtureRequest) -> str:
    """What the names of tenants of one isolation level begin with."""
    return str(request.param)


@pytest.fixture
def a(server: ServerProcess) -> Client:
    """Tenant A."""
    return _client(server, "a")


@pytest.fixture
def b(server: ServerProcess) -> Client:
    """Tenant B."""
    return _client(server, "b")


@pytest.fixture
def admin(server: ServerProcess) -> Client:
    """The operator."""
    return _client(server, "admin")


@pytest.fixture(scope="session")
def tiers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tiers]:
    tiers = Tiers(tmp_path_factory.mktemp("tiers"))
    try:
        yield tiers
        tiers.server.stop()
        assert not tiers.server.leaks(), tiers.server.leaks()
    finally:
        tiers.server.kill()
