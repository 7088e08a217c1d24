"""Text processing around the model: chat templates, detokenization, stop strings, reasoning and tool-call parsers.

Submodules import ``transformers`` only where they need it, so the package stays cheap to import.
"""
