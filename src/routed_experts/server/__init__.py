"""HTTP server over one engine: the routes of OpenAI, Anthropic, SGLang and vLLM. Needs the extra `serve`.

One chat completion: http_protocol -> middleware -> app -> openai/chat -> state -> AsyncEngine -> generation_handler and
openai/handler -> sse.

    run                      one process: bind, load, serve, drain, exit
    http_protocol            connections and their limits
    middleware               keys, request ids, error responses, access log
    app, openapi             table of routes and its description
    openai/ anthropic/ sglang/ vllm/    one dialect each: body -> GenerateReqInput, outputs -> JSON
    routing/                 rows in responses and by reference, scores, expert counts
    admin/                   weights, pause, health, memory
    metrics/                 what Prometheus reads
    chat_handler             responses that are made of items: /v1/responses, /v1/messages
    chat_prompt, tools, forced_calls     messages and tools as a prompt, and calls that must be made
    probes                   the health routes of a follower, which serves nothing else
    state, generation_handler, body, protocol, chat_template, sse, errors, executors, limits     shared by the routes
    routing_store, cached_reader, integrity     what the state holds beside the engine
    playground               the page at /"""
