"""The whole draft step as one function: prepare_inputs, combine, context K/V, query forward, LM head, sampling.

N requests of the bucket, Q = K + 1 query rows each, C context rows, F feature width, G page groups.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jax_dflash import drafter, sampling
from jax_dflash.attention import dense
from jax_dflash.batch import EngineConfig
from jax_dflash.drafter import DraftWeights
from jax_dflash.inputs import StepInputs, prepare_inputs
from jax_dflash.kv_cache import Pool, layers_in_order, pool_shapes, store_context, store_layer
from jax_dflash.taps import TapCall, by_group, no_taps


class DraftState(NamedTuple):
    """What a step changes: donated to it and returned by it."""

    pools: tuple[Pool, ...]  # one for each page group


def step_inputs(
    config: EngineConfig, ints: Int[Array, "_"], num_reqs: int, context_rows: int
) -> tuple[StepInputs, dict[str, Array]]:
    """prepare_inputs of a packed array, and the array's fields."""
    fields = config.layout(num_reqs).unpack(ints)
    inputs = prepare_inputs(
        fields,
        context_rows=context_rows,
        query_len=config.query_len,
        mask_token_id=config.draft.mask_token_id,
        page_size=config.page_size,
        max_model_len=config.max_model_len,
    )
    return inputs, fields


def context_step(
    config: EngineConfig,
    weights: DraftWeights,
    pools: tuple[Pool, ...],
    features: Float[Array, "C F"],
    inputs: StepInputs,
    tap: TapCall = no_taps,
) -> tuple[Pool, ...]:
    """Combine the target's hidden states, make every layer's context K/V, and store them."""
    features = tap("features", features)
    tap("context_positions", inputs.context_positions)
    tap("context_slots", by_group(inputs.context_slots))
    combined = tap("combined", drafter.combine_hidden_states(weights, features))
    kv = drafter.precompute_context_kv(weights, config.draft, combined, inputs.context_positions, tap)
    if len(pools) == 1:
        return (store_context(pools[0], kv, inputs.context_slots[0]),)
    groups = zip(pools, config.draft.page_groups, inputs.context_slots, strict=True)
    return tuple(store_context(pool, kv[np.array(group.layers)], slots) for pool, group, slots in groups)


def query_step(
    config: EngineConfig,
    weights: DraftWeights,
    pools: tuple[Pool, ...],
    inputs: StepInputs,
    fields: dict[str, Array],
    tap: TapCall = no_taps,
) -> tuple[tuple[Pool, ...], Int[Array, "N K"]]:
    """One pass over [anchor, mask x K] of each request, and its K greedy drafts."""
    N, Q, places = len(inputs.seq_lens), config.query_len, config.draft.layer_places
    first = fields["first_context_position"]
    bounds = [dense.key_bounds(inputs.seq_lens, Q, layer.window, layer.causal, first) for layer in config.draft.layers]

    def attend(pools, layer, q, k, v):
        group, at = places[layer]
        pool = store_layer(
            pools[group], at, k.reshape(N * Q, *k.shape[2:]), v.reshape(N * Q, *v.shape[2:]), inputs.query_slots[group]
        )
        pools = (*pools[:group], pool, *pools[group + 1 :])
        return pools, dense.attention(pool, at, q, fields["block_tables"][group], inputs.seq_lens, *bounds[layer])

    for name, value in inputs._asdict().items():
        if not name.startswith("context"):
            tap(name, by_group(value) if name == "query_slots" else value)
    x = tap("embeds", drafter.embed(weights, config.draft, inputs.input_ids.reshape(N, Q)))
    positions = inputs.query_positions.reshape(N, Q)
    pools, hidden = drafter.query_forward(weights, config.draft, pools, x, positions, attend, tap)
    hidden = tap("hidden", hidden[:, 1:])  # the rows of `sample_indices`: all but the anchor's
    logits = tap("logits", drafter.compute_logits(weights, config.draft, hidden))
    return pools, tap("draft_tokens", sampling.greedy(logits))


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
    inputs, fields = step_inputs(config, ints, num_reqs, features.shape[0])
    pools = state.pools
    if features.shape[0]:
        pools = context_step(config, weights, pools, features, inputs, tap)
    pools, draft_tokens = query_step(config, weights, pools, inputs, fields, tap)
    if tap is not no_taps:
        tap("pool", layers_in_order(config.draft, pools))
    return DraftState(pools), draft_tokens


def zero_state(config: EngineConfig, dtype: jnp.dtype) -> DraftState:
    """Fresh pools."""
    return DraftState(tuple(jnp.zeros(shape, dtype) for shape in pool_shapes(config)))
