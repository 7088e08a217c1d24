"""Memory: what the machine has, and what a run will take."""
