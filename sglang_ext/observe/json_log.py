"""Logs as one JSON object a line, for machines, without a key in it.

SGLang's processes read their logging configuration from a file that an environment variable names;
ours lies beside this module.
"""

import json
import logging
import os
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sglang_ext.tenancy.keys import KEY_PREFIX

__all__ = ["JsonFormatter", "switch_on"]

_VARIABLE = "SGLANG_LOGGING_CONFIG_PATH"
_CONFIG = Path(__file__).with_name("json_logging.json")
_FORMATTER = f"{__name__}.JsonFormatter"
# What follows the names under which a key travels, and keys that `sglang-ext keygen` made.
_SECRETS = re.compile(
    r"(?i)((?:bearer|api[_-]?key)['\"]?\s*[:=]?\s*['\"]?|" + KEY_PREFIX + r")([^\s'\",)]{6,})"
)


class JsonFormatter(logging.Formatter):
    """Writes time (UTC), level, logger, message, process and, of an error, its trace.

    The ``settings`` of other formatters are taken and ignored, so that this one can stand for any.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__()

    def format(self, record: logging.LogRecord) -> str:
        """Return one line."""
        when = datetime.fromtimestamp(record.created, UTC)
        line = {
            "time": when.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname,
            "logger": record.name,
            "process": record.process,
            "message": _without_secrets(record.getMessage()),
        }
        if record.exc_info:
            line["trace"] = _without_secrets(self.formatException(record.exc_info))
        return json.dumps(line, ensure_ascii=False)


def _without_secrets(text: str) -> str:
    return _SECRETS.sub(r"\1***", text)


def switch_on() -> None:
    """Let this process, and those that it starts, log JSON; before SGLang sets up its logs."""
    from uvicorn.config import LOGGING_CONFIG

    os.environ[_VARIABLE] = str(_CONFIG)
    for formatter in LOGGING_CONFIG["formatters"].values():
        formatter["()"] = _FORMATTER
