"""What people touch in Jupyter: the magic, tables, charts, completion."""
