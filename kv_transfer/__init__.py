"""KV blocks between pools: layout, plans, ownership of an exchange, connectors."""
