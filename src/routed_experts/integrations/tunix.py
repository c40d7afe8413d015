"""Tunix: RL in JAX whose rollouts come from an Engine, and which trains on the experts that the rollout ran on.

    rollout   prompts -> RoutedExpertsRollout.generate -> Engine: tokens, logprobs, rows (RolloutRecord)
    learner   ReplayGRPOLearner: Tunix's example, and the rows aligned with its tokens (ReplayExample)
    loss      with_replay("grpo"): Tunix's own loss, with the policy wrapped (Replayed)
    push      Tunix's sync_weights -> RoutedExpertsRollout.update_params -> Engine.update_weights

Nothing of Tunix is changed. Invariants: rows are of the weights of the last push and of the tokens of their example,
or an error is raised; the reference policy routes live. Importing this module needs the extra tunix.
Dims: B sequences, P tokens of a padded prompt, C of a padded answer, S = P + C, V vocabulary, M MoE layers, K experts
per token."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx, struct
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int, Int32, UInt

from routed_experts.core.error_text import short_repr
from routed_experts.core.errors import (
    CaptureDisabledError,
    ConfigError,
    InvalidRequestError,
    RoutingAlignmentError,
    WeightsMismatchError,
)
from routed_experts.core.installation import import_optional
from routed_experts.core.routed_experts import RoutedExperts
from routed_experts.core.sampling_params import MAX_CHOICES, MAX_SEED
from routed_experts.engine.engine import Engine
from routed_experts.formats.meta_info import record_from_meta_info
from routed_experts.models.base.interface import Decoder
from routed_experts.replay import (
    CanaryGate,
    ForwardOutput,
    RoutedBatch,
    Sample,
    align,
    canary,
    forward,
    mismatch_report,
)


def _tunix(module: str) -> Any:
    return import_optional(f"tunix.{module}", purpose="routed_experts.integrations.tunix", extra="tunix")


base_rollout, common, function_registry = (
    _tunix("rl.rollout.base_rollout"),
    _tunix("rl.common"),
    _tunix("rl.function_registry"),
)
rl_cluster_lib, grpo_learner, sft_utils = _tunix("rl.rl_cluster"), _tunix("rl.grpo.grpo_learner"), _tunix("sft.utils")
rl_utils, sharding_utils = _tunix("rl.utils"), _tunix("sft.sharding_utils")

REPLAY_SUFFIX = "_replay"
_DECODER = "decoder"  # the attribute of Policy, with which the names of its weights begin


class Policy(nnx.Module):
    """A decoder in the calling convention of Tunix's models: the actor, or the reference, of a cluster."""

    def __init__(self, decoder: Decoder, *, compute_dtype: str | None = None) -> None:
        """`decoder` is a loaded model with MoE layers, such as `ModelFolder.open(path).load(dtype)`.

        With `compute_dtype` its weights are cast at each call, but for those that an engine of this dtype keeps in
        float32: float32 master weights are then trained through the very weights that are served. Raises ConfigError
        for a model without MoE layers."""
        if decoder.config.capture_spec is None:
            raise ConfigError("the model has no MoE layer, so there is no routing to replay; use a model of Tunix")
        self.decoder = decoder
        self.compute_dtype = None if compute_dtype is None else jnp.dtype(compute_dtype).name

    @property
    def config(self) -> Any:
        """The decoder's config."""
        return self.decoder.config

    def __call__(
        self,
        input_tokens: Int[Array, "B S"],
        positions: Int[Array, "B S"] | None = None,
        cache: None = None,
        attention_mask: Bool[Array, "B S S"] | None = None,
        segment_ids: Int[Array, "B S"] | None = None,
        forced_routed_experts: Int[Array, "B S M K"] | None = None,
    ) -> tuple[Float32[Array, "B S V"], None]:
        """Logits of whole sequences, and no cache.

        Padding is where `segment_ids` are 0, else where `attention_mask` hides a token from itself. A token whose
        `forced_routed_experts` hold -1 is routed live, as all are without them. Raises InvalidRequestError for a
        `cache`, which this module does not keep."""
        spec = self.config.capture_spec
        if forced_routed_experts is None:
            ids = jnp.zeros((*input_tokens.shape, spec.num_moe_layers, spec.top_k), spec.dtype)
            # Hidden from the compiler, which would drop the replay's operations and so round differently.
            ids, valid = lax.optimization_barrier((ids, jnp.zeros(input_tokens.shape, bool)))
        else:
            valid = jnp.all(forced_routed_experts >= 0, axis=(2, 3))
            ids = jnp.maximum(forced_routed_experts, 0).astype(spec.dtype)
        out = self.run(input_tokens, positions, cache, attention_mask, segment_ids, ids=ids, valid=valid)
        return out.logits, None

    def run(
        self,
        input_tokens: Int[Array, "B S"],
        positions: Int[Array, "B S"] | None,
        cache: None,
        attention_mask: Bool[Array, "B S S"] | None,
        segment_ids: Int[Array, "B S"] | None,
        *,
        ids: UInt[Array, "B S M K"],
        valid: Bool[Array, "B S"],
        return_routed: bool = False,
    ) -> ForwardOutput:
        """`__call__` on rows to replay, with all that `replay.forward` returns."""
        if cache is not None:
            raise InvalidRequestError(
                "cache is given, and Policy computes whole sequences without one; sample with RoutedExpertsRollout "
                "(ClusterConfig.rollout_engine)",
                param="cache",
            )
        pad = _padding(input_tokens, attention_mask, segment_ids)
        routed = RoutedBatch(ids, valid & ~pad, pad)
        return forward(
            self.decoder if self.compute_dtype is None else _cast(self.decoder, jnp.dtype(self.compute_dtype)),
            input_tokens,
            positions=positions,
            segment_ids=segment_ids,
            routed=routed,
            return_routed=return_routed,
        )


def _cast(decoder: Any, dtype: jnp.dtype) -> Any:
    """The decoder as an engine of this dtype serves it. The gradient goes to the weights that are cast."""
    graphdef, state = nnx.split(decoder)
    arrays = [
        (path, leaf if leaf.get_metadata().get("wide", False) else leaf.replace(leaf.get_raw_value().astype(dtype)))
        for path, leaf in nnx.to_flat_state(state)
    ]
    return nnx.merge(graphdef, nnx.from_flat_state(arrays))


class Rows(nnx.Variable[Any]):
    """Rows of a batch inside a module. No Param: neither gradients nor the optimiser see it."""


class Replayed(nnx.Module):
    """A policy together with the rows of one batch, which every call replays."""

    def __init__(self, policy: Policy, ids: UInt[Array, "B S M K"], valid: Bool[Array, "B S"]) -> None:
        self.policy, self.ids, self.valid = policy, Rows(ids), Rows(valid)

    @property
    def config(self) -> Any:
        """The policy's config."""
        return self.policy.config

    def __call__(
        self,
        input_tokens: Int[Array, "B S"],
        positions: Int[Array, "B S"] | None = None,
        cache: None = None,
        attention_mask: Bool[Array, "B S S"] | None = None,
        segment_ids: Int[Array, "B S"] | None = None,
    ) -> tuple[Float32[Array, "B S V"], None]:
        """`Policy.__call__` on these rows; a token whose row is not valid is routed live."""
        ids, valid = self.ids[...], self.valid[...]
        return self.policy.run(
            input_tokens, positions, cache, attention_mask, segment_ids, ids=ids, valid=valid
        ).logits, None


def _padding(
    tokens: Int[Array, "B S"], attention_mask: Bool[Array, "B S S"] | None, segment_ids: Int[Array, "B S"] | None
) -> Bool[Array, "B S"]:
    """Where no token is."""
    if segment_ids is not None:
        return segment_ids == 0
    if attention_mask is not None:
        return ~jnp.diagonal(attention_mask.astype(bool), axis1=-2, axis2=-1)
    return jnp.zeros(tokens.shape, bool)


@struct.dataclass(frozen=True)
class ReplayExample(grpo_learner.TrainExample):
    """Tunix's example, and the rows of its tokens: prompts end, and answers begin, at column P. Tunix slices it along B
    as it does the other fields."""

    routed_ids: UInt[Array, "B S M K"] | None = None
    routed_valid: Bool[Array, "B S"] | None = None


def with_replay(name: str) -> Callable[..., Any]:
    """Register Tunix's policy loss `name` once more, on the rows of a ReplayExample, as `name + "_replay"`; returns
    it. "grpo_replay", which is also the loss of DrGRPO and DAPO, and "ppo_replay" are registered by this module.

    The loss raises ConfigError for packed sequences and for a model that is no Policy, and RoutingAlignmentError for
    an example without rows. Raises ConfigError for a loss that Tunix does not have."""
    try:
        function_registry.get_policy_loss_fn(name)
    except LookupError as error:
        known = function_registry.default_registry.list_functions("policy_loss_fn")
        raise ConfigError(f"policy loss {name!r} is not registered; Tunix has {', '.join(sorted(known))}") from error

    def loss(model: Any, train_example: Any, algo_config: Any, pad_id: int, eos_id: int, **options: Any) -> Any:
        """Tunix's loss with the policy wrapped. `options` are Tunix's own, which differ between its releases."""
        ids, valid = _rows(train_example)
        if not isinstance(model, Policy):
            kind = type(model).__name__
            raise ConfigError(f"the actor is a {kind}; rows are replayed by routed_experts.integrations.tunix.Policy")
        wrapped = Replayed(model, ids, valid)
        live_loss = function_registry.get_policy_loss_fn(name)
        return live_loss(wrapped, train_example, algo_config=algo_config, pad_id=pad_id, eos_id=eos_id, **options)

    return function_registry.register_policy_loss_fn(name + REPLAY_SUFFIX)(loss)


def _rows(example: Any) -> tuple[Any, Any]:
    """The rows of an example, at trace time. Raises ConfigError and RoutingAlignmentError."""
    if getattr(example, "segment_ids", None) is not None:
        raise ConfigError(
            "the example holds packed sequences, and Tunix's packing drops the rows; leave "
            "RLTrainingConfig.max_seq_token_per_tpu unset"
        )
    ids, valid = getattr(example, "routed_ids", None), getattr(example, "routed_valid", None)
    if ids is None or valid is None:
        raise RoutingAlignmentError(
            f"a {type(example).__name__} without rows reached a loss with replay; make examples with ReplayGRPOLearner"
        )
    return ids, valid


replay_loss = with_replay("grpo")
with_replay("ppo")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RolloutRecord:
    """One answer as the engine gave it: the prompt as it was fed (cut from the left to its limit), the sampled tokens
    (an end token included), their logprobs under the sampling distribution, and the rows; None where nothing was fed:
    of a request that was aborted in the queue."""

    prompt_ids: Int32[np.ndarray, " prompt"]
    output_ids: Int32[np.ndarray, " answer"]
    logprobs: Float32[np.ndarray, " answer"]
    routed: RoutedExperts | None
    finish_reason: str  # "stop", "length" or "abort"

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and answer."""
        return self.prompt_ids.size + self.output_ids.size


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
        that records nothing; ConfigError for a LoRA actor, for a tokenizer whose padding is its end token, and for
        lengths beyond the engine's context."""
        if not engine.server_args.enable_return_routed_experts:
            raise CaptureDisabledError(
                "the engine records no routed experts; build it with Engine(..., enable_return_routed_experts=True)"
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
        records = [_record(prompt, result) for prompt, result in zip(cut, results, strict=True)]
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
        kept = {_key(record.prompt_ids, record.output_ids, pad): record for record in self._records}
        found = [kept.get(_key(*row, pad)) for row in zip(prompts, answers, strict=True)]
        for index, record in enumerate(found):
            if record is None:
                raise RoutingAlignmentError(
                    f"sample {index} is none of the {len(kept)} sequences that were sampled since the last push of "
                    "weights; score what the rollout returned, before the weights change"
                )
        return [record for record in found if record is not None]

    def get_per_token_logps(
        self, prompt_tokens: Int[Array, "B P"], completion_tokens: Int[Array, "B C"]
    ) -> Float32[Array, "B C"]:
        """The logprobs with which these answers were sampled, 0 at padding; nothing is computed. Raises
        RoutingAlignmentError as `find`."""
        records = self.find(prompt_tokens, completion_tokens)
        return jnp.asarray(_pad_logprobs(records, completion_tokens.shape[1]))

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
        served = dict(nnx.to_flat_state(self._engine.components.served.arrays))
        arrays = _named_arrays(params)
        names = list(arrays)
        dtypes = tuple(served[name].dtype if name in served else None for name in names)
        copies = _copies(tuple(arrays.values()), dtypes)
        state = {".".join(map(str, name)): copy for name, copy in zip(names, copies, strict=True)}
        self._engine.update_weights(state, version=str(label), donate=True)
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


def _record(prompt: Int32[np.ndarray, " prompt"], result: Mapping[str, Any]) -> RolloutRecord:
    meta = result["meta_info"]
    logprobs = [value for value, _, _ in meta["output_token_logprobs"]]
    return RolloutRecord(
        prompt_ids=prompt,
        output_ids=np.asarray(result["output_ids"], np.int32),
        logprobs=np.asarray(logprobs, np.float32),
        routed=record_from_meta_info(result),
        finish_reason=meta["finish_reason"]["type"],
    )


def _key(prompt: Int[np.ndarray, " P"], answer: Int[np.ndarray, " C"], pad: int) -> tuple[bytes, bytes]:
    """The tokens of a sequence without padding. An answer's padding is behind its last token."""
    real = np.flatnonzero(answer != pad)
    end = real[-1] + 1 if real.size else 0
    return prompt[prompt != pad].astype(np.int32).tobytes(), answer[:end].astype(np.int32).tobytes()


def _pad_logprobs(records: Sequence[RolloutRecord], width: int) -> Float32[np.ndarray, "B C"]:
    padded = np.zeros((len(records), width), np.float32)
    for row, record in zip(padded, records, strict=True):
        row[: record.logprobs.size] = record.logprobs
    return padded


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


@functools.partial(jax.jit, static_argnames="dtypes")
def _copies(arrays: tuple[Array, ...], dtypes: tuple[Any, ...]) -> tuple[Array, ...]:
    """New arrays in these dtypes (None: in their own), where the old ones are; never the old ones themselves."""
    return tuple(
        jnp.copy(array) if dtype in (None, array.dtype) else array.astype(dtype)
        for array, dtype in zip(arrays, dtypes, strict=True)
    )


def align_records(
    records: Sequence[RolloutRecord],
    prompt_tokens: Int[np.ndarray, "B P"],
    completion_tokens: Int[np.ndarray, "B C"],
    *,
    policy: Policy,
    pad_id: int,
    update_count: int,
) -> RoutedBatch:
    """Rows of records laid out like the padded tokens of Tunix's example. Raises RoutingAlignmentError for another
    number of records, for rows of other tokens than the example's, and for rows of another update of the weights."""
    prompts, answers = np.asarray(prompt_tokens), np.asarray(completion_tokens)
    if len(records) != prompts.shape[0]:
        raise RoutingAlignmentError(
            f"{len(records)} answers were sampled since the last push of weights, and the example has "
            f"{prompts.shape[0]}; make each example of one call of the learner"
        )
    for index, (record, prompt, answer) in enumerate(zip(records, prompts, answers, strict=True)):
        if _key(record.prompt_ids, record.output_ids, pad_id) != _key(prompt, answer, pad_id):
            raise RoutingAlignmentError(
                f"sample {index}: the example has other tokens than the answer that its rows are of; keep the order "
                "of the rollout's outputs"
            )
    return align(
        [Sample(record.routed, record.num_tokens, record.prompt_ids.size) for record in records],
        layout="pad_both",
        seq_len=prompts.shape[1] + answers.shape[1],
        prompt_width=prompts.shape[1],
        spec=policy.config.capture_spec,
        versions=(update_count,),
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RoutingReport:
    """A trainer against the rollout of an example. `canary`: share of replayed slots that the live router would not
    have chosen; `flipped`: share of replayed tokens with such a slot in any layer; `valid`: share of tokens that have
    a row; `k3`, and `f_1_1`, the share of sampled tokens whose probability ratio is beyond 1.1, as in
    MismatchReport."""

    canary: float
    flipped: float
    valid: float
    k3: float
    f_1_1: float


def routing_report(
    policy: Policy,
    example: Any,
    rollout_logprobs: Float[np.ndarray, "B C"],
    *,
    pad_id: int,
    temperature: float = 1.0,
    replayed: bool = True,
) -> RoutingReport:
    """Compare the policy, on the rows of a ReplayExample (or, not `replayed`, routing live), with the logprobs of its
    rollout. They must be of the whole distribution at this `temperature`, or k3 tells of top-p and top-k too."""
    logprobs, slot_miss, share = _replayed_pass(policy, example, pad_id, temperature, replayed)
    valid = example.routed_valid
    width = example.completion_ids.shape[1]
    mask = np.asarray(example.completion_mask, bool)
    report = mismatch_report(rollout_logprobs, np.asarray(logprobs)[:, -width:], mask) if mask.any() else None
    rows = np.asarray(valid) if replayed else np.zeros(valid.shape, bool)
    missed = np.any(np.asarray(slot_miss) > 0, axis=-1)
    tokens = np.concatenate([example.prompt_ids, example.completion_ids], axis=1)
    num_tokens = int(np.count_nonzero(tokens != pad_id))
    return RoutingReport(
        canary=float(share),
        flipped=float(missed[rows].mean()) if rows.any() else 0.0,
        valid=float(rows.sum()) / max(num_tokens, 1),
        k3=0.0 if report is None else report.k3,
        f_1_1=0.0 if report is None else report.f_1_1,
    )


def routing_pass(
    policy: Policy, example: Any, *, pad_id: int, temperature: float = 1.0, replayed: bool = True
) -> Float32[Array, "B S-1"]:
    """Logprobs of tokens 1 to S - 1 of a ReplayExample under the policy, on its rows or routing live."""
    return _replayed_pass(policy, example, pad_id, temperature, replayed)[0]


def _replayed_pass(policy: Policy, example: Any, pad_id: int, temperature: float, replayed: bool) -> tuple[Any, ...]:
    graphdef, state = nnx.split(policy)
    ids, valid = _rows(example)
    tokens = jnp.concatenate([example.prompt_ids, example.completion_ids], axis=1)
    valid = valid if replayed else jnp.zeros_like(valid)
    return _trainer_pass(graphdef, state, tokens, ids, valid, pad_id, temperature or 1.0)


@functools.partial(jax.jit, static_argnames=("pad_id", "temperature"))
def _trainer_pass(
    graphdef: Any,
    state: Any,
    tokens: Int[Array, "B S"],
    ids: UInt[Array, "B S M K"],
    valid: Bool[Array, "B S"],
    pad_id: int,
    temperature: float,
) -> tuple[Float32[Array, "B S-1"], Array, Float32[Array, ""]]:
    """Logprobs of tokens 1 to S - 1, slot misses and canary."""
    policy: Policy = nnx.merge(graphdef, state)
    real = tokens != pad_id
    positions = jnp.maximum(jnp.cumsum(real, axis=1) - 1, 0)
    out = policy.run(tokens, positions, None, None, real.astype(jnp.int32), ids=ids, valid=valid)
    assert out.slot_miss is not None, "a policy has MoE layers"
    logprobs = jax.nn.log_softmax(out.logits[:, :-1] / temperature)
    chosen = jnp.take_along_axis(logprobs, tokens[:, 1:, None], axis=-1)[..., 0]
    return chosen, out.slot_miss, canary(out.slot_miss, RoutedBatch(ids, valid & real, ~real))


class ReplayGRPOLearner(grpo_learner.GRPOLearner):
    """Tunix's GRPOLearner, whose examples carry the rows of their rollout. DrGRPO and DAPO are its configs:
    DrGRPOConfig and DAPOConfig with `policy_loss_fn="grpo_replay"`.

    Logs `routing/canary`, `routing/flipped`, `routing/valid`, `routing/k3` and `routing/f_1_1` (RoutingReport) of
    every `measure_every`-th example, before the update that it is for; each costs one forward. With `compare_live` also
    `routing/k3_live` and `routing/f_1_1_live`, of the same example routed live, for another forward."""

    def __init__(
        self,
        rl_cluster: Any = None,
        algo_config: Any = None,
        reward_fns: Any = None,
        metric_fns: Sequence[Any] | None = None,
        data_shuffle_seed: int | None = None,
        *,
        rl_engine: Any = None,
        gate: CanaryGate | None = None,
        measure_every: int = 8,
        compare_live: bool = False,
    ) -> None:
        """Arguments are Tunix's (`rl_engine`: newer releases' name of `rl_cluster`), but for three. `gate` judges the
        canary; None: CanaryGate(), which raises RoutingReplayError above 0.05. `measure_every`: 0 never measures.

        Raises ConfigError unless the rollout is a RoutedExpertsRollout, the actor a Policy, the loss one of
        `with_replay`, and sequences are not packed."""
        cluster = rl_cluster if rl_engine is None else rl_engine
        _check_cluster(cluster)
        if not str(algo_config.policy_loss_fn).endswith(REPLAY_SUFFIX):
            loss = algo_config.policy_loss_fn
            raise ConfigError(f"policy_loss_fn={loss!r} replays nothing; give {loss + REPLAY_SUFFIX!r}")
        if measure_every < 0:
            raise ConfigError(f"measure_every={measure_every} must be at least 0, which measures nothing")
        self._cluster, self._gate, self._measure_every = cluster, gate or CanaryGate(), measure_every
        self._compare_live, self._num_examples = compare_live, 0
        super().__init__(cluster, algo_config, reward_fns, metric_fns, data_shuffle_seed)

    def _generate_and_compute_advantage(
        self, training_input: Any, mode: Any = rl_cluster_lib.Mode.TRAIN
    ) -> ReplayExample:
        """Tunix's, with the rows of the answers. Raises RoutingAlignmentError for rows of other tokens or weights, and
        RoutingReplayError as the gate does."""
        rollout: RoutedExpertsRollout = self._cluster.rollout
        rollout.take()  # of calls that no example was made of
        example = super()._generate_and_compute_advantage(training_input, mode)
        records, policy = rollout.take(), self._cluster.actor_trainer.model
        routed = align_records(
            records,
            example.prompt_ids,
            example.completion_ids,
            policy=policy,
            pad_id=rollout.pad_id(),
            update_count=rollout.update_count,
        )
        fields = {field.name: getattr(example, field.name) for field in dataclasses.fields(example)}
        example = ReplayExample(**fields, routed_ids=jnp.asarray(routed.ids), routed_valid=jnp.asarray(routed.valid))
        if self._measure_every and self._num_examples % self._measure_every == 0:
            self._measure(example, records, mode)
        self._num_examples += 1
        return example

    def _measure(self, example: ReplayExample, records: Sequence[RolloutRecord], mode: Any) -> None:
        """Log a report of an example; then judge its canary."""
        measure = functools.partial(
            routing_report,
            self._cluster.actor_trainer.model,
            example,
            _pad_logprobs(records, example.completion_ids.shape[1]),
            pad_id=self._cluster.rollout.pad_id(),
            temperature=self._cluster.get_rollout_config(mode=mode).temperature,
        )
        report = measure()
        values = dataclasses.asdict(report)
        if self._compare_live:
            live = measure(replayed=False)
            values |= {"k3_live": live.k3, "f_1_1_live": live.f_1_1}
        metrics = {f"routing/{name}": (value, np.mean) for name, value in values.items()}
        self._cluster.buffer_metrics(metrics, mode=mode)
        self._gate(report.canary)


class ReplayCluster(rl_cluster_lib.RLCluster):
    """Tunix's RLCluster, whose trainer-side logprobs of the old policy (`sampler_is="token"`,
    `use_rollout_logps=False`) are computed on the rollout's rows; those of the reference policy never are. With
    `RoutedExpertsRollout(colocated=True)` the engine's KV pages are free while the actor trains. Refuses
    `offload_to_cpu`."""

    def get_actor_per_token_logps(
        self,
        prompt_tokens: Int[Array, "B P"],
        completion_tokens: Int[Array, "B C"],
        pad_id: int,
        eos_id: int,
        micro_batch_size: int | None = None,
        temperature: float | None = None,
    ) -> Float32[Array, "B C"]:
        """Logprobs of sampled answers under the actor as it was at the last push. Raises RoutingAlignmentError for
        answers that were not sampled since then, and ConfigError as ReplayGRPOLearner."""
        _check_cluster(self)
        rollout: RoutedExpertsRollout = self.rollout
        if temperature is None:
            temperature = self.get_rollout_config(mode=rl_cluster_lib.Mode.TRAIN).temperature
        graphdef, _ = nnx.split(self.actor_trainer.model)
        policy: Policy = nnx.merge(graphdef, self._anchor_on_device())
        routed = align_records(
            rollout.find(prompt_tokens, completion_tokens),
            np.asarray(prompt_tokens),
            np.asarray(completion_tokens),
            policy=policy,
            pad_id=pad_id,
            update_count=rollout.update_count,
        )
        size = micro_batch_size or prompt_tokens.shape[0]
        with self._get_mesh_and_logical_axis_rules_cm(rl_cluster_lib.Role.ACTOR):
            axes = self.cluster_config.training_config.data_sharding_axis
            batch = (prompt_tokens, completion_tokens, jnp.asarray(routed.ids), jnp.asarray(routed.valid))
            prompts, answers, ids, valid = (sharding_utils.shard_input(array, axes) for array in batch)
            parts: list[Array] = []
            for part in rl_utils.chunk_slices_by_size(stop=prompts.shape[0], step=size):
                module, state = nnx.split(Replayed(policy, ids[part], valid[part]))
                logprobs = common.compute_per_token_logps(
                    module,
                    state,
                    prompt_tokens=prompts[part],
                    completion_tokens=answers[part],
                    pad_id=pad_id,
                    eos_id=eos_id,
                    stop_gradient=True,
                    temperature=temperature,
                )
                parts.append(logprobs[0] if isinstance(logprobs, tuple) else logprobs)
        return jnp.concatenate(parts, axis=0)

    def update_actor(self, train_ds: Any, eval_ds: Any, skip_jit: bool = False) -> None:
        """Train, while a colocated engine holds no KV pages."""
        if isinstance(self.rollout, RoutedExpertsRollout) and self.rollout.colocated:
            self.rollout.release()
        super().update_actor(train_ds, eval_ds, skip_jit)

    def _anchor_on_device(self) -> Any:
        """The actor's weights of the last push, which Tunix keeps on the host where the device has memory of its
        own."""
        state = self._anchor_policy_state
        if self._is_state_on_device(state):
            return state
        return rl_utils.put_params_on_memory_kind(state, self._default_memory_kind)


def _check_cluster(cluster: Any) -> None:
    """Raise ConfigError unless a cluster can replay."""
    if not isinstance(cluster.rollout, RoutedExpertsRollout):
        kind = type(cluster.rollout).__name__
        raise ConfigError(
            f"the rollout is a {kind}, which has no rows; give ClusterConfig(rollout_engine=functools.partial("
            "RoutedExpertsRollout, engine=engine))"
        )
    if not isinstance(cluster.actor_trainer.model, Policy):
        kind = type(cluster.actor_trainer.model).__name__
        raise ConfigError(f"the actor is a {kind}; rows are replayed by routed_experts.integrations.tunix.Policy")
    config = cluster.cluster_config
    if config.training_config.max_seq_token_per_tpu is not None:
        raise ConfigError(
            f"max_seq_token_per_tpu={config.training_config.max_seq_token_per_tpu}: Tunix's packing drops the rows; "
            "leave it unset"
        )
    if config.offload_to_cpu:
        raise ConfigError(
            "offload_to_cpu=True: the engine's weights are its own and stay where they are; leave it False"
        )
