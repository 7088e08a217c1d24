"""The OpenAI-compatible HTTP server: request schemas, streaming and the server itself."""
