"""The OpenAI dialect: chat and text completions, their parameters, chunks and chat templates."""
