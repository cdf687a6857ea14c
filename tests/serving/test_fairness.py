"""Fair shares, refusals and quotas on the real server, with a small pool and small steps."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import httpx
import pytest

from sglang_ext.tenancy.keys import digest
from tests.serving.prompts import unique_prompt
from tests.serving.server import Client, ServerProcess, policy_file, running

pytestmark = pytest.mark.serving

POOL = ["--max-total-tokens", "4096", "--mem-fraction-static", "0.3", "--sleep-on-idle"]
STEPS = ["--page-size", "16", "--chunked-prefill-size", "128", "--max-prefill-tokens", "128"]
SPECIAL = """
  light: {api_keys: ["%s"], weight: 1}
  heavy: {api_keys: ["%s"], weight: 3}
  capped: {api_keys: ["%s"], quota: {hbm: 512tok, hard: true}}
  patient: {api_keys: ["%s"], max_queued: 2}
  low: {api_keys: ["%s"], sla: basic}
  top: {api_keys: ["%s"], sla: premium}
unknown_key: free
"""


@pytest.fixture(scope="module")
def fair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server with tenants of equal weight, and some that are not."""
    names = ("light", "heavy", "capped", "patient", "low", "top")
    special = SPECIAL % tuple(digest(f"key-{name}") for name in names)
    equal = ["long", "short", "hot", "cold", "busy", "free"]
    policy = policy_file(tmp_path_factory.mktemp("policy"), equal, special)
    with running(["--tenant-policy", str(policy), *POOL, *STEPS]) as server:
        yield server


Ends = list[tuple[str, int]]
Texts = Mapping[str, Sequence[str]]


async def _batch(server: ServerProcess, tenant: str, texts: Sequence[str], ends: Ends) -> None:
    """Send all texts in one request; add (tenant, prompt tokens) to ``ends`` as each is done."""
    body = {"text": texts, "stream": True, "sampling_params": {"max_new_tokens": 1}}
    headers = {"authorization": f"Bearer key-{tenant}"}
    async with (
        httpx.AsyncClient(timeout=300) as client,
        client.stream("POST", server.url + "/generate", json=body, headers=headers) as answer,
    ):
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                meta = json.loads(line[6:])["meta_info"]
                assert meta["finish_reason"]["type"] == "length"
                ends.append((tenant, meta["prompt_tokens"]))


def run(server: ServerProcess, texts: Texts) -> Ends:
    """Send the texts of all tenants at once; return (tenant, tokens) in the order of the ends.

    Another tenant keeps the engine busy meanwhile, so that nearly all of them wait.
    """

    async def main() -> Ends:
        ends: Ends = []
        everyone = {"busy": [unique_prompt(f"busy {list(texts)}", 600)], **texts}
        await asyncio.gather(*(_batch(server, name, own, ends) for name, own in everyone.items()))
        return [entry for entry in ends if entry[0] != "busy"]

    return asyncio.run(main())


def prompts(name: str, count: int, words: int) -> list[str]:
    return [unique_prompt(f"{name} {words} {number}", words) for number in range(count)]


def served_while_both_wait(ends: Ends) -> Counter[str]:
    """Return the tokens by tenant up to the moment before the first tenant has none left."""
    left = Counter(tenant for tenant, _ in ends)
    served: Counter[str] = Counter()
    for tenant, tokens in ends:
        left[tenant] -= 1
        if not left[tenant]:
            break
        served[tenant] += tokens
    return served


def metric(server: ServerProcess, name: str, **labels: str) -> float:
    """Return a counter of ours, 0 where nothing has been counted yet."""
    rows = Client(server.url, "key-admin").get("/metrics").text.splitlines()
    wanted = [f'{label}="{value}"' for label, value in labels.items()]
    found = [row for row in rows if row.startswith(f"sglang_ext_{name}{{")]
    return sum(float(row.rsplit(" ", 1)[1]) for row in found if all(w in row for w in wanted))


@pytest.mark.trial(32)
def test_trial_32_ten_times_longer_prompts_get_no_more(fair: ServerProcess) -> None:
    texts = {"long": prompts("long", 10, 200), "short": prompts("short", 100, 16)}
    served = served_while_both_wait(run(fair, texts))
    assert served.total() > 2000
    assert 0.8 <= served["long"] / served["short"] <= 1.25


@pytest.mark.trial(32)
def test_shares_follow_weights(fair: ServerProcess) -> None:
    texts = {"light": prompts("light", 30, 24), "heavy": prompts("heavy", 60, 24)}
    served = served_while_both_wait(run(fair, texts))
    assert served.total() > 1500
    assert 3 * 0.85 <= served["heavy"] / served["light"] <= 3 * 1.15


@pytest.mark.trial(29)
def test_trial_29_a_hot_tenant_does_not_starve_a_cold_one(fair: ServerProcess) -> None:
    """Longest-prefix-first answers every hit before the first miss."""
    hot = Client(fair.url, "key-hot")
    prefix = unique_prompt("hot", 300)
    hot.generate(prefix)
    assert hot.cached(prefix + " once more") > 250
    hits = [f"{prefix} {number}" for number in range(40)]
    ends = run(fair, {"hot": hits, "cold": prompts("cold", 1, 60)})
    assert "cold" in [tenant for tenant, _ in ends[:20]]


class Answers:
    """Asks in parallel; ``ends`` are the tenants in the order in which their answers were whole."""

    def __init__(self, server: ServerProcess) -> None:
        self._server = server
        self.ends: list[str] = []

    async def ask(
        self, tenant: str, text: str, tokens: int, begun: asyncio.Event | None = None
    ) -> dict[str, Any]:
        """Return the last event; ``begun`` is set by the first."""
        sampling = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
        body = {"text": text, "stream": True, "sampling_params": sampling}
        headers = {"authorization": f"Bearer key-{tenant}"}
        last = {}
        async with (
            httpx.AsyncClient(timeout=300) as client,
            client.stream(
                "POST", self._server.url + "/generate", json=body, headers=headers
            ) as answer,
        ):
            events = [line async for line in _events(answer, begun)]
            last = json.loads(events[-1])
        self.ends.append(tenant)
        return dict(last)


async def _events(answer: httpx.Response, begun: asyncio.Event | None) -> AsyncIterator[str]:
    async for line in answer.aiter_lines():
        if line.startswith("data: {"):
            if begun is not None:
                begun.set()
            yield line[6:]


def test_a_long_prompt_gives_way_between_two_steps_and_its_answer_stays_the_same(
    fair: ServerProcess,
) -> None:
    text = unique_prompt("gives way", 2800)
    answers = Answers(fair)
    count = partial(metric, fair, "queue_time_seconds_count", tenant="long")
    turns = metric(fair, "preemptions_total", tenant="long", reason="turn")
    before = count()

    async def main() -> list[dict[str, Any]]:
        long = asyncio.create_task(answers.ask("long", text, 8))
        while await asyncio.to_thread(count) == before:
            assert not long.done(), "it was over before anybody could come"
        # Decoding waits for the long prompt: with as many tokens both would end in one step.
        await answers.ask("short", unique_prompt("quiet", 20), 2)
        return [await long, await answers.ask("cold", text, 8)]

    interrupted, undisturbed = asyncio.run(main())
    assert answers.ends == ["short", "long", "cold"]
    assert metric(fair, "preemptions_total", tenant="long", reason="turn") > turns
    assert interrupted["meta_info"]["cached_tokens"] == 0, "it hit what it had computed itself"
    # Of the rest, the batches that it is decoded in may round otherwise.
    words = [answer["text"].split()[0] for answer in (interrupted, undisturbed)]
    assert words[0] == words[1]


def test_running_requests_of_a_lower_class_make_room_for_a_higher_one(fair: ServerProcess) -> None:
    """The basic tenant's answers fill the pool; one is late then, but whole."""
    answers = Answers(fair)
    before = metric(fair, "preemptions_total", tenant="low", reason="class")

    async def main() -> list[dict[str, Any]]:
        begun = [asyncio.Event() for _ in range(4)]
        texts = prompts("low", 4, 800)
        low = [
            asyncio.create_task(answers.ask("low", text, 120, event))
            for text, event in zip(texts, begun, strict=True)
        ]
        for event in begun:
            await event.wait()
        await answers.ask("top", unique_prompt("top", 600), 2)
        return list(await asyncio.gather(*low))

    done = asyncio.run(main())
    assert [answer["meta_info"]["completion_tokens"] for answer in done] == [120] * 4
    assert answers.ends[0] == "top"
    assert metric(fair, "preemptions_total", tenant="low", reason="class") > before


@pytest.mark.trial(33)
@pytest.mark.parametrize("stream", [False, True])
def test_trial_33_larger_than_its_ceiling_is_refused_at_once(
    fair: ServerProcess, stream: bool
) -> None:
    capped = Client(fair.url, "key-capped")
    text = unique_prompt("capped", 400)
    body = {"text": text, "stream": stream, "sampling_params": {"max_new_tokens": 200}}
    busy = Client(fair.url, "key-busy")
    slow = {"text": "count", "stream": True, "sampling_params": {"max_new_tokens": 40}}
    events = busy.events("/generate", slow)
    next(events)
    answer = capped.post("/generate", body)
    assert answer.status_code == 400
    assert "512" in answer.text
    assert "hard quota" in answer.text
    assert len(list(events)) > 1, "it waited for another tenant's answer"
    assert len(str(capped.generate(text, tokens=4)["text"])) > 0


@pytest.mark.trial(33)
def test_an_openai_client_gets_the_status_and_the_numbers(fair: ServerProcess) -> None:
    capped = Client(fair.url, "key-capped")
    message = {"role": "user", "content": unique_prompt("capped chat", 300)}
    body = {"model": "m", "messages": [message], "max_tokens": 300}
    for stream in (False, True):
        answer = capped.post("/v1/chat/completions", {**body, "stream": stream})
        assert answer.status_code == 400
        assert "512" in answer.text
    del body["max_tokens"]
    message["content"] = "Hello."
    answer = capped.post("/v1/chat/completions", {**body, "stop": ["."]})
    assert answer.status_code == 200, "an open-ended answer is cut to the quota"


def test_a_tenant_over_its_hard_quota_waits_and_holds_no_more(fair: ServerProcess) -> None:
    ends = run(fair, {"capped": prompts("capped", 4, 300), "cold": prompts("cold", 2, 40)})
    assert Counter(tenant for tenant, _ in ends) == {"capped": 4, "cold": 2}
    rows = Client(fair.url, "key-admin").get("/metrics").text.splitlines()
    skipped = [row for row in rows if row.startswith("sglang_ext_admissions_skipped_total{")]
    assert any('reason="quota"' in row and 'tenant="capped"' in row for row in skipped)
    held = [row for row in rows if row.startswith('sglang_ext_held_tokens{owner="t:capped"')]
    assert all(float(row.rsplit(" ", 1)[1]) <= 512 for row in held)


@pytest.mark.parametrize("stream", [False, True])
def test_beyond_max_queued_a_client_is_told_when_to_come_back(
    fair: ServerProcess, stream: bool
) -> None:
    name = f"patient {stream}"
    # Four steps of work, so that later ones find two waiting.
    texts = [unique_prompt(name, 500), *prompts(name, 12, 30)]

    async def main() -> list[httpx.Response]:
        headers = {"authorization": "Bearer key-patient"}
        bodies = [
            {"text": text, "stream": stream, "sampling_params": {"max_new_tokens": 1}}
            for text in texts
        ]
        url = fair.url + "/generate"
        async with httpx.AsyncClient(timeout=300) as client:
            sent = [client.post(url, json=body, headers=headers) for body in bodies]
            return await asyncio.gather(*sent)

    answers = asyncio.run(main())
    refused = [answer for answer in answers if answer.status_code != 200]
    assert 0 < len(refused) < len(texts)
    assert {answer.status_code for answer in refused} == {429}
    assert all(int(answer.headers["retry-after"]) >= 1 for answer in refused)
    assert all("wait already" in answer.text for answer in refused)


@pytest.mark.trial(25)
def test_trial_25_an_unknown_key_is_served_as_the_policy_says(fair: ServerProcess) -> None:
    known, stranger = Client(fair.url, "key-short"), Client(fair.url, "key-of-nobody")
    text = unique_prompt("trial 25", 80)
    known.generate(text)
    assert stranger.cached(text) == 0
    assert stranger.cached(text) > 64
    assert known.cached(text) > 64, "a stranger cost somebody else its pages"


@pytest.mark.trial(30)
def test_trial_30_twice_the_pool_is_served_without_an_error(fair: ServerProcess) -> None:
    """A smoke test; ``bench_noisy_neighbour`` has the figures."""
    texts = {"free": prompts("free", 20, 200), "cold": prompts("cold", 20, 201)}
    assert len(run(fair, texts)) == 40


def test_every_metric_of_shares_is_there_after_a_flood(fair: ServerProcess) -> None:
    """Quota, reserve and use by tenant and tier; evictions, skips, waits and deficits."""
    run(fair, {"hot": prompts("metrics hot", 12, 220), "light": prompts("metrics light", 30, 60)})
    rows = Client(fair.url, "key-admin").get("/metrics").text.splitlines()

    def has(name: str, *labels: str) -> bool:
        found = [row for row in rows if row.startswith(f"sglang_ext_{name}{{")]
        return any(all(label in row for label in labels) for row in found)

    owner, tier = 'owner="t:hot"', 'tier="hbm"'
    for name in ("quota_tokens", "reserve_tokens", "held_tokens"):
        assert has(name, owner, tier), name
    assert has("evicted_tokens_total", tier, 'reason="pressure"')
    assert has("evicted_tokens_total", 'owner="t:capped"', tier, 'reason="quota"')
    assert has("admissions_skipped_total", 'tenant="capped"', 'reason="quota"')
    assert has("admissions_refused_total", 'tenant="capped"', 'reason="too_large"')
    for name in ("queue_time_seconds_count", "queued_requests", "deficit_tokens"):
        assert has(name, 'tenant="hot"'), name
