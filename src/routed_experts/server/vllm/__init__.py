"""vLLM's routes: /tokenize, /detokenize, /tokenizer_info and /inference/v1/generate, and /skyrl/v1/generate."""
