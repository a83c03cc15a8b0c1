"""One rank: it owns a model and its memory, runs batches and carries out control orders."""
