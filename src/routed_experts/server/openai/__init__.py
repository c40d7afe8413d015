"""OpenAI's routes: /v1/chat/completions and /v1/completions, with a shared handler."""
