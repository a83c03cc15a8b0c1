"""The audit: baseline, golden outputs, sleep, a look from outside, wake, the same outputs? A verdict with reasons."""
