"""A short causal convolution of each channel, as a mixer of tokens (LFM2): y_t = sum_j w_j x_(t - W + 1 + j) + b. A
sequence's state is its last W - 1 inputs. Dims: N tokens, B sequences, S tokens of a sequence, Q channels, W taps."""

import dataclasses
from collections.abc import Iterable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ConvShape:
    """Sizes of one layer: Q and W."""

    channels: int
    width: int

    def zeros(self, count: int, dtype: jnp.dtype) -> Float[Array, "B W1 Q"]:
        """The initial states."""
        return jnp.zeros((count, self.width - 1, self.channels), dtype)

    def no_inputs(self, num_tokens: int, dtype: jnp.dtype) -> "ConvInputs":
        """Zeroed inputs, in the dtype that a state rounds them to."""
        kernel = jnp.zeros((self.channels, self.width), jnp.float32)
        return ConvInputs(jnp.zeros((num_tokens, self.channels), dtype), kernel, None, self)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ConvInputs:
    """Per-token values of a layer, before tokens are mixed."""

    mixed: Float[Array, "N Q"]
    kernel: Float[Array, "Q W"]
    bias: Float[Array, " Q"] | None
    shape: ConvShape = dataclasses.field(metadata={"static": True})

    def of_states(self, rows: Int[Array, " M"] | slice) -> "ConvInputs":
        """These tokens, without the bias."""
        return ConvInputs(self.mixed[rows], self.kernel, None, self.shape)

    def ragged(
        self, state: Float[Array, "B W1 Q"], query_starts: Int[Array, " B1"]
    ) -> tuple[Float[Array, "N Q"], Float[Array, "B W1 Q"]]:
        """Tokens of B sequences; RecurrentInputs.ragged."""
        num_tokens, before = self.mixed.shape[0], self.shape.width - 1
        starts, ends = query_starts[:-1], query_starts[1:]
        rows = jnp.arange(num_tokens, dtype=jnp.int32)
        sequence = jnp.searchsorted(ends, rows, side="right", method="compare_all").astype(jnp.int32)
        owner = jnp.minimum(sequence, ends.shape[0] - 1)

        def inputs(position: Int[Array, " M"], owner: Int[Array, " M"], start: Int[Array, " M"]) -> Float[Array, "M Q"]:
            """The inputs at these rows of the step; those before a sequence's first row are in its state."""
            own, stored = self.mixed[jnp.clip(position, 0, num_tokens - 1)], before + position - start
            return jnp.where(
                (position >= start)[:, None], own.astype(state.dtype), state[owner, jnp.clip(stored, 0, before - 1)]
            )

        taps = (inputs(rows - before + tap, owner, starts[owner]) for tap in range(self.shape.width))
        every = jnp.arange(ends.shape[0], dtype=jnp.int32)
        last = [inputs(ends - before + index, every, starts) for index in range(before)]
        return jnp.where((sequence < ends.shape[0])[:, None], self._sum(taps), 0), jnp.stack(last, axis=1)

    def sequences(self, segment_ids: Int[Array, "B S"] | None, count: int) -> Float[Array, "N Q"]:
        """Whole sequences; RecurrentInputs.sequences."""
        rows = self.mixed.reshape(count, -1, self.shape.channels)  # [N, Q] -> [B, S, Q]
        starts = jnp.zeros(rows.shape[:2], jnp.int32)
        if segment_ids is not None:
            starts = starts.at[:, 1:].set((segment_ids[:, 1:] != segment_ids[:, :-1]).astype(jnp.int32))
        segments = jnp.cumsum(starts, axis=1)

        def shifted(steps: int) -> Float[Array, "B S Q"]:
            """The inputs `steps` tokens earlier, 0 where those are of no sequence or of another."""
            length = rows.shape[1]
            earlier = jnp.pad(rows, ((0, 0), (steps, 0), (0, 0)))[:, :length]
            same: Bool[Array, "B S"] = (
                jnp.pad(segments, ((0, 0), (steps, 0)), constant_values=-1)[:, :length] == segments
            )
            return jnp.where(same[..., None], earlier, 0)

        taps = (shifted(self.shape.width - 1 - tap) for tap in range(self.shape.width))
        return self._sum(taps).reshape(self.mixed.shape)

    def _sum(self, taps: Iterable[Float[Array, "... Q"]]) -> Float[Array, "... Q"]:
        weights = self.kernel.astype(jnp.float32)
        total = sum(
            (part.astype(jnp.float32) * weights[:, tap] for tap, part in enumerate(taps)), jnp.zeros((), jnp.float32)
        )
        return (total if self.bias is None else total + self.bias.astype(jnp.float32)).astype(self.mixed.dtype)
