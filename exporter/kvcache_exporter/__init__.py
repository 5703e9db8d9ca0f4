"""KV-cache capacity, headroom and remaining request slots of vLLM engines, for Prometheus."""

__version__ = "0.1.0"
