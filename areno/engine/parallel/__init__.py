"""Multi-device execution: worker processes, process groups and sharding."""
