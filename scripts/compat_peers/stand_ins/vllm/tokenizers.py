"""The tokenizer of the model of the tests, by whatever name a test asks for it."""

from typing import Any

from compat_peers import serving
from compat_peers.placeholders import missing

__getattr__ = missing("vllm.tokenizers")


def get_tokenizer(tokenizer_name: str, *args: object, **kwargs: object) -> Any:
    """transformers' tokenizer of the model."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(serving.model_path())
