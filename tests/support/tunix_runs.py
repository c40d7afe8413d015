"""Small runs of Tunix's GRPO on the demo model. Needs Tunix: imported by tests/integrations alone."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh
from transformers import AutoTokenizer
from tunix.rl import rl_cluster as tunix_cluster
from tunix.rl.grpo import grpo_learner
from tunix.rl.rollout import base_rollout

from routed_experts import Engine
from routed_experts.demo import demo_model_path
from routed_experts.integrations.tunix import (
    Policy,
    ReplayCluster,
    ReplayExample,
    ReplayGRPOLearner,
    RoutedExpertsRollout,
    align_records,
    routing_report,
)
from routed_experts.models.model_folder import ModelFolder

PROMPTS = (
    "Once upon a time there was",
    "The whale",
    "Tell me a story about a king who lived by the sea with his old dog.",
    "What is the capital of France?",
)
WIDTH, NEW, GROUP = 16, 20, 4
SIZES = {"precompile_bs_paddings": (8,), "precompile_token_paddings": (128,), "context_length": 128}


def demo_engine(dtype="float32", **args):
    return Engine(str(demo_model_path()), dtype=dtype, enable_return_routed_experts=True, **(SIZES | args))


@functools.cache
def demo_tokenizer():
    return AutoTokenizer.from_pretrained(demo_model_path())


@functools.cache
def _demo_weights():
    return nnx.split(ModelFolder.open(demo_model_path()).load(jnp.dtype("float32")))


def demo_policy(**options):
    """The demo model in float32, with arrays of its own."""
    graphdef, state = _demo_weights()
    return Policy(nnx.merge(graphdef, jax.tree.map(jnp.copy, state)), **options)


def rollout_config(**changes):
    config = {"max_prompt_length": WIDTH, "max_tokens_to_generate": NEW, "temperature": 1.0, "seed": 7}
    return base_rollout.RolloutConfig(**(config | {"top_p": None, "return_logprobs": True} | changes))


def make_cluster(
    engine,
    *,
    policy=None,
    reference=None,
    rollout=RoutedExpertsRollout,
    cluster=ReplayCluster,
    tokenizer=None,
    colocated=False,
    offload=False,
    sampling=None,
    **training,
):
    """A cluster whose roles share one device. `sampling`: fields of the rollout's config; `training`: of the
    trainer's."""
    mesh = Mesh(np.array(jax.devices()[:1]), ("fsdp",))
    config = {"actor_optimizer": optax.adam(1e-4), "eval_every_n_steps": 1000, "max_steps": 100}
    role = tunix_cluster.Role
    return cluster(
        actor=demo_policy() if policy is None else policy,
        reference=reference,
        tokenizer=tokenizer or demo_tokenizer(),
        cluster_config=tunix_cluster.ClusterConfig(
            role_to_mesh={role.ACTOR: mesh, role.REFERENCE: mesh, role.ROLLOUT: mesh},
            rollout_engine=functools.partial(rollout, engine=engine, colocated=colocated),
            offload_to_cpu=offload,
            training_config=tunix_cluster.RLTrainingConfig(**(config | training)),
            rollout_config=rollout_config(**(sampling or {})),
        ),
    )


def grpo_config(**changes):
    return grpo_learner.GRPOConfig(
        **({"num_generations": GROUP, "beta": 0.0, "policy_loss_fn": "grpo_replay"} | changes)
    )


def vowel_share(prompts, completions, **_):
    """The reward; of an empty answer 0."""
    letters = [[letter for letter in text.lower() if letter.isalpha()] for text in completions]
    return [sum(letter in "aeiou" for letter in text) / max(len(text), 1) for text in letters]


def batches(steps, prompts=PROMPTS[:2]):
    return [{"prompts": np.array(prompts)} for _ in range(steps)]


@dataclasses.dataclass(frozen=True)
class Seen:
    """What a learner made of one call, before its update."""

    example: ReplayExample
    records: list
    update_count: int
    replayed: object  # RoutingReport
    live: object

    def is_exact(self):
        """Whether a float32 rollout is the trainer's on its rows, and, where no router is so near a tie that it chose
        another expert, live too."""
        few = self.replayed.canary < 0.005
        return self.replayed.k3 < 1e-10 and few and (self.live.k3 < 1e-10 or self.replayed.flipped > 0)


class WatchedLearner(ReplayGRPOLearner):
    """Keeps the examples that it makes, and both reports of each."""

    def __init__(self, cluster, config=None, reward=vowel_share, **options):
        self.seen = []
        super().__init__(cluster, config or grpo_config(), reward, measure_every=1, compare_live=True, **options)

    def _measure(self, example, records, mode):
        rollout = self._cluster.rollout
        self.seen.append(see(self._cluster, example, records, rollout.update_count))
        super()._measure(example, records, mode)


def see(cluster, example, records, update_count):
    logprobs = padded_logprobs(records, example.completion_ids.shape[1])
    temperature = cluster.get_rollout_config(mode=tunix_cluster.Mode.TRAIN).temperature
    reports = [
        routing_report(
            cluster.actor_trainer.model,
            example,
            logprobs,
            pad_id=cluster.rollout.pad_id(),
            temperature=temperature,
            replayed=replayed,
        )
        for replayed in (True, False)
    ]
    return Seen(example, records, update_count, *reports)


def padded_logprobs(records, width):
    padded = np.zeros((len(records), width), np.float32)
    for row, record in zip(padded, records, strict=True):
        row[: record.logprobs.size] = record.logprobs
    return padded


def make_example(cluster, prompts, config=None):
    """An example of the loss, and its records, without a learner: advantages alternate."""
    rollout = cluster.rollout
    rollout.take()
    out = rollout.generate(prompts, config or cluster.get_rollout_config(mode=tunix_cluster.Mode.TRAIN))
    width = (config or rollout_config()).max_tokens_to_generate
    answers = np.full((len(prompts), width), rollout.pad_id(), np.int32)
    for row, tokens in zip(answers, out.tokens, strict=True):
        row[: tokens.size] = tokens
    return example_of(cluster, out.left_padded_prompt_tokens, answers, rollout.take())


def example_of(cluster, prompts, answers, records):
    rollout = cluster.rollout
    routed = align_records(
        records,
        prompts,
        answers,
        policy=cluster.actor_trainer.model,
        pad_id=rollout.pad_id(),
        update_count=rollout.update_count,
    )
    example = ReplayExample(
        prompt_ids=jnp.asarray(prompts),
        prompt_mask=jnp.asarray(prompts != rollout.pad_id()),
        completion_ids=jnp.asarray(answers),
        completion_mask=jnp.asarray(answers != rollout.pad_id()),
        advantages=jnp.asarray(np.resize([1.0, -0.5], len(records)), jnp.float32),
        ref_per_token_logps=None,
        old_per_token_logps=jnp.asarray(padded_logprobs(records, answers.shape[1])),
        routed_ids=jnp.asarray(routed.ids),
        routed_valid=jnp.asarray(routed.valid),
    )
    return example, records


def loss_value(output):
    """The scalar of a loss of Tunix: (loss, aux), or in newer releases a LossOutput, a sum and its denominator."""
    return output[0] if isinstance(output, tuple) else output.primary_loss.compute()
