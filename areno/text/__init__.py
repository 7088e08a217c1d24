"""Text processing for a model's input and output: chat templates, detokenization, stop strings and parsers.

- ``chat``: converts prompts to token ids
- ``messages``: converts messages for chat templates
- ``markers``: detects chat template markers in prompts
- ``data_rows``: converts dataset rows in common formats
- ``hub``: checks whether a model is available locally or on the Hugging Face Hub
- ``detok``: converts tokens to text incrementally
- ``stop``: detects stop strings
- ``growing``: searches streamed text in linear time
- ``reasoning``: separates reasoning from content
- ``tool_calls``: parses tool calls
- ``grammar``: constrains responses (structured output)

Importing this package is fast, because ``transformers`` is imported only when needed.
"""
