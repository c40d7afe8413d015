"""vLLM's settings from the environment: none is set."""


def __getattr__(name: str) -> bool:
    if name.startswith("__"):
        raise AttributeError(name)
    return False
