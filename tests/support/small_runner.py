"""A compiled ModelRunner of the tiny MoE, and explicit steps for it.

Pages are the test's own choice: the pages that a row names must hold what its request has fed. Dims: N, B, W as in
ForwardBatch."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
from flax import nnx

from oracles.full_sequence import FullSequence
from oracles.testbeds import build_model
from routed_experts.core.model_worker_batch import MAX_BIAS, ForwardMode, ModelWorkerBatch, SamplingArrays, SamplingMode
from routed_experts.core.server_args import ServerArgs
from routed_experts.engine.build.backends import DEFAULT_BACKENDS
from routed_experts.execution.aot_programs import RunnerConfig
from routed_experts.execution.forward_batch import BatchShape
from routed_experts.execution.model_runner import ModelRunner
from routed_experts.execution.programs import ProgramSpec
from routed_experts.memory.kv_pool import KVPoolSpec
from support.tiny_checkpoint import VOCAB_SIZE, tiny_config, tiny_tensors

PAGE_SIZE, TABLE_WIDTH, NUM_PAGES, NUM_SLOTS = 4, 8, 40, 6
EXTEND = BatchShape(mode=ForwardMode.EXTEND, num_tokens=32, num_requests=4, table_width=TABLE_WIDTH)
DECODE = dataclasses.replace(EXTEND, mode=ForwardMode.DECODE, num_tokens=4)
VERIFY = dataclasses.replace(EXTEND, mode=ForwardMode.TARGET_VERIFY, num_tokens=16)
SHAPES = {shape.mode: shape for shape in (EXTEND, DECODE, VERIFY)}
NEUTRAL = {
    "temperature": 0.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "choice": 0,
    "presence": 0.0,
    "frequency": 0.0,
    "repetition": 1.0,
}


@functools.cache
def oracle():
    """The tiny MoE in NumPy."""
    return FullSequence(tiny_config(), tiny_tensors(tiny_config()))


def build(*, capture=True, shapes=(EXTEND, DECODE), raw_logprobs=False, piggyback=(), model=None, num_drafts=0):
    """An uncompiled runner of the tiny MoE, or of another `model`; rows of steps of the modes `piggyback` leave with
    their tokens."""
    model = model or build_model(tiny_config(), tiny_tensors(tiny_config()))
    graphdef, state = nnx.split(model)
    kernels, attention = DEFAULT_BACKENDS.choose(ServerArgs(enable_return_routed_experts=capture))
    config = model.config
    pool = KVPoolSpec(
        num_layers=config.num_layers,
        num_pages=NUM_PAGES,
        page_size=PAGE_SIZE,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=jnp.dtype(jnp.float32),
    )
    spec = ProgramSpec(
        graphdef=graphdef,
        capture=config.capture_spec if capture else None,
        kernels=kernels,
        attention=attention,
        num_pages=NUM_PAGES,
        raw_logprobs=raw_logprobs,
        piggyback_row_words=config.capture_spec.row_words if piggyback else 0,
        piggyback_modes=frozenset(piggyback),
        num_drafts=num_drafts,
    )
    return ModelRunner(
        state, spec, RunnerConfig(pool=pool, num_request_slots=NUM_SLOTS, shapes=shapes, vocab_size=VOCAB_SIZE)
    )


@functools.cache
def compiled():
    """A compiled runner with capture on, which all tests of a process share: no test may rely on its contents."""
    runner = build()
    runner.compile()
    runner.overwrite_pool()
    return runner


@dataclasses.dataclass(frozen=True)
class Fed:
    """One request's part of a step: it feeds `ids` from position `start` on. `sampling` are columns beside NEUTRAL."""

    slot: int
    pages: tuple[int, ...]
    ids: tuple[int, ...]
    start: int = 0
    prompt_len: int = 0
    seed: int = 0
    bias: tuple[tuple[int, float], ...] = ()
    sampling: dict = dataclasses.field(default_factory=dict)


def build_step(*fed, mode=ForwardMode.EXTEND, sampling_mode=SamplingMode.GREEDY, targets=None):
    """The batch of a step, one token at a time; `targets` are the following tokens, for prompt logprobs."""
    shape = SHAPES[mode]
    tokens, rows = shape.num_tokens, shape.num_requests
    per_token = {name: np.zeros(tokens, np.int32) for name in ("token_ids", "positions", "token_rows")}
    starts, lens, slots = np.zeros(rows + 1, np.int32), np.zeros(rows, np.int32), np.zeros(rows, np.int32)
    table, kv_slots = np.zeros((rows, TABLE_WIDTH), np.int32), []
    for row, part in enumerate(fed):
        table[row, : len(part.pages)], slots[row] = part.pages, part.slot
        for index, token in enumerate(part.ids):
            at, position = len(kv_slots), part.start + index
            per_token["token_ids"][at], per_token["positions"][at], per_token["token_rows"][at] = token, position, row
            kv_slots.append(part.pages[position // PAGE_SIZE] * PAGE_SIZE + position % PAGE_SIZE)
        lens[row], starts[row + 1 :] = part.start + len(part.ids), len(kv_slots)
    padded = None if targets is None else np.pad(np.asarray(targets, np.int32), (0, tokens - len(targets)))
    return ModelWorkerBatch(
        step=0,
        mode=mode,
        sampling_mode=sampling_mode,
        num_tokens=len(kv_slots),
        num_requests=len(fed),
        **per_token,
        kv_slots=np.array(kv_slots),
        query_starts=starts,
        seq_lens=lens,
        request_slots=slots,
        page_table=table,
        sampling=_columns(fed, rows, lens, sampling_mode),
        samples=(True,) * len(fed),
        prompt_targets=padded,
        return_routed_experts=(True,) * len(fed),
    )


def _columns(fed, rows, lens, sampling_mode):
    kinds = {"top_k": np.int32, "choice": np.int32}
    columns = {name: np.full(rows, value, kinds.get(name, np.float32)) for name, value in NEUTRAL.items()}
    seed, prompt_len = np.zeros((rows, 2), np.uint32), np.zeros(rows, np.int32)
    bias_ids, bias_values = np.full((rows, MAX_BIAS), VOCAB_SIZE, np.int32), np.zeros((rows, MAX_BIAS), np.float32)
    for row, part in enumerate(fed):
        for name, value in part.sampling.items():
            columns[name][row] = value
        seed[row], prompt_len[row] = divmod(part.seed, 1 << 32), part.prompt_len
        for index, entry in enumerate(part.bias):
            bias_ids[row, index], bias_values[row, index] = entry
    bias = (
        {"bias_ids": bias_ids, "bias_values": bias_values}
        if sampling_mode is SamplingMode.FULL
        else {"bias_ids": None, "bias_values": None}
    )
    return SamplingArrays(**columns, seed=seed, position=lens, prompt_len=prompt_len, **bias)


def read(runner, pending):
    """What a dispatched step computed, with the rows of its real tokens on the host."""
    (result,) = runner.read(pending)
    return (
        result
        if result.rows is None
        else dataclasses.replace(result, rows=np.asarray(result.rows)[: pending.batches[0].num_tokens])
    )


def run(runner, batch):
    """A step, dispatched and read."""
    return read(runner, runner.dispatch([batch]))
