"""vLLM's errors of bad input are ValueErrors, as ours are."""

from compat_peers.placeholders import missing

VLLMValidationError = ValueError
__getattr__ = missing("vllm.exceptions")
