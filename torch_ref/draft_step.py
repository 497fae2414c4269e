"""The whole draft step as one function: prepare_inputs, combine, context K/V, query forward, LM head, sampling.

N requests of the bucket, Q = K + 1 query rows each, C context rows, F feature width.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from jax_dflash.batch import EngineConfig
from jax_dflash.taps import TapCall, no_taps
from torch_ref import drafter, sampling
from torch_ref.attention import dense
from torch_ref.drafter import DraftWeights
from torch_ref.inputs import StepInputs, prepare_inputs
from torch_ref.kv_cache import Pool, pool_shape, store_context, store_layer, zero_pool


class DraftState(NamedTuple):
    """What a step changes, in place."""

    pool: Pool


def step_inputs(
    config: EngineConfig, ints: Int[Tensor, "_"], num_reqs: int, context_rows: int
) -> tuple[StepInputs, Int[Tensor, "N W"]]:
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
    features: Float[Tensor, "C F"],
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
    block_tables: Int[Tensor, "N W"],
    tap: TapCall = no_taps,
    *,
    attention: str,
) -> tuple[Pool, Int[Tensor, "N K"]]:
    """One pass over [anchor, mask x K] of each request, and its K greedy drafts. It reads as many pages of
    each request as `block_tables` is wide."""
    N, Q = block_tables.shape[0], config.query_len
    kinds = [(layer.window, layer.causal) for layer in config.draft.layers]
    keys = {
        kind: dense.find_keys(
            block_tables, inputs.seq_lens, config.page_size, *dense.key_bounds(inputs.seq_lens, Q, *kind)
        )
        for kind in dict.fromkeys(kinds)
    }
    slots = inputs.query_slots.long()  # once, for the indexing of all layers

    def attend(pool, layer, q, k, v):
        pool = store_layer(pool, layer, k.flatten(0, 1), v.flatten(0, 1), slots)
        return pool, dense.attend_keys(pool, layer, q, keys[kinds[layer]], attention)

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
    features: Float[Tensor, "C F"],
    ints: Int[Tensor, "_"],
    *,
    num_reqs: int,
    table_width: int,
    attention: str,
    tap: TapCall = no_taps,
) -> tuple[DraftState, Int[Tensor, "N K"]]:
    """One draft step of a bucket; attention reads `table_width` pages of each request by the kernel of that name."""
    inputs, block_tables = step_inputs(config, ints, num_reqs, features.shape[0])
    pool = context_step(config, weights, state.pool, features, inputs, tap)
    pool, draft_tokens = query_step(
        config, weights, pool, inputs, block_tables[:, :table_width], tap, attention=attention
    )
    return DraftState(tap("pool", pool)), draft_tokens


def zero_state(config: EngineConfig, dtype: torch.dtype, device: torch.device | str) -> DraftState:
    """A fresh pool."""
    return DraftState(zero_pool(pool_shape(config.draft.geometry, config.num_pages, config.page_size), dtype, device))
