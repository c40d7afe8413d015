"""RoutedExpertsRollout: Tunix's rollouts by an Engine, which gets the trainer's weights at each push.

Dims: B sequences, P tokens of a padded prompt, C of a padded answer."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float32, Int, Int32

from routed_experts.core.error_text import short_repr
from routed_experts.core.errors import (
    CaptureDisabledError,
    ConfigError,
    InvalidRequestError,
    RoutingAlignmentError,
    WeightsMismatchError,
)
from routed_experts.core.sampling_params import MAX_CHOICES, MAX_SEED
from routed_experts.engine.engine import Engine
from routed_experts.integrations.tunix.libraries import base_rollout, sft_utils
from routed_experts.integrations.tunix.records import RolloutRecord, pad_logprobs, to_record, token_key

_DECODER = "decoder"  # the attribute of Policy, with which the names of its weights begin


class RoutedExpertsRollout(base_rollout.BaseRollout):
    """Rollouts by an Engine, for `ClusterConfig(rollout_engine=functools.partial(RoutedExpertsRollout,
    engine=engine))`.

    Records of the answers since the last push are kept until `take`. The engine stays the caller's, who shuts it
    down."""

    def __init__(
        self,
        rollout_actor: nnx.Module,
        tokenizer: Any,
        mesh: Any,
        rollout_config: Any,
        *,
        engine: Engine,
        colocated: bool = False,
    ) -> None:
        """Arguments are Tunix's, but for two. `engine` serves the same architecture as the actor, in any dtype, and
        records rows. `colocated`: ReplayCluster frees the engine's KV pages while it trains.

        The weights of `rollout_actor` are pushed before the first rollout. Raises CaptureDisabledError for an engine
        that records nothing; ConfigError for one of raw logprobs, for a LoRA actor, for a tokenizer whose padding is
        its end token, and for lengths beyond the engine's context."""
        if not engine.server_args.enable_return_routed_experts:
            raise CaptureDisabledError(
                "the engine records no routed experts; build it with Engine(..., enable_return_routed_experts=True)"
            )
        if engine.server_args.logprobs_mode != "processed":
            raise ConfigError(
                f"the engine has logprobs_mode={engine.server_args.logprobs_mode!r}, and Tunix compares the logprobs "
                "with which a token was sampled; build it with 'processed'"
            )
        if sft_utils.is_lora_enabled(rollout_actor):
            raise ConfigError("the actor has LoRA weights, which the engine does not serve; train all weights")
        self._actor: nnx.Module | None = rollout_actor
        self._engine, self._tokenizer, self.colocated = engine, tokenizer, colocated
        self._records: list[RolloutRecord] = []
        self._num_pushes = self._num_calls = 0
        if self.pad_id() == self.eos_id():
            raise ConfigError(
                f"the tokenizer pads with its end token {self.eos_id()}, and Tunix would mask the last token of every "
                "answer; set another pad_token"
            )
        self._check_lengths(rollout_config)

    @property
    def engine(self) -> Engine:
        """The engine."""
        return self._engine

    @property
    def update_count(self) -> int:
        """The engine's count of updates: the version of rows that are recorded now."""
        return self._engine.get_weight_version().update_count

    def generate(self, prompts: Sequence[str], rollout_config: Any) -> Any:
        """Sample an answer to each prompt; returns Tunix's RolloutOutput.

        Prompts beyond `max_prompt_length` tokens keep their end, as padding is on the left. Equal prompts that follow
        one another share a prefill and have answers of their own, also with a `seed`, from which each call draws
        others: a run repeats, a step does not. Answers end with the tokenizer's end token (or `eos_tokens`), or with
        padding, which Tunix masks. Raises ConfigError for lengths beyond the engine's context, InvalidRequestError for
        a prompt that holds padding, and what Engine.generate raises."""
        self._push_first()
        self._check_lengths(rollout_config)
        if self.colocated:
            self._engine.resume_memory_occupation()
        width, pad = int(rollout_config.max_prompt_length), self.pad_id()
        cut = [self._encode(str(prompt), width) for prompt in prompts]
        groups = _groups(cut)
        results: Any = self._engine.generate(
            input_ids=[ids.tolist() for ids, _ in groups],
            sampling_params=self._sampling(rollout_config, [size for _, size in groups]),
            return_logprob=True,
            return_routed_experts=True,
            routed_experts_layers="moe",
        )
        self._num_calls += 1
        records = [to_record(prompt, result) for prompt, result in zip(cut, results, strict=True)]
        self._records += records
        padded = np.full((len(cut), width), pad, np.int32)
        for row, ids in zip(padded, cut, strict=True):
            row[width - ids.size :] = ids
        return base_rollout.RolloutOutput(
            text=[self._text(result, record) for result, record in zip(results, records, strict=True)],
            logits=None,
            tokens=[record.output_ids for record in records],
            left_padded_prompt_tokens=padded,
            logprobs=[record.logprobs for record in records] if rollout_config.return_logprobs else None,
        )

    def take(self) -> list[RolloutRecord]:
        """The records since the last push or `take`, in the order of their prompts; they are kept no longer."""
        records, self._records = self._records, []
        return records

    def find(self, prompt_tokens: Any, completion_tokens: Any) -> list[RolloutRecord]:
        """The kept record of each row of a padded batch (prompts [B, P] left, answers [B, C] right). Raises
        RoutingAlignmentError for tokens that were not sampled since the last push or `take`."""
        prompts, answers, pad = np.asarray(prompt_tokens), np.asarray(completion_tokens), self.pad_id()
        retained = {token_key(record.prompt_ids, record.output_ids, pad): record for record in self._records}
        retrieved = [retained.get(token_key(*row, pad)) for row in zip(prompts, answers, strict=True)]
        for index, record in enumerate(retrieved):
            if record is None:
                raise RoutingAlignmentError(
                    f"sample {index} is none of the {len(retained)} sequences that were sampled since the last push "
                    "of weights; score what the rollout returned, before the weights change"
                )
        return [record for record in retrieved if record is not None]

    def get_per_token_logps(
        self, prompt_tokens: Int[Array, "B P"], completion_tokens: Int[Array, "B C"]
    ) -> Float32[Array, "B C"]:
        """The logprobs with which these answers were sampled, 0 at padding; nothing is computed. Raises
        RoutingAlignmentError as `find`."""
        records = self.find(prompt_tokens, completion_tokens)
        return jnp.asarray(pad_logprobs(records, completion_tokens.shape[1]))

    def update_params(self, params: Any, filter_types: tuple[Any, ...] | None = None) -> None:
        """Serve copies of these weights, cast to the served dtypes, under the number of the push as a label. Records
        that were not taken are dropped. Raises WeightsMismatchError naming the arrays that differ, ConfigError for LoRA
        weights; then the old weights are served and the records stay."""
        if filter_types is not None and nnx.LoRAParam in filter_types:
            raise ConfigError("a push of LoRA weights: the engine serves whole weights; train all of them")
        self._push(params, self._num_pushes + 1)
        self._num_pushes += 1
        self._actor = None

    def pad_id(self) -> int:
        """The id of padding."""
        return int(self._tokenizer.pad_id())

    def eos_id(self) -> int:
        """The id that ends an answer."""
        return int(self._tokenizer.eos_id())

    def model(self) -> None:
        """None: the engine shares no array with the trainer, so Tunix pushes weights."""
        return

    def release(self) -> None:
        """Free the engine's KV pages until the next rollout. The weights stay."""
        self._engine.release_memory_occupation(["kv_cache"])

    def _push_first(self) -> None:
        """Push the actor's weights before the first rollout: the trainer may have restored a checkpoint."""
        if self._actor is not None:
            self._push(nnx.state(self._actor, nnx.Param), 0)
            self._actor = None

    def _push(self, params: Any, label: int) -> None:
        state = {".".join(map(str, name)): array for name, array in _named_arrays(params).items()}
        self._engine.update_weights(state, version=str(label), copy=True)
        self._records = []

    def _check_lengths(self, config: Any) -> None:
        limit = self._engine.components.context_length
        prompt, answer = int(config.max_prompt_length), int(config.max_tokens_to_generate)
        if prompt + answer > limit:
            raise ConfigError(
                f"max_prompt_length={prompt} and max_tokens_to_generate={answer} are {prompt + answer} tokens, and "
                f"the engine's context is {limit}; lower them, or build the engine with a longer context_length"
            )

    def _encode(self, prompt: str, width: int) -> Int32[np.ndarray, " prompt"]:
        """The ids of a prompt as Tunix's own sampler makes them, and of these the last `width`."""
        begin = [self._tokenizer.bos_id()] if self._tokenizer.bos_id() else []
        ids = np.asarray(self._tokenizer.dedup_bos_ids(begin + list(self._tokenizer.encode(prompt))), np.int32)[-width:]
        if (ids == self.pad_id()).any():
            raise InvalidRequestError(
                f"the prompt {short_repr(prompt)} holds the padding token {self.pad_id()}, which Tunix would mask; "
                "leave it out, or choose another pad_token",
                param="prompts",
            )
        return ids

    def _sampling(self, config: Any, sizes: Sequence[int]) -> list[dict[str, object]]:
        """Sampling values of each group, whose answers are choices of one seed."""
        ends = [int(token) for token in config.eos_tokens] if config.eos_tokens else [self.eos_id()]
        shared: dict[str, object] = {
            "temperature": float(config.temperature),
            "top_p": 1.0 if config.top_p is None else float(config.top_p),
            "top_k": -1 if config.top_k is None else int(config.top_k),
            "max_tokens": int(config.max_tokens_to_generate),
            "stop_token_ids": sorted({*ends, self.pad_id()}),
            "ignore_eos": True,  # of the checkpoint: Tunix names the end tokens
        }
        words = _seed_words(config.seed)
        seeds: list[dict[str, object]] = [
            {} if words is None else {"seed": _seed((*words, self._num_calls, index))} for index in range(len(sizes))
        ]
        return [{**shared, "n": size, **seed} for size, seed in zip(sizes, seeds, strict=True)]

    def _text(self, result: Mapping[str, Any], record: RolloutRecord) -> str:
        if self._engine.tokenizer is not None:
            return result["text"]
        ends = {self.eos_id(), self.pad_id()}
        return self._tokenizer.decode([token for token in record.output_ids.tolist() if token not in ends])


def _groups(prompts: Sequence[Int32[np.ndarray, " prompt"]]) -> list[tuple[Int32[np.ndarray, " prompt"], int]]:
    """Equal prompts that follow one another as (prompt, how many); a request has at most MAX_CHOICES answers."""
    groups: list[tuple[Int32[np.ndarray, " prompt"], int]] = []
    for _, run in groupby(prompts, key=lambda ids: ids.tobytes()):
        equal = list(run)
        sizes = [min(MAX_CHOICES, len(equal) - first) for first in range(0, len(equal), MAX_CHOICES)]
        groups += [(equal[0], size) for size in sizes]
    return groups


def _seed_words(seed: Any) -> tuple[int, ...] | None:
    """The words of a seed: an integer, or a key of JAX's in either form."""
    if seed is None:
        return None
    if isinstance(seed, jax.Array) and jnp.issubdtype(seed.dtype, jax.dtypes.prng_key):
        seed = jax.random.key_data(seed)
    return tuple(int(word) & MAX_SEED for word in np.asarray(seed).reshape(-1))


def _seed(words: Sequence[int]) -> int:
    return int(np.random.SeedSequence(words).generate_state(1, np.uint64)[0]) & MAX_SEED


def _named_arrays(params: Any) -> dict[tuple[Any, ...], Any]:
    """Names in the decoder, and arrays, of the state of a Policy."""
    if not isinstance(params, nnx.State):
        kind = type(params).__name__
        raise WeightsMismatchError(f"params is a {kind}; push nnx.state(policy, nnx.Param)", param="params")
    flat = {tuple(path): leaf for path, leaf in nnx.to_flat_state(params)}
    outside = [".".join(map(str, path)) for path in flat if path[0] != _DECODER]
    if outside:
        raise WeightsMismatchError(
            f"{outside[0]} is no array of a Policy; make the actor Policy(ModelFolder.open(path).load(dtype))",
            param="params",
        )
    return {path[1:]: leaf.get_raw_value() for path, leaf in flat.items()}
