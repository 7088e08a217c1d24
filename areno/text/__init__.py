"""Text processing around the model: chat templates, detokenization, stop strings, reasoning and tool-call parsers.

- ``chat``: prompts to token ids
- ``messages``: messages for chat templates
- ``markers``: detects markers in prompts
- ``data_rows``: common formats of dataset rows
- ``hub``: whether a model is available
- ``detok``: tokens to text, incrementally
- ``stop``: stop strings
- ``growing``: repeated searches in growing text
- ``reasoning``: separates reasoning from content
- ``tool_calls``: parses tool calls
- ``grammar``: structured output

Importing this package is cheap: ``transformers`` is imported only on use.
"""
