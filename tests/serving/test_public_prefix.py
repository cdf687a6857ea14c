"""A registered system prompt is shared by all; behind it nothing is (trials 1, 2, 8, 21)."""

import uuid
from collections.abc import Iterator

import pytest

from sglang_ext.audit.statistics import auc_interval
from sglang_ext.tenancy.keys import digest
from tests.serving.conftest import run_server
from tests.serving.prompts import unique_prompt
from tests.serving.server import Client, ServerProcess, policy_file

pytestmark = pytest.mark.serving

SYSTEM = unique_prompt("You are the assistant of many customers", words=300)
_PUBLIC = "public_prefixes:\n  - {name: assistant, system: %r}"
_PAIRS = 30


@pytest.fixture(scope="module")
def public(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server whose policy names one public system prompt."""
    folder = tmp_path_factory.mktemp("public")
    sealed = f'  s: {{api_keys: ["{digest("key-s")}"], isolation: sealed}}\n'
    more = sealed + _PUBLIC % SYSTEM
    yield from run_server(policy_file(folder, ["a", "b", "c", "d", "e"], more))


def _ask(client: Client, user: str, **fields: object) -> tuple[int, int]:
    """Return (cached tokens, prompt tokens) of a chat under the public system prompt."""
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": user}]
    body = {"model": "m", "messages": messages, "max_tokens": 1, "temperature": 0, **fields}
    response = client.post("/v1/chat/completions", body)
    response.raise_for_status()
    usage = response.json()["usage"]
    return int(usage["prompt_tokens_details"]["cached_tokens"]), int(usage["prompt_tokens"])


@pytest.fixture
def clients(public: ServerProcess) -> list[Client]:
    """Five tenants, who all know that the public run is in the cache."""
    found = [Client(public.url, f"key-{name}") for name in "abcde"]
    _ask(found[0], "warm")
    return found


def _public_tokens(client: Client) -> int:
    """Return how many tokens are public: what hits under a salt that was never used."""
    return _ask(client, "probe", cache_salt=uuid.uuid4().hex)[0]


@pytest.mark.trial(21)
def test_trial_21_the_public_prefix_hits_and_the_private_tail_never(clients: list[Client]) -> None:
    text = unique_prompt("trial 21", words=120)
    cached = [_ask(client, text)[0] for client in clients]
    assert min(cached) > 300, "the public system prompt should be shared"
    assert max(cached) - min(cached) == 0, "a private tail was shared"
    again, prompt = _ask(clients[1], text)
    assert again > cached[1]
    assert again >= prompt - 17


@pytest.mark.trial(21)
def test_trial_21_a_sealed_tenant_computes_even_public_text_for_itself(
    public: ServerProcess, clients: list[Client]
) -> None:
    sealed, text = Client(public.url, "key-s"), unique_prompt("trial 21 sealed", words=120)
    assert _ask(clients[0], text)[0] > 300
    assert _ask(sealed, text)[0] == 0
    again, prompt = _ask(sealed, text)
    assert again >= prompt - 17


@pytest.mark.trial(8)
def test_trial_8_first_sends_hit_the_public_run_only(clients: list[Client]) -> None:
    text = unique_prompt("trial 8 public", words=100)
    shared = _public_tokens(clients[0])
    assert [_ask(client, text)[0] for client in clients] == [shared] * 5


@pytest.mark.trial(2)
def test_trial_2_a_salt_divides_the_private_part(clients: list[Client]) -> None:
    text = unique_prompt("trial 2 public", words=100)
    shared = _public_tokens(clients[0])
    assert _ask(clients[0], text, cache_salt="one")[0] == shared
    assert _ask(clients[0], text, cache_salt="one")[0] > shared
    assert _ask(clients[0], text, cache_salt="two")[0] == shared


@pytest.mark.trial(1)
def test_trial_1_times_behind_the_public_prefix_do_not_tell(clients: list[Client]) -> None:
    a, b = clients[:2]
    warm: list[float] = []
    cold: list[float] = []
    for number in range(_PAIRS):
        known, fresh = (unique_prompt(f"public {kind} {number}", 200) for kind in ("known", "new"))
        _ask(a, known)
        for text, times in ((known, warm), (fresh, cold))[:: 1 if number % 2 else -1]:
            times.append(_seconds(b, text))
    seen = auc_interval(cold, warm, level=0.999)
    assert seen.low <= 0.5 <= seen.high, seen


def _seconds(client: Client, user: str) -> float:
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": user}]
    body = {"model": "m", "messages": messages, "max_tokens": 1, "temperature": 0}
    return client.post("/v1/chat/completions", body).elapsed.total_seconds()


def test_the_operator_sees_whose_every_run_is(public: ServerProcess, clients: list[Client]) -> None:
    text = unique_prompt("tree", words=60)
    for client in clients[:2]:
        _ask(client, text)
    answer = Client(public.url, "key-admin").get("/ext/v1/tree?limit=10000")
    assert answer.status_code == 200
    (tree,) = answer.json()["ranks"]
    owners = {run["owner"] for run in tree["runs"]}
    assert {"", "t:a", "t:b"} <= owners
    publics = [run for run in tree["runs"] if run["owner"] == ""]
    assert all(run["level"] == 0 or run["start"] > 0 for run in publics)
    assert sum(run["tokens"] for run in publics) == _public_tokens(clients[2])
    assert clients[0].get("/ext/v1/tree").status_code == 403
    assert Client(public.url, "key-admin").get("/ext/v1/tree?limit=0").status_code == 400
