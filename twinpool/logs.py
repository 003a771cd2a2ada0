"""Logging of one process: lines on standard error, as text or as JSON objects."""

from __future__ import annotations

import json
import logging
import sys

from twinpool.config import LoggingSection
from twinpool.errors import InvalidRequest

EXTRA = ("request_id", "outcome")
"""What a line may carry beside its text; an object's keys in JSON."""


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": self.formatTime(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        for name in EXTRA:
            if hasattr(record, name):
                entry[name] = record.__dict__[name]
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry)


LEVELS = ("debug", "info", "warning", "error")


def set_level(level: str) -> None:
    """Changes how much the process logs from now on.

    Raises:
        InvalidRequest: no such level.
    """
    if level not in LEVELS:
        raise InvalidRequest(f"there is no log level {level!r}; the levels are {', '.join(LEVELS)}", "level")
    logging.getLogger("twinpool").setLevel(level.upper())


def setup_logging(section: LoggingSection) -> None:
    """Configures the root logger; called once, by the process's entry point."""
    handler = logging.StreamHandler(sys.stderr)
    text = logging.Formatter("%(asctime)s %(levelname).1s %(name)s: %(message)s", "%H:%M:%S")
    handler.setFormatter(_JsonFormatter() if section.format == "json" else text)
    level = logging.getLevelNamesMapping()[section.level.upper()]
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("twinpool").setLevel(level)
