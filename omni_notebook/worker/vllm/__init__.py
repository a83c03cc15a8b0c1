"""vLLM as a runtime: a host process around `AsyncLLM`, and in each of vLLM's workers a rank that answers our orders."""
