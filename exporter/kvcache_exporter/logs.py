"""Log lines as key=value, one line an event, as Prometheus and its exporters write them."""

from __future__ import annotations

import logging
import sys
from datetime import datetime, timezone


class _Logfmt(logging.Formatter):
    """`time=… level=… msg=… key=value …`; the keys come from `extra={"fields": {…}}`."""

    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "time": datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "msg": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return " ".join(f"{key}={_quoted(str(value))}" for key, value in fields.items())


def set_up_logging(level: str) -> None:
    """Send the log of this program to standard error; `level` is a name such as `info`."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Logfmt())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    # One line a connection is of no use to anybody, and would hold the addresses of all targets.
    logging.getLogger("urllib3").setLevel(logging.WARNING)


def _quoted(text: str) -> str:
    if text and not any(character in text for character in ' "=\n\r\t\\'):
        return text
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\r", "\\r").replace("\t", "\\t")
    return f'"{escaped}"'
