"""Debian's Prometheus against a server of a test, with the project's own rules."""

import json
import shutil
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.serving.server import free_port

__all__ = ["RULES", "Prometheus"]

RULES = Path(__file__).parents[2] / "sglang_ext" / "dashboards" / "prometheus" / "rules.yml"
_SECONDS = 60


class Prometheus:
    """Scrapes ``target`` every second, and a port where nobody listens as a second engine."""

    def __init__(self, folder: Path, target: str, key: str) -> None:
        self.port = free_port()
        self.dead = f"127.0.0.1:{free_port()}"
        self.target = target.removeprefix("http://")
        (folder / "key").write_text(key)
        job = {
            "job_name": "sglang_ext",
            "authorization": {"credentials_file": str(folder / "key")},
            "static_configs": [{"targets": [self.target, self.dead]}],
        }
        seconds = {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"}
        config = {"global": seconds, "rule_files": ["rules.yml"], "scrape_configs": [job]}
        (folder / "prometheus.yml").write_text(json.dumps(config))
        rules = yaml.safe_load(RULES.read_text("utf-8"))
        for group in rules["groups"]:
            group.pop("interval", None)
        (folder / "rules.yml").write_text(yaml.safe_dump(rules))
        self._log = (folder / "log").open("w")
        self._process = subprocess.Popen(
            [
                str(shutil.which("prometheus")),
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{self.port}",
                "--log.level=warn",
            ],
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )

    def end(self) -> None:
        """Stop it, and wait."""
        self._process.terminate()
        self._process.wait(timeout=30)
        self._log.close()

    def get(self, path: str, **fields: str) -> Any:
        """Return the data of one API call."""
        url = f"http://127.0.0.1:{self.port}/api/v1/{path}"
        answer = httpx.get(url, params=fields, timeout=30).json()
        assert answer["status"] == "success", answer
        return answer["data"]

    def query(self, expression: str) -> dict[frozenset[tuple[str, str]], float]:
        """Return the value of every series of an expression by its labels, without name."""
        found = self.get("query", query=expression)["result"]
        return {_labels(row["metric"]): float(row["value"][1]) for row in found}

    def wait_for(self, expression: str, value: float) -> None:
        """Return once the one series of an expression has this value."""
        end, seen = time.monotonic() + _SECONDS, None
        while time.monotonic() < end:
            try:
                seen = self.query(expression)
            except httpx.TransportError:
                seen = None
            if seen is not None and list(seen.values()) == [value]:
                return
            time.sleep(0.2)
        raise AssertionError(f"{expression} is {seen}, not {value}")

    def scraped_again(self, times: int = 2) -> None:
        """Return once everything that is on /metrics now was scraped, and rules ran on it."""
        count = f'scrape_samples_scraped{{instance="{self.target}"}}'
        stamps = f"timestamp({count})"
        last, left = None, times + 1
        end = time.monotonic() + _SECONDS
        while left:
            assert time.monotonic() < end, "it scrapes no more"
            now = self.query(stamps)
            left -= now != last
            last = now
            time.sleep(0.2)


def _labels(metric: Mapping[str, str]) -> frozenset[tuple[str, str]]:
    return frozenset((name, value) for name, value in metric.items() if name != "__name__")
