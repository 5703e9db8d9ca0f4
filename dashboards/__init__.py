"""Grafana boards as code: one module a board, built into the JSON beside it by `python -m dashboards.build`."""
