"""EditableSamplingParams: the defaults of an engine, for scripts of vLLM and sgl-jax that set their fields one by one.

params = engine.get_default_sampling_params()
params.max_new_tokens = 64"""

from typing import Any

from routed_experts.core.sampling_params import field_name


class EditableSamplingParams(dict[str, object]):
    """A mapping that `generate` takes as sampling parameters. Its entries are also attributes, by our names, SGLang's
    and vLLM's; one that was not set is None. Values are checked where they are used."""

    def __getattr__(self, name: str) -> Any:
        """The value of a field. Raises AttributeError for a name that is none."""
        if name.startswith("__"):
            raise AttributeError(name)
        return self.get(field_name(name))

    def __setattr__(self, name: str, value: object) -> None:
        """Set a field. Raises InvalidRequestError for a name that is none."""
        self[field_name(name)] = value

    def convert_to_dict(self) -> dict[str, object]:
        """A copy as a plain dict, by the name of sgl-jax's SamplingParams."""
        return dict(self)
