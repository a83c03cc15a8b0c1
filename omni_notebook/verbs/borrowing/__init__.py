"""Borrowed memory: stages sleep while someone else's code runs, and wake when it has ended."""
