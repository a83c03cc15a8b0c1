"""How results travel between stages."""
