"""twinpool serves language models from a prefill pool and a decode pool."""

__version__ = "0.1.0"
