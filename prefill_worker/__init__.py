"""The prefill pool's role: policy, kv.v1 service, main."""
