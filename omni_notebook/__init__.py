"""The memory cockpit for multi-stage generation in Jupyter."""
