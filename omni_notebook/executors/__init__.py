"""Executors carry calls to ranks: `uni` in this process; every caller sees the same contract."""
