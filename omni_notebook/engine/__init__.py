"""The engine: all stages of one pipeline, their gates, orders and events."""
