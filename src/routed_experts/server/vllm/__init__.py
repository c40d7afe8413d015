"""vLLM's routes: /tokenize, /detokenize, /tokenizer_info and /inference/v1/generate; and SkyRL's of the last."""
