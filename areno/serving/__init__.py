"""The OpenAI protocol over the engine: request schemas, HTTP server, streaming."""
