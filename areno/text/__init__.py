"""Text in and out of a model: chat templates, incremental detokenizing, stop strings.

The submodules import ``transformers`` where they load a tokenizer, so this package itself stays cheap to import.
"""
