"""Sampling: noise, drafts, and the verification of drafts. Pure functions.

N requests, K drafts of one request, Q = K + 1 target rows of it, V vocabulary. Row i of a request is where its draft i is
verified; its position is that of the token before the predicted one, for drafts and for the target alike.

Noise is a function of (seed, position, token id) and of what it is for (`Stream`), never of a batch: Threefry-2x32 (Salmon
et al. 2011) with key (seed, position + stream) and counter (token id, 0), of which the first word is used. PyTorch draws
the same bits.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.random import threefry_2x32
from jaxtyping import Array, Bool, Float, Int, UInt32

from jax_dflash.numerics import to_accum
from jax_dflash.sampling_params import SamplingColumns, SamplingMode, Stream

# Half a step above 0, and the step a hair below 2^-32, so that no uniform rounds to 0 or 1 in float32.
UNIFORM_STEP = 2.0**-32 * (1 - 2.0**-24)


def greedy(logits: Float[Array, "... V"]) -> Int[Array, "..."]:
    """The most likely token; the lowest id on ties."""
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def random_bits(
    stream: Stream, seeds: Int[Array, "*rows"], positions: Int[Array, "*rows"], num_ids: int
) -> UInt32[Array, "*rows V"]:
    """32 random bits of each token id below `num_ids`; seeds and positions are broadcast."""

    def row(seed, position):
        ids = lax.iota(jnp.uint32, num_ids)
        return threefry_2x32((seed, position), jnp.concatenate([ids, jnp.zeros_like(ids)]))[:num_ids]

    # JAX 0.10 compiles the hash on a CPU only for key words of one shape.
    keys = jnp.broadcast_arrays(seeds.astype(jnp.uint32), (positions + stream.value).astype(jnp.uint32))
    return jnp.vectorize(row, signature="(),()->(v)")(*keys)


def uniform(stream: Stream, seeds: Array, positions: Array, num_ids: int, dtype: jnp.dtype) -> Float[Array, "*rows V"]:
    """Uniform in (0, 1), fine near 0: the least is 2^-33, the largest of float32 1 - 2^-24."""
    return (random_bits(stream, seeds, positions, num_ids).astype(dtype) + 0.5) * UNIFORM_STEP


def gumbel(stream: Stream, seeds: Array, positions: Array, num_ids: int, dtype: jnp.dtype) -> Float[Array, "*rows V"]:
    """Gumbel noise -log(-log(1 - u)). The large values, which win, come from small u, where floats are dense: up to 22.9
    in float32, where -log(-log u) ends at 16.6."""
    return -jnp.log(-jnp.log1p(-uniform(stream, seeds, positions, num_ids, dtype)))


def without_nan(logits: Float[Array, "... V"]) -> Float[Array, "... V"]:
    """Logits in the accumulation dtype, -inf where NaN, so that a broken row still gives a token of the vocabulary."""
    logits = to_accum(logits)
    return jnp.where(jnp.isnan(logits), -jnp.inf, logits)


def per_row(column: Float[Array, "N"], logits: Array) -> Array:
    """A column of requests that broadcasts against logits `[N, ..., V]`."""
    return column.astype(logits.dtype).reshape(-1, *[1] * (logits.ndim - 1))


def over_temperature(logits: Float[Array, "N ... V"], temperature: Float[Array, "N"]) -> Float[Array, "N ... V"]:
    """Logits divided by the temperature; those of greedy requests as they are."""
    return logits / per_row(jnp.where(temperature == 0, 1, temperature), logits)


def sample_drafts(
    logits: Float[Array, "N K V"],
    temperature: Float[Array, "N"],
    seeds: Int[Array, "N"],
    positions: Int[Array, "N K"],
) -> Int[Array, "N K"]:
    """Drafts by the Gumbel-max of logits / temperature, the most likely where the temperature is 0. No other parameter
    applies to drafts. `positions` are those of the tokens before the drafts. The caller caches `logits` as they came, for
    `verify`; rows of padded requests give some token and touch nothing."""
    logits = over_temperature(without_nan(logits), temperature)
    noise = gumbel(Stream.DRAFT, seeds[:, None], positions, logits.shape[-1], logits.dtype)
    return greedy(jnp.where(per_row(temperature, logits) == 0, logits, logits + noise))


def mark_seen(seen: Bool[Array, "N V"], tokens: Int[Array, "N T"], num_tokens: Int[Array, "N"]) -> Bool[Array, "N V"]:
    """`seen` with each request's first `num_tokens` tokens; ids outside the vocabulary mark nothing."""
    ids = jnp.arange(seen.shape[-1], dtype=jnp.int32)
    for i in range(tokens.shape[1]):
        seen |= (tokens[:, i, None] == ids) & (i < num_tokens[:, None])
    return seen


def penalise(
    logits: Float[Array, "N Q V"],
    penalty: Float[Array, "N"],
    seen: Bool[Array, "N V"],
    draft_tokens: Int[Array, "N K"] | None,
) -> Float[Array, "N Q V"]:
    """The repetition penalty of CTRL (Keskar et al. 2019; in transformers): positive logits of seen tokens divided by it,
    negative ones multiplied. Row i has seen its request's drafts before it too, as plain decoding would have."""
    rows = [seen]
    for drafts in () if draft_tokens is None else draft_tokens.T:
        rows.append(mark_seen(rows[-1], drafts[:, None], jnp.ones_like(drafts)))
    assert len(rows) == logits.shape[1], f"{logits.shape[1]} rows, drafts for {len(rows)}"
    penalty = per_row(penalty, logits)
    return jnp.where(jnp.stack(rows, axis=1), jnp.where(logits > 0, logits / penalty, logits * penalty), logits)


def keep_top(logits: Float[Array, "N Q V"], top_k: Int[Array, "N"], top_p: Float[Array, "N"]) -> Float[Array, "N Q V"]:
    """-inf outside the k most likely tokens (0: all), and then outside the fewest that hold `top_p` of their mass (Holtzman
    et al. 2020), at least one. Tokens as likely as the last one kept are kept."""
    V = logits.shape[-1]
    descending = jnp.sort(logits, axis=-1, descending=True)
    last = jnp.where(top_k == 0, V, jnp.minimum(top_k, V)) - 1
    last = jnp.broadcast_to(last[:, None, None], (*logits.shape[:2], 1))
    descending = jnp.where(descending >= jnp.take_along_axis(descending, last, -1), descending, -jnp.inf)
    mass = jax.nn.softmax(descending, axis=-1)
    top_p = per_row(top_p, logits)
    kept = (jnp.cumsum(mass, axis=-1) - mass < top_p) | (top_p >= 1)  # a sum of all may round above 1
    least = jnp.min(jnp.where(kept & (descending > -jnp.inf), descending, jnp.inf), axis=-1, keepdims=True)
    return jnp.where(logits >= jnp.minimum(least, descending[..., :1]), logits, -jnp.inf)


def process_logits(
    logits: Float[Array, "N Q V"],
    columns: SamplingColumns,
    mode: SamplingMode,
    seen: Bool[Array, "N V"] | None = None,
    draft_tokens: Int[Array, "N K"] | None = None,
) -> Float[Array, "N Q V"]:
    """The target's logits with penalty, temperature, top-k and top-p, in that order (vLLM's), in the accumulation dtype;
    of greedy requests with the penalty only. `seen` (prompt and output so far) is read if `mode.penalised`, and
    `draft_tokens` where there is more than one row. `mode` is static."""
    logits = without_nan(logits)
    if mode.penalised:
        assert seen is not None, "a penalty needs the tokens seen"
        logits = penalise(logits, columns.repetition_penalty, seen, draft_tokens)
    if mode.sampled:
        logits = over_temperature(logits, columns.temperature)
    if mode.filtered:
        logits = keep_top(logits, columns.top_k, columns.top_p)
    return logits


def log_prob(logits: Float[Array, "N K V"], ids: Int[Array, "N K"]) -> Float[Array, "N K"]:
    """Log probability of one token of each row; of an id outside the vocabulary, some token's."""
    ids = jnp.clip(ids, 0, logits.shape[-1] - 1)[..., None]
    return jnp.take_along_axis(logits, ids, -1)[..., 0] - jax.nn.logsumexp(logits, axis=-1)


def residual(
    logits: Float[Array, "N V"], rejected: Int[Array, "N"], draft_logits: Float[Array, "N V"] | None
) -> Float[Array, "N V"]:
    """Logits of max(p - q, 0), which a rejected draft's place is sampled from (Leviathan et al. 2023): p without the draft
    if drafts were greedy. Of p itself where nothing was rejected (-1), and where rounding leaves no residual."""
    if draft_logits is None:
        left = jnp.where(jnp.arange(logits.shape[-1], dtype=jnp.int32) == rejected[:, None], -jnp.inf, logits)
    else:
        log_p, log_q = jax.nn.log_softmax(logits, axis=-1), jax.nn.log_softmax(draft_logits, axis=-1)
        left = jnp.where(log_q < log_p, log_p + jnp.log(-jnp.expm1(log_q - log_p)), -jnp.inf)
    whole = (rejected < 0) | jnp.all(left == -jnp.inf, axis=-1)
    return jnp.where(whole[:, None], logits, left)


def verify(
    logits: Float[Array, "N Q Vt"],
    draft_tokens: Int[Array, "N K"],
    num_drafts: Int[Array, "N"],
    positions: Int[Array, "N"],
    columns: SamplingColumns,
    mode: SamplingMode,
    draft_logits: Float[Array, "N K Vd"] | None = None,
    seen: Bool[Array, "N Vt"] | None = None,
) -> tuple[Int[Array, "N Q"], Int[Array, "N"]]:
    """Accept drafts while the target agrees, then take one token of its own: `(tokens, num_sampled)`. A request emits
    `tokens[:num_sampled]`; behind them stand zeros.

    A greedy request accepts a draft that is the target's most likely token. A sampled one accepts d if
    log p(d) > log u + log q(d), with q of `draft_logits` / temperature, as cached by the draft step, or q(d) = 1 if there
    are none and drafts were greedy. After the first failure the token comes from the residual, after the last draft from
    the target, so that tokens follow the target exactly (Leviathan et al. 2023; Chen et al. 2023). Drafts from `num_drafts`
    on are never accepted, nor is -1, in whose place the target's own token is drawn.

    `positions` are those of row 0, of the last emitted token. Of two vocabularies the smaller is used. `mode` is static and
    covers every request. K may be 0: plain decoding. Padded requests emit one token that nobody reads.
    """
    K = draft_tokens.shape[1]
    if draft_logits is not None:
        V = min(logits.shape[-1], draft_logits.shape[-1])
        draft_logits = over_temperature(without_nan(draft_logits[..., :V]), columns.temperature)
        logits = logits[..., :V]
        seen = None if seen is None else seen[:, :V]
    V, steps = logits.shape[-1], jnp.arange(K + 1, dtype=jnp.int32)
    exists = (steps[:K] < num_drafts[:, None]) & (draft_tokens < V)
    draft_tokens = jnp.where(exists, draft_tokens, -1)
    logits = process_logits(logits, columns, mode, seen, draft_tokens)

    own = greedy(logits)
    accept = own[:, :K] == draft_tokens
    sampled = columns.temperature > 0
    if mode.sampled:
        rows = positions[:, None] + steps[:K]
        log_u = jnp.log(uniform(Stream.ACCEPT, columns.seeds[:, None], rows, 1, logits.dtype)[..., 0])
        log_q = 0 if draft_logits is None else log_prob(draft_logits, draft_tokens)
        likely = log_prob(logits[:, :K], draft_tokens) > log_u + log_q
        accept = jnp.where(sampled[:, None], likely & (draft_tokens >= 0), accept)
    num_accepted = jnp.sum(jnp.cumprod(accept.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)

    def at_last(x, i=num_accepted):
        return jnp.take_along_axis(x, i.reshape(-1, *[1] * (x.ndim - 1)), axis=1)[:, 0]

    drafts = jnp.pad(draft_tokens, ((0, 0), (0, 1)), constant_values=-1)
    last = at_last(own)
    if mode.sampled:
        q = None if draft_logits is None else at_last(draft_logits, jnp.minimum(num_accepted, K - 1))
        left = residual(at_last(logits), at_last(drafts), q)
        noise = gumbel(Stream.TARGET, columns.seeds, positions + num_accepted, V, logits.dtype)
        last = jnp.where(sampled, greedy(left + noise), last)
    n = num_accepted[:, None]
    return jnp.where(steps < n, drafts, jnp.where(steps == n, last[:, None], 0)), num_accepted + 1


def greedy_verify(
    logits: Float[Array, "N Q V"], draft_tokens: Int[Array, "N K"], num_drafts: Int[Array, "N"]
) -> tuple[Int[Array, "N Q"], Int[Array, "N"]]:
    """`verify` of requests that are all greedy."""
    off = num_drafts * 0
    return verify(logits, draft_tokens, num_drafts, off, SamplingColumns(off, off, off, off, off), SamplingMode())


def keep_logits(
    draft_logits: Float[Array, "R Kmax V"], logits: Float[Array, "N K V"], request_index: Int[Array, "N"]
) -> Float[Array, "R Kmax V"]:
    """`draft_logits` with the rows of these requests, as they came; -1, a padded request, keeps nothing."""
    R = draft_logits.shape[0]
    # -1 itself would wrap to the last row: distinct rows past the end are dropped.
    rows = jnp.where(request_index < 0, R + jnp.arange(len(request_index), dtype=request_index.dtype), request_index)
    new = logits.astype(draft_logits.dtype)
    return draft_logits.at[rows, : logits.shape[1]].set(new, mode="drop", unique_indices=True)
