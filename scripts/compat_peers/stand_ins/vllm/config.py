"""What tests read of a model's configuration: the size of its vocabulary."""

import json
from pathlib import Path

from compat_peers import serving
from compat_peers.placeholders import missing

__getattr__ = missing("vllm.config")


class ModelConfig:
    """That of the model of the tests."""

    def __init__(self, **kwargs: object) -> None:
        self.vocab_size = json.loads(Path(serving.model_path(), "config.json").read_text())["vocab_size"]
        self.max_logprobs = 20

    def get_vocab_size(self) -> int:
        """Ids that the model has."""
        return self.vocab_size
