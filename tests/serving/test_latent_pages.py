"""Latent attention (MLA) and experts on a real server, calibrated FP8 pages, in all tiers."""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from sglang_ext.calibration.measure import default_text, split_text
from sglang_ext.calibration.schemes import layers_of, learn, schemes_for
from sglang_ext.calibration.treatment import load_model
from sglang_ext.tenancy.keys import digest
from sglang_ext.tiering.quantizer import E4M3
from sglang_ext.tiering.scales import Scales, checkpoint_hash, save_scales
from tests.serving.test_stored_pages import PAGES, TEXT, Stored, wait
from tests.tiny_models import tiny_latent_moe, tiny_moe

pytestmark = pytest.mark.serving

_LAYERS, _PAGE = 2, 16


@dataclass(frozen=True)
class _Kind:
    """A model and the bytes of one token in one of its layers, at a byte a number.

    In float32 where a rounding may choose another expert, which nothing bounds.
    """

    make: Callable[..., Path]
    row_bytes: int
    flags: tuple[str, ...] = ()


_KINDS = {
    "latents": _Kind(tiny_latent_moe, 512 + 64),
    "heads": _Kind(tiny_moe, 2 * 2 * 64, ("--dtype", "float32")),
}


class Latent(Stored):
    """A server of a latent model whose policy asks for FP8 pages with means of the latents.

    Pages of tenant ``low`` leave HBM after a second, those of ``deep`` the host's memory as well.
    """

    def __init__(self, folder: Path, kind: _Kind) -> None:
        self.kind = kind
        self.models = [kind.make(folder / "model", layers=_LAYERS)]
        self.pages, self.policy = folder / "pages", folder / "tenants.yaml"
        scales = folder / "scales.safetensors"
        _calibrate(self.models[0], scales)
        keys = {name: digest(f"key-{name}") for name in ("high", "low", "deep", "admin")}
        self.policy.write_text(
            "version: 1\n"
            f'admin_keys: ["{keys["admin"]}"]\n'
            f"engine: {{kv_cache_dtype: fp8_e4m3, kv_scales: {scales}}}\n"
            "tiers: {load: always, cpu: {size: 60MB}, "
            f"nvme: {{size: 100MB, path: {self.pages}}}}}\n"
            "defaults: {quota: {hbm: 100%, cpu: 100%}}\n"
            "tenants:\n"
            f'  high: {{api_keys: ["{keys["high"]}"]}}\n'
            f'  low: {{api_keys: ["{keys["low"]}"], ttl: {{hbm: 1s, cpu: 1h, mode: strict}}}}\n'
            f'  deep: {{api_keys: ["{keys["deep"]}"], ttl: {{hbm: 1s, cpu: 2s, mode: strict}}}}\n',
            encoding="utf-8",
        )
        self.start(self.models[0], *kind.flags)

    def held(self, tenant: str, tier: str) -> int:
        """Return the tokens of a tenant in a tier, as the tree has them."""
        (rank,) = self.client("admin").get("/ext/v1/tree").json()["ranks"]
        runs = (run for run in rank["runs"] if run["owner"] == f"t:{tenant}")
        return sum(run["tokens"] for run in runs if tier in run["tiers"])


def _calibrate(model_folder: Path, out: Path) -> None:
    model = load_model(model_folder)
    statistics = learn(model, split_text(model_folder, default_text(), 2_048))
    scheme = schemes_for(model)[-1]
    layers = layers_of(statistics, E4M3, scheme)
    save_scales(out, Scales(E4M3, "tiny", checkpoint_hash(model_folder), layers))


@dataclass(frozen=True)
class _Told:
    """Where cached tokens came from, and the log probabilities of the likeliest first tokens."""

    sources: dict[str, int]
    first: dict[int, float]


def _ask(latent: Latent, tenant: str) -> _Told:
    fields = {"return_logprob": True, "top_logprobs_num": 10}
    answer = latent.client(tenant).generate(TEXT, tokens=2, **fields)
    meta: Any = answer["meta_info"]
    where = meta["cached_tokens_details"] or {}
    sources = {tier: where.get(tier, 0) for tier in ("device", "host", "storage")}
    return _Told(sources, {token: value for value, token, *_ in meta["output_top_logprobs"][0]})


def _apart(one: _Told, other: _Told) -> float:
    """Return how far the log probabilities that both told are apart at most."""
    both = one.first.keys() & other.first.keys()
    assert len(both) >= 5, (one, other)
    return max(abs(one.first[token] - other.first[token]) for token in both)


@pytest.fixture(scope="module", params=_KINDS)
def latent(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Latent]:
    latent = Latent(tmp_path_factory.mktemp("latent"), _KINDS[request.param])
    try:
        yield latent
        latent.server.stop()
        assert not latent.server.leaks(), latent.server.leaks()
    finally:
        latent.server.kill()


def test_the_policys_type_of_page_and_its_scales_are_in_force(latent: Latent) -> None:
    info = latent.client("admin").get("/server_info").json()
    assert info["kv_cache_dtype"] == "fp8_e4m3"
    assert any(
        "fp8_e4m3 pages with scales calibrated on tiny" in line for line in latent.server.lines
    )


@pytest.mark.trial(90)
def test_latents_are_the_same_bytes_in_every_tier(latent: Latent) -> None:
    """Whatever tier a page comes from, the same rows are computed over the same numbers."""
    least = _PAGE * PAGES
    cold = _ask(latent, "high")
    device = _ask(latent, "high")
    assert sum(cold.sources.values()) == 0
    assert device.sources["device"] >= least
    for tenant in ("low", "deep"):
        _ask(latent, tenant)
    wait(lambda: latent.held("low", "hbm") == 0 and latent.held("low", "cpu") >= least)
    host = _ask(latent, "low")
    assert host.sources["host"] >= least
    latent.wait_for_pages("high", "low", "deep")
    bodies = [{body for _, body in latent.on_disk(tenant)} for tenant in ("high", "low", "deep")]
    assert {len(body) for body in bodies[0]} == {_PAGE * latent.kind.row_bytes * _LAYERS}
    assert len(set.intersection(*bodies)) >= PAGES
    wait(lambda: latent.held("deep", "hbm") == latent.held("deep", "cpu") == 0)
    storage = _ask(latent, "deep")
    assert storage.sources["storage"] >= least
    # In batches of another shape bfloat16 rounds otherwise: two steps at logits of 16 to 32.
    assert max(_apart(told, device) for told in (cold, host, storage)) <= 0.25


def test_the_bytes_of_a_token_are_told(latent: Latent) -> None:
    _ask(latent, "high")
    told = latent.client("admin").get("/metrics").text
    bytes_, tokens = (_in_hbm(told, f"sglang_ext_held_{what}") for what in ("bytes", "tokens"))
    assert tokens >= _PAGE * PAGES
    assert bytes_ == tokens * latent.kind.row_bytes * _LAYERS


def _in_hbm(told: str, name: str) -> float:
    (row,) = re.findall(rf'^{name}{{.*owner="t:high".*tier="hbm".*}} (.+)$', told, re.MULTILINE)
    return float(row)


def test_latents_take_at_most_three_tenths_of_their_keys_and_values(tmp_path: Path) -> None:
    folder = tiny_latent_moe(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text("utf-8"))
    key = config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
    dense = config["num_attention_heads"] * (key + config["v_head_dim"])
    assert _KINDS["latents"].row_bytes <= 0.3 * dense
