"""Memory planning: available memory, and the memory that a run will need."""
