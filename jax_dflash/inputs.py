"""prepare_inputs: positions, slots, lengths and sample rows of one draft step, from the packed integers.

N requests of the bucket (padded ones included), Q = num_speculative_tokens + 1 query rows each, C context rows,
G page groups.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int

from jax_dflash.batch import PAD_SLOT
from jax_dflash.pages import NULL_PAGE


class StepInputs(NamedTuple):
    """All integers of a step, int32. Padded requests and rows are inert: slot PAD, length 0, request -1, index 0.
    Slots are those of each page group."""

    context_positions: Int[Array, "C"]
    context_slots: Int[Array, "G C"]
    input_ids: Int[Array, "N*Q"]
    query_positions: Int[Array, "N*Q"]
    query_slots: Int[Array, "G N*Q"]
    query_start_loc: Int[Array, "N+1"]
    seq_lens: Int[Array, "N"]
    sample_indices: Int[Array, "N*K"]
    sample_positions: Int[Array, "N*K"]
    sample_request: Int[Array, "N*K"]


def slot_mapping(
    positions: Int[Array, "S"], tables: Int[Array, "S W"], page_size: int, max_model_len: int
) -> Int[Array, "S"]:
    """The slot of each position in its own row of a block table; PAD in the null page and from max_model_len on."""
    column = jnp.clip(positions // page_size, 0, tables.shape[1] - 1)
    page = jnp.take_along_axis(tables, column[:, None], axis=1)[:, 0]
    slot = page * page_size + positions % page_size
    return jnp.where((page == NULL_PAGE) | (positions >= max_model_len), PAD_SLOT, slot)


def prepare_inputs(
    fields: dict[str, Array],
    *,
    context_rows: int,
    query_len: int,
    mask_token_id: int,
    page_size: int,
    max_model_len: int,
) -> StepInputs:
    """`fields` is the unpacked integer array of one bucket (`IntsLayout`). Row i of the context is target row i: request
    by request, without gaps. A request's rejected rows are its last ones; the block follows its last valid position."""
    tables, start = fields["block_tables"], fields["start_position"]
    N, Q = tables.shape[1], query_len
    live = fields["request_index"] >= 0
    num_context = jnp.where(live, fields["num_context"], 0)
    num_valid = num_context - jnp.where(live, fields["num_rejected"], 0)

    ends = jnp.cumsum(num_context)
    row = jnp.arange(context_rows, dtype=jnp.int32)
    owner = jnp.minimum(jnp.searchsorted(ends, row, side="right", method="compare_all"), N - 1).astype(jnp.int32)
    offset = row - (ends - num_context)[owner]
    valid = (row < fields["num_rows"]) & (row < ends[-1]) & (offset < num_valid[owner])
    context_positions = jnp.where(valid, start[owner] + offset, 0)
    context_slots = [slot_mapping(context_positions, table[owner], page_size, max_model_len) for table in tables]
    context_slots = jnp.stack(context_slots)
    context_slots = jnp.where(valid, context_slots, PAD_SLOT)

    last_valid = start + num_valid - 1
    steps = jnp.arange(Q, dtype=jnp.int32)
    unclamped = last_valid[:, None] + 1 + steps
    each_table = jnp.repeat(tables, Q, axis=1)
    slots = [slot_mapping(unclamped.reshape(-1), table, page_size, max_model_len) for table in each_table]
    anchor = jnp.where(fields["num_sampled"] > 0, fields["last_sampled"], fields["next_prefill"])
    ids = jnp.where(steps == 0, anchor[:, None], mask_token_id)
    each = live[:, None]
    num_live = jnp.sum(live, dtype=jnp.int32)
    first = jnp.arange(N, dtype=jnp.int32)[:, None] * Q

    return StepInputs(
        context_positions=context_positions,
        context_slots=context_slots,
        input_ids=jnp.where(each, ids, 0).reshape(-1),
        query_positions=jnp.where(each, jnp.minimum(unclamped, max_model_len - 1), 0).reshape(-1),
        query_slots=jnp.where(each, jnp.stack(slots).reshape(-1, N, Q), PAD_SLOT).reshape(-1, N * Q),
        query_start_loc=jnp.minimum(jnp.arange(N + 1, dtype=jnp.int32), num_live) * Q,
        seq_lens=jnp.where(live, jnp.minimum(last_valid + 1 + Q, max_model_len), 0),
        sample_indices=jnp.where(each, first + steps[1:], 0).reshape(-1),
        sample_positions=jnp.where(each, unclamped[:, 1:], 0).reshape(-1),
        sample_request=jnp.where(each, fields["request_index"][:, None], -1).repeat(Q - 1, axis=1).reshape(-1),
    )
