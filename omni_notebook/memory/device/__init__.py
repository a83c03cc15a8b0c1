"""Parts of the pools over device memory that is mapped and unmapped by segments; `memory.cumem` puts them together."""
