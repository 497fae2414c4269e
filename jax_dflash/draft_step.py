"""The whole draft step as one function: prepare_inputs, combine, context K/V, query forward, LM head, sampling.

N requests of the bucket, Q = K + 1 query rows each, C context rows, F feature width.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jax_dflash import drafter, sampling
from jax_dflash.attention import dense
from jax_dflash.batch import EngineConfig
from jax_dflash.drafter import DraftWeights
from jax_dflash.inputs import StepInputs, prepare_inputs
from jax_dflash.kv_cache import Pool, pool_shape, store_context, store_layer
from jax_dflash.taps import TapCall, no_taps


class DraftState(NamedTuple):
    """What a step changes: donated to it and returned by it."""

    pool: Pool


def step_inputs(
    config: EngineConfig, ints: Int[Array, "_"], num_reqs: int, context_rows: int
) -> tuple[StepInputs, Int[Array, "N W"]]:
    """prepare_inputs of a packed array, and its block tables."""
    fields = config.layout(num_reqs).unpack(ints)
    inputs = prepare_inputs(
        fields,
        context_rows=context_rows,
        query_len=config.query_len,
        mask_token_id=config.draft.mask_token_id,
        page_size=config.page_size,
        max_model_len=config.max_model_len,
    )
    return inputs, fields["block_tables"]


def context_step(
    config: EngineConfig,
    weights: DraftWeights,
    pool: Pool,
    features: Float[Array, "C F"],
    inputs: StepInputs,
    tap: TapCall = no_taps,
) -> Pool:
    """Combine the target's hidden states, make every layer's context K/V, and store them."""
    features = tap("features", features)
    tap("context_positions", inputs.context_positions)
    tap("context_slots", inputs.context_slots)
    combined = tap("combined", drafter.combine_hidden_states(weights, features))
    kv = drafter.precompute_context_kv(weights, config.draft, combined, inputs.context_positions, tap)
    return store_context(pool, kv, inputs.context_slots)


def query_step(
    config: EngineConfig,
    weights: DraftWeights,
    pool: Pool,
    inputs: StepInputs,
    block_tables: Int[Array, "N W"],
    tap: TapCall = no_taps,
) -> tuple[Pool, Int[Array, "N K"]]:
    """One pass over [anchor, mask x K] of each request, and its K greedy drafts."""
    N, Q = block_tables.shape[0], config.query_len
    bounds = [dense.key_bounds(inputs.seq_lens, Q, layer.window, layer.causal) for layer in config.draft.layers]

    def attend(pool, layer, q, k, v):
        pool = store_layer(
            pool, layer, k.reshape(N * Q, *k.shape[2:]), v.reshape(N * Q, *v.shape[2:]), inputs.query_slots
        )
        return pool, dense.attention(pool, layer, q, block_tables, inputs.seq_lens, *bounds[layer])

    for name, value in inputs._asdict().items():
        if not name.startswith("context"):
            tap(name, value)
    x = tap("embeds", drafter.embed(weights, config.draft, inputs.input_ids.reshape(N, Q)))
    positions = inputs.query_positions.reshape(N, Q)
    pool, hidden = drafter.query_forward(weights, config.draft, pool, x, positions, attend, tap)
    hidden = tap("hidden", hidden[:, 1:])  # the rows of `sample_indices`: all but the anchor's
    logits = tap("logits", drafter.compute_logits(weights, config.draft, hidden))
    return pool, tap("draft_tokens", sampling.greedy(logits))


def draft_step(
    config: EngineConfig,
    weights: DraftWeights,
    state: DraftState,
    features: Float[Array, "C F"],
    ints: Int[Array, "_"],
    *,
    num_reqs: int,
    tap: TapCall = no_taps,
) -> tuple[DraftState, Int[Array, "N K"]]:
    """One draft step of a bucket. C may be 0: then a context program has stored the context."""
    inputs, block_tables = step_inputs(config, ints, num_reqs, features.shape[0])
    pool = state.pool
    if features.shape[0]:
        pool = context_step(config, weights, pool, features, inputs, tap)
    pool, draft_tokens = query_step(config, weights, pool, inputs, block_tables, tap)
    return DraftState(tap("pool", pool)), draft_tokens


def zero_state(config: EngineConfig, dtype: jnp.dtype) -> DraftState:
    """A fresh pool."""
    return DraftState(jnp.zeros(pool_shape(config.draft.geometry, config.num_pages, config.page_size), dtype))
