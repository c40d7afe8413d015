"""Sample one token per row from logits, on the device.

Noise is a function of (seed, choice, position) alone: never of the batch row, its neighbours or the padding. No row
is sorted: a filter is a threshold on the row's own scores, found by bisection over the bits of a float32. Its cost
does not depend on the values, and equal scores are kept or dropped together. Dims: B rows, V vocabulary, X
logit-bias entries of a row."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt32

from routed_experts.core.model_worker_batch import SamplingMode

_MAX_FINITE_BITS = 0x7F7FFFFF  # float32 maximum read as an int32; non-negative floats order as their bits do
_BISECTIONS = 31  # halvings of [0, _MAX_FINITE_BITS]
_PARITY = 0x1BD11BDA  # of Threefry's third key word
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))  # bits by which Threefry's rounds rotate, four rounds between two keys

_Words = tuple[UInt32[Array, "..."], UInt32[Array, "..."]]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingBatch:
    """Sampling values of each row. A padded row has temperature 0, the rest is then not read."""

    temperature: Float[Array, " B"]  # 0 = greedy
    top_k: Int[Array, " B"]  # <= 0 = off
    top_p: Float[Array, " B"]  # >= 1 = off
    min_p: Float[Array, " B"]  # 0 = off
    seed: UInt32[Array, "B 2"]  # high and low word of an int64
    choice: Int[Array, " B"]  # j of n
    position: Int[Array, " B"]  # index in the sequence of the token to be sampled


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Penalties:
    """Token counts of each row, and the penalties for repeated tokens. Neutral: 0, 0 and 1."""

    presence: Float[Array, " B"]
    frequency: Float[Array, " B"]
    repetition: Float[Array, " B"]
    generated_counts: Int[Array, "B V"]
    prompt_seen: Bool[Array, "B V"]


def penalize(
    logits: Float[Array, "B V"],
    penalties: Penalties | None,
    bias_ids: Int[Array, "B X"] | None = None,
    bias_values: Float[Array, "B X"] | None = None,
) -> Float[Array, "B V"]:
    """Apply repetition (prompt and generated), then frequency and presence (generated only), then the logit bias.

    The formulas are those of OpenAI and vLLM; the bias comes last, as in SGLang, so a repetition penalty does not scale
    it. A bias id of V is padding and dropped; a bias of -inf bans a token (minimum length). None is off."""
    if penalties is not None:
        generated = penalties.generated_counts > 0
        repetition = penalties.repetition[:, None]
        repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
        logits = jnp.where(generated | penalties.prompt_seen, repeated, logits)
        logits = logits - penalties.frequency[:, None] * penalties.generated_counts.astype(jnp.float32)
        logits = logits - jnp.where(generated, penalties.presence[:, None], jnp.float32(0))
    if bias_ids is not None and bias_values is not None:
        rows = jnp.arange(logits.shape[0], dtype=jnp.int32)[:, None]
        logits = logits.at[rows, bias_ids].add(bias_values, mode="drop")
    return logits


def unpack_mask(mask: UInt32[Array, "B W"], vocab_size: int) -> Bool[Array, "B V"]:
    """The tokens that a packed mask allows: bit i % 32 of word i // 32 is token i."""
    bits = (mask[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)) & jnp.uint32(1)
    return bits.reshape(mask.shape[0], -1)[:, :vocab_size] != 0


def mask_logits(
    logits: Float[Array, "B V"], raw: Float[Array, "B V"], allowed: Bool[Array, "B V"], *, may_be_banned: bool
) -> Float[Array, "B V"]:
    """Leave the scores of the allowed tokens; the others are -inf. `raw`: the scores before penalties and bias.
    `may_be_banned`: the bias may have banned tokens; where it has banned all that are allowed (min_tokens and a
    complete output), the raw scores of these decide."""
    masked = jnp.where(allowed, logits, -jnp.inf)
    if not may_be_banned:
        return masked
    none_left = jnp.max(masked, axis=-1, keepdims=True) == -jnp.inf
    return jnp.where(none_left, jnp.where(allowed, raw, -jnp.inf), masked)


def has_no_choice(mask: UInt32[Array, "B W"]) -> Bool[Array, " B"]:
    """Which rows of a packed mask allow one token alone."""
    return jnp.sum(jax.lax.population_count(mask).astype(jnp.int32), axis=-1) == 1


def processed_logits(logits: Float[Array, "B V"], batch: SamplingBatch, mode: SamplingMode) -> Float[Array, "B V"]:
    """Return the scores that are sampled from: dropped tokens are -inf, up to a constant per row.

    Temperature, then top-k, then top-p over what top-k left, then min-p: the order of Hugging Face and of SGLang's
    flashinfer path (vLLM puts min-p first; the two differ only where min-p and top-p are both set). Top-k keeps every
    score >= the k-th (Hugging Face); top-p keeps the fewest whole groups of equal scores whose mass reaches top_p. The
    best token stays. A greedy row is returned unchanged: its distribution is the model's at temperature 1."""
    if mode is SamplingMode.GREEDY:
        return logits
    # Shift first: the best score is then exactly 0 at any temperature and nothing overflows to +inf.
    shifted = logits - jnp.max(logits, axis=-1, keepdims=True)
    scores = shifted / jnp.maximum(batch.temperature, jnp.finfo(jnp.float32).tiny)[:, None]
    if mode >= SamplingMode.FILTERED:
        scores = _apply_top_k_top_p(scores, batch)
    return jnp.where(is_greedy(batch)[:, None], logits, scores)


def sample(
    logits: Float[Array, "B V"],
    batch: SamplingBatch,
    mode: SamplingMode,
    *,
    token_ids: Int[Array, " V"] | None = None,
) -> tuple[Int[Array, " B"], Float[Array, "B V"]]:
    """Return the token of each row and the processed logits it was drawn from. Ties go to the lower id.

    `logits` are float32, after `penalize`. In GREEDY mode the caller guarantees that all rows have temperature 0.
    `token_ids`: whose noise each column has, where the columns are not the tokens 0, 1, .. themselves."""
    processed = processed_logits(logits, batch, mode)
    scores = processed
    if mode is not SamplingMode.GREEDY:
        noise = gumbel_noise(batch, logits.shape[-1], token_ids=token_ids)
        scores = jnp.where(is_greedy(batch)[:, None], processed, processed + noise)
    return best_token(scores), processed


def best_token(scores: Float[Array, "B V"]) -> Int[Array, " B"]:
    """The lowest id among the highest scores; V - 1 for a row with NaN. Two reductions that XLA turns into vector code
    on CPU, where argmax is a loop of single comparisons, twice as long."""
    vocabulary = scores.shape[-1]
    is_best = scores >= jnp.max(scores, axis=-1, keepdims=True)
    return jnp.min(jnp.where(is_best, jnp.arange(vocabulary, dtype=jnp.int32), vocabulary - 1), axis=-1)


def is_greedy(batch: SamplingBatch) -> Bool[Array, " B"]:
    """Return which rows have temperature 0. Below the smallest normal float32 counts as 0 on every platform."""
    return batch.temperature < jnp.finfo(jnp.float32).tiny


def gumbel_noise(
    batch: SamplingBatch, vocab_size: int, *, token_ids: Int[Array, " V"] | None = None
) -> Float[Array, "B V"]:
    """Return standard Gumbel noise of (seed, choice, position), row by row; finite. `token_ids`: of these tokens, None
    for all in order.

    All 32 random bits are used, with the fine end of the float where the noise is large: it reaches 22.8, where the
    usual 23 bits end at 15.9 and starve the tail of a large vocabulary (each token below 1e-7)."""

    keys = batch.seed[:, 0], batch.seed[:, 1]
    for data in (batch.choice, batch.position):
        keys = _threefry(keys, jnp.uint32(0), data.astype(jnp.uint32))
    rows = keys[0][:, None], keys[1][:, None]
    ids = jnp.arange(vocab_size, dtype=jnp.uint32) if token_ids is None else token_ids.astype(jnp.uint32)
    high, low = _threefry(rows, jnp.uint32(0), ids)
    bits = (high ^ low).astype(jnp.float32)
    # (0, 1), open at both ends: 2^-33 .. 1 - 2^-24
    uniform = jnp.minimum((bits + jnp.float32(0.5)) * jnp.float32(2.0**-32), jnp.float32(1 - 2.0**-24))
    return -jnp.log(-jnp.log1p(-uniform))


def _threefry(keys: _Words, high: UInt32[Array, "..."], low: UInt32[Array, "..."]) -> _Words:
    """Threefry-2x32 with 20 rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) of the words
    (high, low) under `keys`: `jax.random.fold_in` of threefry2x32 where high is 0, and two halves of what
    `jax.random.bits` joins by xor. Unrolled, as `jax.random` does not on CPU: a single loop over the vocabulary. Random
    sampling takes 0.6 to 0.7 of the time there, and these bits compile in 0.4."""
    schedule = (*keys, keys[0] ^ keys[1] ^ jnp.uint32(_PARITY))
    high, low = high + schedule[0], low + schedule[1]
    for block in range(5):
        for rotation in _ROTATIONS[block % 2]:
            high = high + low
            low = high ^ ((low << jnp.uint32(rotation)) | (low >> jnp.uint32(32 - rotation)))
        high, low = high + schedule[(block + 1) % 3], low + schedule[(block + 2) % 3] + jnp.uint32(block + 1)
    return high, low


def _apply_top_k_top_p(scores: Float[Array, "B V"], batch: SamplingBatch) -> Float[Array, "B V"]:
    """Drop what top-k, top-p and min-p drop. Scores are <= 0 and the best of each row is 0.

    No branch looks at the batch: a GPU would wait for the result before the next step could be dispatched."""

    def reaches_count(threshold: Float[Array, " B"]) -> Bool[Array, " B"]:
        return jnp.sum(scores >= threshold[:, None], axis=-1, dtype=jnp.int32) >= batch.top_k

    limited = (batch.top_k > 0) & (batch.top_k < scores.shape[-1])
    at_top_k = jnp.where(limited, _threshold(reaches_count, scores.shape[0]), -jnp.inf)
    remaining = jnp.where(scores >= at_top_k[:, None], scores, -jnp.inf)
    weights = jnp.exp(remaining)
    target_mass = batch.top_p * jnp.sum(weights, axis=-1)

    def reaches_mass(threshold: Float[Array, " B"]) -> Bool[Array, " B"]:
        # Terms are >= 0 and added in one fixed order, so the mass never falls as the threshold does: bisection is
        # exact.
        return jnp.sum(jnp.where(remaining >= threshold[:, None], weights, jnp.float32(0)), axis=-1) >= target_mass

    at_top_p = jnp.where(batch.top_p < 1, _threshold(reaches_mass, scores.shape[0]), -jnp.inf)
    threshold = jnp.maximum(at_top_p, jnp.log(batch.min_p))  # min-p: p >= min_p * p_best, and log 0 is off
    return jnp.where(remaining >= threshold[:, None], remaining, -jnp.inf)


def _threshold(reaches: Callable[[Float[Array, " B"]], Bool[Array, " B"]], num_rows: int) -> Float[Array, " B"]:
    """Return per row the highest threshold <= 0 for which `reaches(threshold)` holds, or the lowest finite one if none
    does.

    `reaches` must not turn false as the threshold falls. Exact to the last bit of a float32."""

    def as_threshold(bits: Int[Array, " B"]) -> Float[Array, " B"]:
        return -lax.bitcast_convert_type(bits, jnp.float32)

    def halve(
        _: Int[Array, ""], span: tuple[Int[Array, " B"], Int[Array, " B"]]
    ) -> tuple[Int[Array, " B"], Int[Array, " B"]]:
        low, high = span  # the answer is in low..high
        middle = low + (high - low) // 2
        reached = reaches(as_threshold(middle))
        return jnp.where(reached, low, middle + 1), jnp.where(reached, middle, high)

    span = jnp.zeros(num_rows, jnp.int32), jnp.full(num_rows, _MAX_FINITE_BITS, jnp.int32)
    return as_threshold(lax.fori_loop(0, _BISECTIONS, halve, span)[1])
