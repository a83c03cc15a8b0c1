"""An installed `vllm_omni` engine behind this package's API; what it does not measure is measured from outside."""
