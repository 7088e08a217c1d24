"""The OpenAI-compatible HTTP server, for ``areno serve`` and for agents in training.

- ``server``: runs the server; ``app``: the routes; ``middleware`` and ``connections``: check API keys and limits.
- ``service``: admission control, and the requests in flight.
- ``chat_api``, ``completions_api``, ``responses_api`` and ``messages_api``: one module per endpoint.
- ``protocol_adapter``: base of ``responses_api`` and ``messages_api``, which convert requests to chat requests.
- ``schemas``: fields of requests; ``request_builder``: builds engine requests; ``formats``: reasoning, tools and grammars.
- ``generation``: reads tokens from the engine's thread; ``streaming``: sends responses; ``token_text``: decodes tokens.
- ``response_base``: shared parts of responses; ``errors``: errors in OpenAI's format; ``metrics``: ``GET /metrics``.
- ``recording``: the interface through which conversations are recorded for training; ``client``: the client of ``areno chat``.
"""
