"""Decoder, diffusion transformer, their loaders and the demo weights. Importing this package imports no torch."""
