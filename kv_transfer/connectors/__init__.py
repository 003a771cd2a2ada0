"""Connectors: how bytes of KV travel. One interface, one contract suite."""
