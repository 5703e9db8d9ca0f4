"""One /metrics page, fetched over HTTP and parsed by the Prometheus client library."""

from __future__ import annotations

from dataclasses import dataclass

import requests
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

_TIMEOUT_SECONDS = 10.0


@dataclass(frozen=True)
class Page:
    """All samples of one page."""

    samples: tuple[Sample, ...]

    def all(self, name: str, **labels: str) -> list[Sample]:
        """Samples of this name that carry these labels among others."""
        return [s for s in self.samples if s.name == name and labels.items() <= s.labels.items()]

    def get(self, name: str, **labels: str) -> float | None:
        """Value of the only such sample; None when there is none."""
        found = self.all(name, **labels)
        if len(found) > 1:
            raise LookupError(f"{name}{labels} is not one sample but {len(found)}")
        return found[0].value if found else None

    def value(self, name: str, **labels: str) -> float:
        """Value of the only such sample. Raises LookupError when there is none."""
        value = self.get(name, **labels)
        if value is None:
            raise LookupError(f"{name}{labels} is not on the page")
        return value


def fetch_page(url: str) -> Page:
    """Get and parse a page. Raises requests.RequestException."""
    response = requests.get(url, headers={"Accept": "text/plain;version=0.0.4"}, timeout=_TIMEOUT_SECONDS)
    response.raise_for_status()
    families = text_string_to_metric_families(response.text)
    return Page(tuple(sample for family in families for sample in family.samples))
