"""`python -m kvcache_exporter` is `kvcache-exporter`."""

from kvcache_exporter.cli import main

main()
