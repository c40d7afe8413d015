"""The tokenizer of the model of the tests, by whatever name a test asks for it."""

from vllm.tokenizers import get_tokenizer

__all__ = ["get_tokenizer"]
