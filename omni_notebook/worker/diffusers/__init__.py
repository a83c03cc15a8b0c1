"""Runs a diffusers pipeline on one rank; the only part of this package that imports diffusers."""
