"""The engine's own table of programs, compiled for an abstract TPU, and readings of the result.

The functions, their donations and their inputs are those of `lowerings`: only the devices of the
weights differ. Pools are larger than VMEM (128 MiB), else "in place" could mean "on the chip". Backends are those
that an engine picks."""

import collections
import dataclasses
import functools
import math
import re
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding

from routed_experts.core.model_worker_batch import ForwardMode, SamplingMode
from routed_experts.core.server_args import ServerArgs
from routed_experts.engine.build.backends import DEFAULT_BACKENDS
from routed_experts.execution.aot_programs import RunnerConfig, abstract_token_counts, lowerings
from routed_experts.execution.forward_batch import BatchShape
from routed_experts.execution.programs import ProgramSpec
from routed_experts.execution.sampler import TokenCounts
from routed_experts.memory.kv_pool import KVPoolSpec
from routed_experts.models.base.weight_format import weight_format
from routed_experts.models.decoder.decoder import FamilyDecoder
from routed_experts.models.decoder.family_config import FamilyConfig
from support.qwen3_configs import qwen3_config
from support.tpu_aot import REPLICATED, tpu_mesh, without_compilation_cache

Key = tuple[object, ...]
Jobs = Mapping[Key, Callable[[], jax.stages.Lowered]]


@dataclasses.dataclass(frozen=True, slots=True)
class World:
    """A model and the static sizes of the runner that serves it, in bfloat16. `num_drafts`: of a verify step."""

    config: FamilyConfig
    runner: RunnerConfig
    num_drafts: int = 0

    @property
    def pool(self) -> jax.ShapeDtypeStruct:
        """The KV pool."""
        return self.runner.pool.abstract

    @property
    def counts(self) -> TokenCounts:
        """What penalties count."""
        return abstract_token_counts(self.runner.num_request_slots, self.runner.vocab_size)


def build_world(config: FamilyConfig, *, num_pages: int, decode: int, extend: int, num_request_slots: int) -> World:
    """One decode shape and one extend shape of a model, with pages of 64 tokens."""
    pool = KVPoolSpec.create(
        config.cache,
        num_pages=num_pages,
        page_size=PAGE_SIZE,
        dtype=jnp.dtype(jnp.bfloat16),
        num_requests=num_request_slots,
        platform="tpu",
    )
    width = config.context_length // PAGE_SIZE
    shapes = (
        BatchShape(mode=ForwardMode.DECODE, num_tokens=decode, num_requests=decode, table_width=width),
        BatchShape(mode=ForwardMode.EXTEND, num_tokens=extend, num_requests=decode, table_width=width),
    )
    return World(
        config,
        RunnerConfig(pool=pool, num_request_slots=num_request_slots, shapes=shapes, vocab_size=config.vocab_size),
    )


PAGE_SIZE = 64
# Pages of 192 MiB; experts of a run 288 MiB. So many request slots that counts take 513 MiB and prompt flags 128 MiB
# (an engine has
# some tens). More tokens in the extend shape than the experts' kernel takes without sorting.
SMALL = build_world(
    qwen3_config(
        vocab_size=8192,
        hidden_size=256,
        num_hidden_layers=4,
        mlp_only_layers=[0],
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=128,
        intermediate_size=512,
        moe_intermediate_size=1024,
        num_experts=64,
        num_experts_per_tok=8,
        rope_theta=1e6,
        max_position_embeddings=2048,
    ),
    num_pages=384,
    decode=16,
    extend=384,
    num_request_slots=16_401,
)

# Opcodes that name a place and move nothing, and the second half of an asynchronous pair.
_FREE = frozenset(
    {"parameter", "get-tuple-element", "tuple", "bitcast", "constant", "copy-done", "after-all", "while", "conditional"}
)
# What may yield an array as large as the pool: names of a place, and a write of some rows into the pool itself.
_IN_PLACE = frozenset({"parameter", "get-tuple-element", "bitcast", "fusion", "scatter", "dynamic-update-slice"})
_REORDERS = frozenset({"copy", "transpose"})
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?[\w.-]+ = (\(.*?\)|\S+) ([a-z][\w-]*)\(")
_ARRAY = re.compile(r"[a-z]\w*\[([\d,]*)\]")


@functools.cache
def jobs(chip: str, *, capture: bool, world: World = SMALL, plain: bool = False) -> Jobs:
    """The runner's table, with weights placed on one abstract `chip`; `plain`: on the backends of array code alone."""
    config = world.config
    sharding = NamedSharding(tpu_mesh(chip), REPLICATED)
    graphdef, state = nnx.split(nnx.eval_shape(lambda: FamilyDecoder(config, rngs=nnx.Rngs(0), dtype=jnp.bfloat16)))
    weights = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=weight_format(sharding, leaf.shape)), state
    )
    named = {"moe_backend": "tiled", "attention_backend": "paged"} if plain else {}
    kernels, attention = DEFAULT_BACKENDS.choose(
        ServerArgs(enable_return_routed_experts=capture, **named), config.needs, platform="tpu"
    )
    spec = ProgramSpec(
        graphdef=graphdef,
        capture=config.capture_spec if capture else None,
        kernels=kernels,
        attention=attention,
        num_pages=world.runner.pool.num_pages,
        raw_logprobs=False,
        num_drafts=world.num_drafts,
    )
    return lowerings(weights, spec, world.runner)


def program_name(key: Key) -> str:
    """A program without its sizes, such as "forward extend" or "sample greedy"."""
    named = [part for part in key if isinstance(part, SamplingMode) or not isinstance(part, int)]
    words = [part.mode if isinstance(part, BatchShape) else part for part in named]
    return " ".join(word.name.lower() if isinstance(word, ForwardMode | SamplingMode) else str(word) for word in words)


@functools.cache
def lowered(chip: str, name: str, *, capture: bool, world: World = SMALL, plain: bool = False) -> jax.stages.Lowered:
    """One program of the table, by name."""
    [job] = [
        job for key, job in jobs(chip, capture=capture, world=world, plain=plain).items() if program_name(key) == name
    ]
    with jax.sharding.use_abstract_mesh(tpu_mesh(chip).abstract_mesh):
        return job()


@functools.cache
def compiled(chip: str, name: str, *, capture: bool, world: World = SMALL, plain: bool = False) -> jax.stages.Compiled:
    """One program of the table, through the TPU compiler."""
    with without_compilation_cache():
        return lowered(chip, name, capture=capture, world=world, plain=plain).compile()


@dataclasses.dataclass(frozen=True, slots=True)
class Operations:
    """Operations that a step runs, each counted once: outside of loops, in their bodies (a layer's), and those of one
    number."""

    once: int
    in_loops: int
    scalar: int

    def __sub__(self, other: "Operations") -> "Operations":
        """What this program has more."""
        return Operations(self.once - other.once, self.in_loops - other.in_loops, self.scalar - other.scalar)


def operations(program: jax.stages.Compiled) -> Operations:
    """Count the operations of the optimised program; a fusion is one, what is inside of it none."""
    text = program.as_text() or ""
    bodies, counts, scalar, inside = set(re.findall(r"body=%?([\w.-]+)", text)), collections.Counter[str](), 0, ""
    for line in text.splitlines():
        if line.endswith("{") and (opened := re.match(r"(ENTRY )?%?([\w.-]+) \(", line)):
            inside = "once" if opened[1] else "in loops" if opened[2] in bodies else ""
        if inside and (match := _INSTRUCTION.match(line)) and match[2] not in _FREE:
            if max(map(_num_elements, _ARRAY.findall(match[1]))) > 1:
                counts[inside] += 1
            else:
                scalar += 1
    return Operations(counts["once"], counts["in loops"], scalar)


def estimated_cycles(program: jax.stages.Compiled, world: World) -> int:
    """The compiler's own estimate for a step, loops over layers by their length. It has none for a Pallas kernel, a
    gather, a scatter or a sort, and a loop inside of a layer counts once: what is left is the glue, and programs of one
    chip can be compared."""
    sums, whiles, inside = collections.Counter[str](), collections.defaultdict[str, list[tuple[str, bool]]](list), ""
    entry = ""
    for line in (program.as_text() or "").splitlines():
        if line.endswith("{") and (opened := re.match(r"(ENTRY )?%?([\w.-]+) \(", line)):
            inside = opened[2]
            entry = inside if opened[1] else entry
        if match := re.search(r'"estimated_cycles":"(\d+)"', line):
            sums[inside] += int(match[1])
        if match := re.search(r' while\(.*body=%?([\w.-]+).*op_name="([^"]*)"', line):
            whiles[inside].append((match[1], match[2].count("while") == 1))
    repeats = (block.repeats for block in world.config.blocks)
    lengths = iter([count for count in repeats if count > 1])  # a run of one layer is no loop

    def once(name: str) -> int:
        return sums[name] + sum(once(body) for body, _ in whiles[name])

    return sums[entry] + sum((next(lengths) if of_layers else 1) * once(body) for body, of_layers in whiles[entry])


def kernels(program: jax.stages.Compiled) -> collections.Counter[str]:
    """Pallas kernels in the text by name; a kernel in the body of a loop counts once."""
    lines = [line for line in (program.as_text() or "").splitlines() if '"tpu_custom_call"' in line]
    names = [re.search(r'op_name="(?:[^"]*/)?(\w+)/pallas_call"', line) for line in lines]
    assert None not in names, lines
    return collections.Counter(name[1] for name in names if name)


def whole_pool_operations(program: jax.stages.Compiled, pool: jax.ShapeDtypeStruct) -> list[str]:
    """Find what makes another array of the pool's size, whatever its shape or dtype: a copy, a transpose, a conversion.
    A kernel whose output is one of its operands makes none."""
    lines = [line for line in (program.as_text() or "").splitlines() if "output_to_operand_aliasing={" not in line]
    matches = (_INSTRUCTION.match(line) for line in lines)
    made = [
        (match[1], match[2])
        for match in matches
        if match and match[2] not in _IN_PLACE | {"tuple", "while", "conditional"}
    ]
    return [
        f"{opcode} {result}"
        for result, opcode in made
        if any(_num_elements(dims) >= pool.size for dims in _ARRAY.findall(result))
    ]


def reordered_weights(program: jax.stages.Compiled) -> list[str]:
    """Find what copies a large weight to put its dimensions in another order. A prefetch to VMEM is no such copy. A
    program's argument `weights` has them."""
    text = program.as_text() or ""
    shapes = set(re.findall(r"%weights[\w.]* = \w+\[([\d,]*)\]\S* parameter\(", text))
    assert shapes, "no argument of the name `weights`"
    copies = (match for match in map(_INSTRUCTION.match, text.splitlines()) if match and match[2] in _REORDERS)
    return [
        f"{match[2]} {match[1]}"
        for match in copies
        if any(dims in shapes and _num_elements(dims) >= 1 << 20 for dims in _ARRAY.findall(match[1]))
    ]


def _num_elements(dims: str) -> int:
    return math.prod(map(int, filter(None, dims.split(","))))
