"""A stage is one model with its scheduler, its replicas and its states."""
