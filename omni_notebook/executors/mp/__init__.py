"""Ranks in processes of their own: one child a rank, control over a socket pair, big payloads in shared memory."""
