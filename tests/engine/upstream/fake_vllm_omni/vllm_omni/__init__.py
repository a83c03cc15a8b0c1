"""A stand-in for vllm_omni 0.30: its published signatures and its answers, gaps among them, over real processes."""

__version__ = "0.30.0"
