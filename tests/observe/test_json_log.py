"""Log lines for machines: one object each, and never a key."""

import json
import logging
import logging.config
import os
import sys
from pathlib import Path

import pytest

from sglang_ext.observe import json_log
from sglang_ext.observe.json_log import JsonFormatter
from sglang_ext.tenancy.keys import new_key


def _line(message: str, *values: object, error: bool = False) -> dict[str, object]:
    record = logging.LogRecord("a.b", logging.WARNING, "f.py", 1, message, values, None)
    if error:
        try:
            raise ValueError("bad Bearer top-secret-key")
        except ValueError:
            record.exc_info = sys.exc_info()
    text = JsonFormatter(fmt="%(message)s", datefmt="x", use_colors=None).format(record)
    assert "\n" not in text
    found = json.loads(text)
    assert isinstance(found, dict)
    return found


def test_a_line_says_when_where_and_what() -> None:
    line = _line("ü %s\n%d", "é", 3)
    assert line["message"] == "ü é\n3"
    assert (line["level"], line["logger"], line["process"]) == ("WARNING", "a.b", os.getpid())
    assert str(line["time"]).endswith("Z")
    assert "trace" not in line
    assert "ValueError" in str(_line("failed", error=True)["trace"])


KEY = new_key()


@pytest.mark.parametrize(
    "message",
    [
        f"headers: {{'authorization': 'Bearer {KEY}'}}",
        f"x-api-key: {KEY}",
        f"ServerArgs(api_key='{KEY}', port=1)",
        f'{{"admin_api_key": "{KEY}"}}',
        f"somebody pasted {KEY} here",
        "Authorization: Bearer short-key",
    ],
)
def test_no_key_is_in_it(message: str) -> None:
    line = _line(message)
    assert KEY not in str(line)
    assert "short-key" not in str(line)
    assert "***" in str(line["message"])


def test_no_key_is_in_a_trace() -> None:
    assert "top-secret-key" not in str(_line("failed", error=True))


def test_other_text_is_left_alone() -> None:
    text = "the key of a node, the bearer of news, an API key is missing"
    assert _line(text)["message"] == text


def test_the_configuration_can_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("uvicorn.config.LOGGING_CONFIG", {"formatters": {"access": {"()": "x"}}})
    monkeypatch.delenv("SGLANG_LOGGING_CONFIG_PATH", raising=False)
    json_log.switch_on()
    config = json.loads(Path(os.environ["SGLANG_LOGGING_CONFIG_PATH"]).read_text("utf-8"))
    monkeypatch.delenv("SGLANG_LOGGING_CONFIG_PATH")
    logging.config.DictConfigurator(config).configure_formatter(config["formatters"]["json"])
    from uvicorn.config import LOGGING_CONFIG

    assert LOGGING_CONFIG["formatters"]["access"]["()"].endswith("json_log.JsonFormatter")
