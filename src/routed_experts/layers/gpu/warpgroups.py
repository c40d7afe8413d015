"""Products of tiles of rows by the warpgroups of a Hopper GPU (Pallas' Mosaic GPU): their roles and their order.

A program stays on its multiprocessor and computes one block of a product in so many as there are programs: of one
tile's rows and some columns. One warpgroup, the producer, starts copies (TMA) of what each step reads into rings in
shared memory, also for the next block. Two others, the consumers, multiply a half of the block each, and store it. A
step is multiplied once its stage of the rings is filled, and a stage is filled again once both have emptied it.

Dims: P rows of all tiles, O outputs."""

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

HOPPER = "9.0"  # the compute capability that has these instructions; later ones have others
CONSUMERS = 2  # warpgroups that multiply
SIDE = 64  # of a warpgroup's part of a product, along its left operand
SHARED_BYTES = 226 * 1024  # of a multiprocessor's shared memory; the rest is for barriers
_PRODUCER = CONSUMERS  # the number of the warpgroup that copies
_PRODUCER_REGISTERS, _CONSUMER_REGISTERS = 40, 232  # of a thread


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Warpgroups:
    """The GPU that multiplies by warpgroups: `num_programs`, one a multiprocessor. `interpret`: as in `pallas_call`;
    JAX's interpreter of Mosaic GPU kernels, in tests. `can_mask` False: JAX's CUDA plugin is one of CUDA 12.8
    or 12.9. Versions 12.8.0 to 12.9.0 compile causal masks wrongly; JAX's own attention kernel for Hopper refuses
    them, too."""

    num_programs: int
    can_mask: bool = True
    interpret: Any = False


def find_warpgroups(devices: Sequence[Any] | None = None) -> Warpgroups | None:
    """Return the Warpgroups of the GPUs among `devices`; None unless all are Hopper GPUs. By default the devices of
    this process: those of a group of processes must be equal, as they run the same programs."""
    gpus = [device for device in devices or jax.local_devices() if device.platform == "gpu"]
    if not gpus or any(device.compute_capability != HOPPER for device in gpus):
        return None
    can_mask = all(_can_mask(device.client.platform_version) for device in gpus)
    return Warpgroups(num_programs=min(device.core_count for device in gpus), can_mask=can_mask)


def _can_mask(platform_version: str) -> bool:
    """Whether a client's CUDA, as in "cuda 12090", compiles masks rightly; yes where it names none. The number is that
    of major and minor version: 12.9.1 has the one of 12.9.0."""
    version = re.search(r"cuda (\d+)", platform_version)
    return version is None or not 12_080 <= int(version[1]) < 12_100


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """How a product is cut: blocks of `columns` of `outputs`, which `steps` of `step_inputs` add up, through rings of
    `stages`. `halves`: 2 where each block has gate and up, of as many columns each. `stride`: matrices that the number
    of the first one counts in. `group`: tiles whose blocks are computed column by column."""

    outputs: int
    columns: int
    steps: int
    step_inputs: int
    stages: int
    halves: int
    stride: int
    num_programs: int
    group: int = 1

    @property
    def column_blocks(self) -> int:
        """Blocks of columns of a tile."""
        return self.outputs // self.columns

    def num_blocks(self, num_tiles: Array) -> Array:
        """Blocks of the product that this program computes."""
        rest = num_tiles * self.column_blocks - lax.axis_index("program")
        return lax.div(rest + self.num_programs - 1, jnp.int32(self.num_programs))

    def block(self, index: Array, num_tiles: Array) -> tuple[Array, Array]:
        """(tile, first column) of that block of this program. Programs work on the same experts at one time. The last
        group may have fewer tiles."""
        block = lax.axis_index("program") + index * self.num_programs
        first = lax.div(block, jnp.int32(self.group * self.column_blocks)) * self.group
        rest, size = block - first * self.column_blocks, jnp.minimum(num_tiles - first, self.group)
        if self.group == 1:
            return first, rest * self.columns
        column = lax.div(rest, size)
        return first + rest - column * size, column * self.columns

    def stage(self, step: Array) -> Array:
        """The stage of the rings that a step has, of all steps of the program."""
        return lax.rem(step, jnp.int32(self.stages))


def accumulator(columns: int) -> Any:
    """Sums of a warpgroup in its registers, [64, columns]."""
    return plgpu.ACC((SIDE, columns))  # pyright: ignore[reportPrivateImportUsage]


def split_work(copy: Callable[[], None], multiply: Callable[[Array], None]) -> None:
    """Inside a kernel: run `copy` in the producer, and `multiply` in the consumers, with their numbers."""
    warpgroup = lax.axis_index("warpgroup")

    @pl.when(warpgroup == _PRODUCER)
    def _() -> None:
        plgpu.set_max_registers(_PRODUCER_REGISTERS, action="decrease")
        copy()

    @pl.when(warpgroup != _PRODUCER)
    def _() -> None:
        plgpu.set_max_registers(_CONSUMER_REGISTERS, action="increase")
        multiply(warpgroup)


def copy_blocks(
    schedule: Schedule, num_tiles: Array, emptied: Any, copy: Callable[[Array, Array, Array, Array], None]
) -> None:
    """Bring the blocks of all steps, as far ahead as there is room: `copy(tile, column, inner, stage)` starts the
    copies of one step of a block."""

    def copy_block(index: Array, step: Array) -> Array:
        tile, column = schedule.block(index, num_tiles)

        def copy_step(inner: Array, step: Array) -> Array:
            stage = schedule.stage(step)

            @pl.when(step >= schedule.stages)
            def _() -> None:
                plgpu.barrier_wait(emptied.at[stage])

            copy(tile, column, inner, stage)
            return step + 1

        return lax.fori_loop(0, schedule.steps, copy_step, step)

    def wait(step: Array, carry: None) -> None:
        plgpu.barrier_wait(emptied.at[schedule.stage(step)])

    end = lax.fori_loop(0, schedule.num_blocks(num_tiles), copy_block, jnp.int32(0))
    lax.fori_loop(jnp.maximum(end - schedule.stages, 0), end, wait, None)  # barriers end with no arrival left


def multiply_blocks(schedule: Schedule, num_tiles: Array, multiply: Callable[[Array, Array, Array], None]) -> None:
    """Compute all blocks of the program: `multiply(tile, column, step)` computes one, from that step on."""

    def multiply_block(index: Array, step: Array) -> Array:
        multiply(*schedule.block(index, num_tiles), step)
        return step + schedule.steps

    lax.fori_loop(0, schedule.num_blocks(num_tiles), multiply_block, jnp.int32(0))
    plgpu.wait_smem_to_gmem(0)


def launch(
    kernel: Callable[..., None],
    arrays: list[Array],
    *,
    name: str,
    out: jax.ShapeDtypeStruct,
    rings: list[Any],
    copies: int,
    schedule: Schedule,
    warpgroups: Warpgroups,
) -> Float[Array, "P O"]:
    """Run `kernel(*arrays, out, *rings, filled, emptied)`; a step has so many copies."""
    barriers = [
        plgpu.Barrier(num_arrivals=copies, num_barriers=schedule.stages),
        plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=schedule.stages),
    ]
    return plgpu.kernel(
        kernel,
        out_type=out,
        scratch_types=[*rings, *barriers],
        grid=(warpgroups.num_programs,),
        grid_names=("program",),
        num_threads=CONSUMERS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        interpret=warpgroups.interpret,
        kernel_name=name,
    )(*arrays)
