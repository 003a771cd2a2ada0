"""The decode pool's role: policy, kv.v1 sessions, main."""
