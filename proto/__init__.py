"""Wire contract: inference (public), worker (router and workers), kv (decode and prefill workers)."""
