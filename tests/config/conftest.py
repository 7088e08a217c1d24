from tests.config.workspace import workspace

__all__ = ["workspace"]
