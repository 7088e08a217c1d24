"""Programs that turn a run's traces into what people look at; each is run with ``python -m areno.tools.NAME``."""
