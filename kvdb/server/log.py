"""The log of a server: one line for each event and each record of kvdb's loggers, for people or as JSON."""

import json
import logging
import re
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from time import monotonic

from kvdb.config import LogConfig
from kvdb.events import Event, Fact, Kind, origin

LEVELS: Mapping[Kind, int] = {
    Kind.SESSION_CLOSED: logging.DEBUG,
    Kind.EVICTED: logging.WARNING,
    Kind.QUOTA: logging.WARNING,
    Kind.REFUSED: logging.WARNING,
    Kind.FAILED: logging.ERROR,
    Kind.INDEX_FAILED: logging.ERROR,
    Kind.CHECKSUM_FAILED: logging.ERROR,
}
"""The levels of events; the others are INFO."""
LINES_PER_SECOND = 200
"""The most lines of one kind of event that are written in a second; the next line says how many were left out."""

_log = logging.getLogger("kvdb.events")
_plain = re.compile(r"[\w.:/+-]+", re.ASCII).fullmatch


class EventLog:
    """A sink that writes events to a logger of the standard library."""

    def __init__(self) -> None:
        self._second: dict[Kind, tuple[int, int]] = {}  # of each kind the second, and how many came in it

    def __call__(self, event: Event) -> None:
        """Write one event, unless too many like it came in this second."""
        now = int(monotonic())
        second, number = self._second.get(event.kind, (now, 0))
        left_out = max(0, number - LINES_PER_SECOND) if second != now else 0
        number = number + 1 if second == now else 1
        self._second[event.kind] = now, number
        if number > LINES_PER_SECOND:
            return
        facts = dict(event.facts)
        if left_out:
            facts["left_out"] = left_out
        _log.log(LEVELS.get(event.kind, logging.INFO), event.kind, extra={"facts": facts})


class _Lines(logging.Formatter):
    """The parts of a record that both forms have."""

    @staticmethod
    def facts(record: logging.LogRecord) -> dict[str, Fact]:
        """What is said beside the message: the facts of an event, and whose call it was."""
        by = origin()
        whose = {"tenant": by.tenant, "request_id": by.request}
        found: dict[str, Fact] = getattr(record, "facts", {})
        return {**found, **{name: value for name, value in whose.items() if value}}

    @staticmethod
    def when(record: logging.LogRecord) -> str:
        """The time in UTC, to the millisecond."""
        return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


class HumanLines(_Lines):
    """`2026-01-01T12:00:00.000Z info context_stored context=doc tokens=100`: one line, whatever is told."""

    def format(self, record: logging.LogRecord) -> str:
        facts = "".join(f" {name}={_shown(value)}" for name, value in self.facts(record).items())
        trace = f" {_shown(self.formatException(record.exc_info))}" if record.exc_info else ""
        return f"{self.when(record)} {record.levelname.lower()} {_one_line(record.getMessage())}{facts}{trace}"


class JsonLines(_Lines):
    """An object a line, with time, level, logger, message and the facts."""

    def format(self, record: logging.LogRecord) -> str:
        said = {"time": self.when(record), "level": record.levelname.lower(), "logger": record.name, "event": record.getMessage()}
        trace = {"trace": self.formatException(record.exc_info)} if record.exc_info else {}
        return json.dumps({**said, **self.facts(record), **trace})


def open_log(config: LogConfig) -> EventLog:
    """Have kvdb's loggers write to stderr, as the configuration says. Returns the sink of events."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if config.format == "json" else HumanLines())
    logger = logging.getLogger("kvdb")
    logger.handlers[:] = [handler]
    logger.propagate = False
    logger.setLevel(config.level.upper())
    return EventLog()


def _shown(value: Fact) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(value)
    return text if _plain(text) else json.dumps(text)


def _one_line(text: str) -> str:
    return text.replace("\r", "\\r").replace("\n", "\\n")
