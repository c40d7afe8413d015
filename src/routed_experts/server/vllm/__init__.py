"""vLLM's routes: /tokenize, /detokenize and /tokenizer_info."""
