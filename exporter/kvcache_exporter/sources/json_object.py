"""The body of an answer that has to be a JSON object."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from kvcache_exporter.errors import SourceError


def json_object(url: str, body: bytes) -> Mapping[str, Any]:
    """Parse the body that `url` answered. Raises SourceError (`parse`)."""
    try:
        answer = json.loads(body)
    except ValueError as error:
        raise SourceError("parse", f"{url} did not answer JSON: {error}") from error
    if not isinstance(answer, dict):
        raise SourceError("parse", f"{url} answered JSON that is not an object")
    return answer
