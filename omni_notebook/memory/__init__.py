"""Pools of tagged device memory, and probes that measure them."""
