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
from jax_dflash.numerics import accum_dtype, from_bits
from jax_dflash.taps import TapCall, by_group, no_taps


class DraftState(NamedTuple):
    """What a step changes: donated to it and returned by it."""

    pools: tuple[Pool, ...]  # one for each page group
    draft_logits: Float[Array, "R K V"] | None = None  # of each request's last drafts, where drafts are sampled


def step_inputs(
    config: EngineConfig, ints: Int[Array, "_"], num_reqs: int, context_rows: int
) -> tuple[StepInputs, dict[str, Array]]:
    """prepare_inputs of a packed array, and the array's fields."""
    fields = config.layout(num_reqs).unpack(ints)
    return inputs_of(config, fields, context_rows), fields


def inputs_of(config: EngineConfig, fields: dict[str, Array], context_rows: int) -> StepInputs:
    """prepare_inputs of unpacked fields."""
    return prepare_inputs(
        fields,
        context_rows=context_rows,
        query_len=config.query_len,
        mask_token_id=config.draft.mask_token_id,
        page_size=config.page_size,
        max_model_len=config.max_model_len,
    )


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
    state: DraftState,
    inputs: StepInputs,
    fields: dict[str, Array],
    tap: TapCall = no_taps,
) -> tuple[DraftState, Int[Array, "N K"]]:
    """One pass over [anchor, mask x K] of each request, and its K drafts."""
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
    pools, hidden = drafter.query_forward(weights, config.draft, state.pools, x, positions, attend, tap)
    hidden = tap("hidden", hidden[:, 1:])  # the rows of `sample_indices`: all but the anchor's
    logits = tap("logits", drafter.compute_logits(weights, config.draft, hidden))
    state, tokens = sample(state._replace(pools=pools), logits, inputs, fields)
    return state, tap("draft_tokens", tokens)


def sample(
    state: DraftState, logits: Float[Array, "N K V"], inputs: StepInputs, fields: dict[str, Array]
) -> tuple[DraftState, Int[Array, "N K"]]:
    """Drafts: the most likely tokens, or sampled ones, whose logits are kept for their verification."""
    if state.draft_logits is None:
        return state, sampling.greedy(logits)
    N, K, _ = logits.shape
    positions = inputs.sample_positions.reshape(N, K) - 1
    tokens = sampling.sample_drafts(logits, from_bits(fields["temperature_bits"]), fields["seed"], positions)
    kept = sampling.keep_logits(state.draft_logits, logits, fields["request_index"])
    return state._replace(draft_logits=kept), tokens


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
    return context_and_query(config, weights, state, features, inputs, fields, tap)


def context_and_query(
    config: EngineConfig,
    weights: DraftWeights,
    state: DraftState,
    features: Float[Array, "C F"],
    inputs: StepInputs,
    fields: dict[str, Array],
    tap: TapCall = no_taps,
) -> tuple[DraftState, Int[Array, "N K"]]:
    """`draft_step` of inputs that are prepared."""
    if features.shape[0]:
        state = state._replace(pools=context_step(config, weights, state.pools, features, inputs, tap))
    state, draft_tokens = query_step(config, weights, state, inputs, fields, tap)
    if tap is not no_taps:
        tap("pool", layers_in_order(config.draft, state.pools))
    return state, draft_tokens


def zero_state(config: EngineConfig, dtype: jnp.dtype) -> DraftState:
    """Fresh pools, and draft logits where drafts are sampled."""
    pools = tuple(jnp.zeros(shape, dtype) for shape in pool_shapes(config))
    return DraftState(
        pools, jnp.zeros(config.draft_logits_shape, accum_dtype(dtype)) if config.samples_drafts else None
    )
