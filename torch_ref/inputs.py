"""prepare_inputs: positions, slots, lengths and sample rows of one draft step, from the packed integers.

N requests of the bucket (padded ones included), Q = num_speculative_tokens + 1 query rows each, C context rows,
G page groups.
Nothing here waits for the device or depends on a value in shape, so that a CUDA graph can hold it.
"""

from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from jax_dflash.batch import PAD_SLOT
from jax_dflash.pages import NULL_PAGE


class StepInputs(NamedTuple):
    """All integers of a step, int32. Padded requests and rows are inert: slot PAD, length 0, request -1, index 0.
    Slots are those of each page group."""

    context_positions: Int[Tensor, "C"]
    context_slots: Int[Tensor, "G C"]
    input_ids: Int[Tensor, "N*Q"]
    query_positions: Int[Tensor, "N*Q"]
    query_slots: Int[Tensor, "G N*Q"]
    query_start_loc: Int[Tensor, "N+1"]
    seq_lens: Int[Tensor, "N"]
    sample_indices: Int[Tensor, "N*K"]
    sample_positions: Int[Tensor, "N*K"]
    sample_request: Int[Tensor, "N*K"]


def slot_mapping(
    positions: Int[Tensor, "S"], tables: Int[Tensor, "S W"], page_size: int, max_model_len: int
) -> Int[Tensor, "S"]:
    """The slot of each position in its own row of a block table; PAD in the null page and from max_model_len on."""
    column = (positions // page_size).clamp(0, tables.shape[1] - 1)
    page = tables.gather(1, column[:, None].long())[:, 0]
    slot = page * page_size + positions % page_size
    return torch.where((page == NULL_PAGE) | (positions >= max_model_len), PAD_SLOT, slot)


def prepare_inputs(
    fields: dict[str, Tensor],
    *,
    context_rows: int,
    query_len: int,
    mask_token_id: int,
    page_size: int,
    max_model_len: int,
) -> StepInputs:
    """`fields` is the unpacked integer array of one bucket (`IntsLayout`). Row i of the context is target row i:
    request by request, without gaps. A request's rejected rows are its last ones; the block follows its last valid
    position."""
    tables, start = fields["block_tables"], fields["start_position"]
    N, Q = tables.shape[1], query_len
    kind = {"dtype": start.dtype, "device": start.device}
    live = fields["request_index"] >= 0
    num_context = torch.where(live, fields["num_context"], 0)
    num_valid = num_context - torch.where(live, fields["num_rejected"], 0)

    ends = torch.cumsum(num_context, 0, dtype=start.dtype)
    row = torch.arange(context_rows, **kind)
    owner = (ends <= row[:, None]).sum(1).clamp(max=N - 1)
    offset = row - (ends - num_context)[owner]
    valid = (row < fields["num_rows"]) & (row < ends[-1]) & (offset < num_valid[owner])
    context_positions = torch.where(valid, start[owner] + offset, 0)
    context_slots = [slot_mapping(context_positions, table[owner], page_size, max_model_len) for table in tables]
    context_slots = torch.stack(context_slots)
    context_slots = torch.where(valid, context_slots, PAD_SLOT)

    last_valid = start + num_valid - 1
    steps = torch.arange(Q, **kind)
    unclamped = last_valid[:, None] + 1 + steps
    each_table = tables[:, :, None].expand(-1, -1, Q, -1).flatten(1, 2)
    slots = [slot_mapping(unclamped.reshape(-1), table, page_size, max_model_len) for table in each_table]
    anchor = torch.where(fields["num_sampled"] > 0, fields["last_sampled"], fields["next_prefill"])
    ids = torch.where(steps == 0, anchor[:, None], mask_token_id)
    each = live[:, None]
    num_live = torch.sum(live, dtype=start.dtype)
    first = torch.arange(N, **kind)[:, None] * Q

    return StepInputs(
        context_positions=context_positions,
        context_slots=context_slots,
        input_ids=torch.where(each, ids, 0).reshape(-1),
        query_positions=torch.where(each, unclamped.clamp(max=max_model_len - 1), 0).reshape(-1),
        query_slots=torch.where(each, torch.stack(slots).reshape(-1, N, Q), PAD_SLOT).flatten(1),
        query_start_loc=torch.minimum(torch.arange(N + 1, **kind), num_live) * Q,
        seq_lens=torch.where(live, (last_valid + 1 + Q).clamp(max=max_model_len), 0),
        sample_indices=torch.where(each, first + steps[1:], 0).reshape(-1),
        sample_positions=torch.where(each, unclamped[:, 1:], 0).reshape(-1),
        sample_request=torch.where(each, fields["request_index"][:, None], -1).expand(-1, Q - 1).reshape(-1),
    )
