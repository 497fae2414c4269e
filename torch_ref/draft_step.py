"""The whole draft step as one function: prepare_inputs, combine, context K/V, query forward, LM head, sampling.

N requests of the bucket, Q = K + 1 query rows each, C context rows, F feature width, G page groups.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from jax_dflash.batch import CHUNK_KEYS, EngineConfig
from jax_dflash.taps import TapCall, by_group, no_taps
from torch_ref import drafter, sampling
from torch_ref.attention import dense
from torch_ref.drafter import DraftWeights
from torch_ref.inputs import StepInputs, prepare_inputs
from torch_ref.kv_cache import Pool, layers_in_order, pool_shapes, store_context, store_layer, zero_pool
from torch_ref.numerics import accum_dtype, from_bits


class DraftState(NamedTuple):
    """What a step changes, in place."""

    pools: tuple[Pool, ...]  # one for each page group
    draft_logits: Float[Tensor, "R+1 K V"] | None = None  # of each request's last drafts, where drafts are sampled


def step_inputs(
    config: EngineConfig, ints: Int[Tensor, "_"], num_reqs: int, context_rows: int
) -> tuple[StepInputs, dict[str, Tensor]]:
    """prepare_inputs of a packed array, and the array's fields."""
    fields = config.layout(num_reqs).unpack(ints)
    return inputs_of(config, fields, context_rows), fields


def inputs_of(config: EngineConfig, fields: dict[str, Tensor], context_rows: int) -> StepInputs:
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
    features: Float[Tensor, "C F"],
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
    # No index array: it would have to come from the host, which a CUDA graph cannot hold.
    return tuple(
        store_context(pool, torch.stack([kv[i] for i in group.layers]), slots) for pool, group, slots in groups
    )


def query_step(
    config: EngineConfig,
    weights: DraftWeights,
    state: DraftState,
    inputs: StepInputs,
    fields: dict[str, Tensor],
    tap: TapCall = no_taps,
    *,
    first_keys: tuple[int, ...] | None = None,
    attention: str,
) -> tuple[DraftState, Int[Tensor, "N K"]]:
    """One pass over [anchor, mask x K] of each request, and its K drafts. It reads as many pages of
    each request as the block tables are wide, less those before the chunk of a page group's `first_keys`."""
    N, Q, places = len(inputs.seq_lens), config.query_len, config.draft.layer_places
    kinds = [(group, layer.window, layer.causal) for (group, _), layer in zip(places, config.draft.layers, strict=True)]
    starts = [key // CHUNK_KEYS * CHUNK_KEYS for key in first_keys or [0] * len(state.pools)]
    keys = {
        (group, window, causal): dense.find_keys(
            fields["block_tables"][group],
            inputs.seq_lens,
            config.page_size,
            *dense.key_bounds(inputs.seq_lens, Q, window, causal, fields["first_context_position"]),
            starts[group],
        )
        for group, window, causal in dict.fromkeys(kinds)
    }
    slots = inputs.query_slots.long()  # once, for the indexing of all layers

    def attend(pools, layer, q, k, v):
        group, at = places[layer]
        store_layer(pools[group], at, k.flatten(0, 1), v.flatten(0, 1), slots[group])
        return pools, dense.attend_keys(pools[group], at, q, keys[kinds[layer]], attention)

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
    state: DraftState, logits: Float[Tensor, "N K V"], inputs: StepInputs, fields: dict[str, Tensor]
) -> tuple[DraftState, Int[Tensor, "N K"]]:
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
    features: Float[Tensor, "C F"],
    ints: Int[Tensor, "_"],
    *,
    num_reqs: int,
    table_width: int,
    first_keys: tuple[int, ...] | None = None,
    attention: str,
    tap: TapCall = no_taps,
) -> tuple[DraftState, Int[Tensor, "N K"]]:
    """One draft step of a bucket; attention reads `table_width` pages of each request by the kernel of that name.
    `first_keys`, where the host knows them: of each page group the first key that any row sees."""
    inputs, fields = step_inputs(config, ints, num_reqs, features.shape[0])
    fields["block_tables"] = fields["block_tables"][:, :, :table_width]
    state = state._replace(pools=context_step(config, weights, state.pools, features, inputs, tap))
    state, draft_tokens = query_step(
        config, weights, state, inputs, fields, tap, first_keys=first_keys, attention=attention
    )
    if tap is not no_taps:
        tap("pool", layers_in_order(config.draft, state.pools))
    return state, draft_tokens


def zero_state(config: EngineConfig, dtype: torch.dtype, device: torch.device | str) -> DraftState:
    """Fresh pools, and draft logits where drafts are sampled."""
    pools = tuple(zero_pool(shape, dtype, device) for shape in pool_shapes(config))
    if not config.samples_drafts:
        return DraftState(pools)
    R, K, V = config.draft_logits_shape
    return DraftState(pools, torch.zeros(R + 1, K, V, dtype=accum_dtype(dtype), device=device))
