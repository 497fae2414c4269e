"""TargetRunner: the target over the next rows of several requests, with greedy verification of drafts; the call surface
of `jax_dflash.target_runner.TargetRunner`.

B requests, T rows of one request, D model width, F features, Q = K + 1 rows of a verify, V vocabulary, R feature rows.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from jax_dflash.batch import PAD_SLOT
from jax_dflash.buckets import BucketLadder
from jax_dflash.config import InputError, TargetConfig
from jax_dflash.sampling_params import GREEDY, SamplingColumns, SamplingMode
from jax_dflash.target_batch import FLOATS, TargetBatch, TargetLimits, TargetOutput, check_taps
from torch_ref.attention import dense
from torch_ref.inputs import slot_mapping
from torch_ref.kv_cache import Pool, pool_shape, store_layer, zero_pool
from torch_ref.numerics import from_bits
from torch_ref.sampling import verify
from torch_ref.target import TargetWeights, compute_logits, embed, target_forward


def target_step(
    config: TargetConfig,
    weights: TargetWeights,
    pool: Pool,
    ids_BT: Int[Tensor, "B T"],
    starts_B: Int[Tensor, "B"],
    num_rows_B: Int[Tensor, "B"],
    block_tables_BW: Int[Tensor, "B W"],
    *,
    taps: tuple[int, ...],
    page_size: int,
    max_model_len: int,
    attention: str = "sdpa",
) -> tuple[Pool, Float[Tensor, "B T D"], Float[Tensor, "B T F"]]:
    """The target over row t of request b at position starts[b] + t, live if t < num_rows[b]; hidden states after the final
    norm, and the features.

    Rows store their K/V in the request's pages and see its positions up to their own. Dead rows, and so requests of no
    rows, store nothing and are seen by nobody; what they return means nothing. Attention reads as many pages as the
    tables are wide: a caller that knows the longest live request narrows them.
    """
    B, T = ids_BT.shape
    rows = torch.arange(T, dtype=starts_B.dtype, device=starts_B.device)
    positions = starts_B[:, None] + rows
    each_table = block_tables_BW[:, None].expand(-1, T, -1).flatten(0, 1)
    slots = slot_mapping(positions.reshape(-1), each_table, page_size, max_model_len)
    slots = torch.where((rows < num_rows_B[:, None]).reshape(-1), slots, PAD_SLOT).long()
    seq_lens = torch.where(num_rows_B > 0, starts_B + num_rows_B, 0)
    keys = dense.find_keys(block_tables_BW, seq_lens, page_size, positions)

    def attend(pool, layer, q, k, v):
        pool = store_layer(pool, layer, k.flatten(0, 1), v.flatten(0, 1), slots)
        return pool, dense.attend_keys(pool, layer, q, keys, attention)

    return target_forward(weights, config, pool, embed(weights, ids_BT), positions, attend, taps)


def last_rows(
    num_rows_B: Int[Tensor, "B"], num_drafts_B: Int[Tensor, "B"], width: int, query_len: int
) -> Int[Tensor, "B Q"]:
    """Which of `width` rows a verify reads: the one before the drafts and each draft; behind them some row in range."""
    first = num_rows_B - 1 - num_drafts_B
    column = torch.arange(min(query_len, width), dtype=first.dtype, device=first.device)
    return (first[:, None] + column).clamp(0, width - 1)


def sampling_columns(fields: dict) -> SamplingColumns:
    """How each request is sampled, from the unpacked integers."""
    floats = {name: from_bits(fields[name]) for name in FLOATS}
    return SamplingColumns(**floats, top_k=fields["top_k"], seeds=fields["seeds"])


def compact_rows(features_BTF: Float[Tensor, "B T F"], num_rows_B: Int[Tensor, "B"], size: int) -> Float[Tensor, "R F"]:
    """The live rows, request by request without gaps, then zeros up to `size` rows."""
    B, T, F = features_BTF.shape
    ends = torch.cumsum(num_rows_B, 0, dtype=num_rows_B.dtype)
    row = torch.arange(size, dtype=num_rows_B.dtype, device=num_rows_B.device)
    owner = (ends <= row[:, None]).sum(1).clamp(max=B - 1)
    source = (owner * T + row - (ends - num_rows_B)[owner]).clamp(max=B * T - 1)
    return torch.where((row < ends[-1])[:, None], features_BTF.reshape(B * T, F)[source], 0)


def verify_step(
    config: TargetConfig,
    limits: TargetLimits,
    weights: TargetWeights,
    pool: Pool,
    ints: Int[Tensor, "B _"],
    draft_logits: Float[Tensor, "R K V"] | None = None,
    seen: Bool[Tensor, "B V"] | None = None,
    *,
    taps: tuple[int, ...],
    feature_rows: int,
    table_width: int,
    attention: str = "sdpa",
) -> tuple[Pool, Int[Tensor, "B Q"], Int[Tensor, "B"], Float[Tensor, "R F"]]:
    """A whole step over `TargetLimits.pack`: forward, logits of the rows that are verified, verification, features.
    Attention reads `table_width` pages of each request."""
    fields = limits.unpack(ints)
    ids, num_rows, num_drafts = fields["ids"], fields["num_rows"], fields["num_drafts"]
    pool, hidden, features = target_step(
        config, weights, pool, ids, fields["start"], num_rows, fields["block_tables"][:, :table_width], taps=taps,
        page_size=limits.page_size, max_model_len=limits.max_model_len, attention=attention,
    )  # fmt: skip
    # Before the LM head: a large vocabulary times every row of a prompt's chunk would not fit.
    index = last_rows(num_rows, num_drafts, ids.shape[1], limits.query_len).long()
    logits = compute_logits(weights, hidden.take_along_dim(index[..., None], dim=1))
    draft_tokens = ids.take_along_dim(index[:, 1:], dim=1)
    if draft_logits is not None:
        draft_logits = draft_logits[fields["request_index"].clip(0), : draft_tokens.shape[1]]
    tokens, num_sampled = verify(
        logits, draft_tokens, num_drafts, fields["start"] + num_rows - 1 - num_drafts, sampling_columns(fields), limits.mode,
        draft_logits, seen,
    )  # fmt: skip
    return pool, tokens, num_sampled, compact_rows(features, num_rows, feature_rows)


class TargetRunner:
    """The target's pool, and one eager step per batch on any device. Pages belong to the caller.

    Args:
        config: the target.
        weights: `pack_target(...)`; their dtype and device are the pool's and the features'.
        taps, num_speculative_tokens, max_num_seqs, max_model_len, num_pages, widths, page_size, max_num_batched_tokens,
            ladder, mode, draft_logits: as in `jax_dflash.target_runner.TargetRunner`. Nothing but the features is padded
            to a bucket.
        attention: "sdpa", PyTorch's fused kernel, or "dense", which rounds as the contract says (`attention/dense.py`).
    """

    def __init__(
        self,
        config: TargetConfig,
        weights: TargetWeights,
        *,
        taps: Sequence[int],
        num_speculative_tokens: int,
        max_num_seqs: int,
        max_model_len: int,
        num_pages: int,
        widths: Sequence[int],
        page_size: int = 16,
        max_num_batched_tokens: int | None = None,
        ladder: BucketLadder | None = None,
        mode: SamplingMode = GREEDY,
        draft_logits: bool = False,
        attention: str = "sdpa",
    ):
        if attention not in dense.KERNELS:
            raise InputError(f"attention {attention!r} is unknown; pass one of {', '.join(dense.KERNELS)}")
        self.config, self.weights = config, weights
        self.taps, self.attention = check_taps(taps, config.geometry.num_layers), attention
        self.limits = TargetLimits.make(
            config, num_speculative_tokens=num_speculative_tokens, max_num_seqs=max_num_seqs, widths=widths,
            max_model_len=max_model_len, num_pages=num_pages, page_size=page_size, ladder=ladder,
            max_num_batched_tokens=max_num_batched_tokens, mode=mode,
        )  # fmt: skip
        self.draft_logits = draft_logits
        self.device = weights.norm.device
        self.pool = zero_pool(pool_shape(config.geometry, num_pages, page_size), weights.norm.dtype, self.device)
        self.captured = False

    def capture(self, *, progress: bool = True) -> None:
        """Eager mode has nothing to capture."""
        self.captured = True

    @torch.inference_mode()
    def run(self, batch: TargetBatch, draft_logits: Float[Tensor, "R K V"] | None = None) -> TargetOutput:
        """One step; waits for its tokens, the features stay on the device. `draft_logits` are the drafter's, if drafts are
        sampled and the batch has some. Raises InputError before anything has changed."""
        if not self.captured:
            raise InputError("the target has no programs yet; call capture() first")
        columns = self.limits.check(batch)
        if self.draft_logits and draft_logits is None and columns.num_drafts.any():
            raise InputError("the batch has drafts that were sampled; pass the draft_logits that they came from")
        n, longest = len(columns.tokens), int(columns.num_rows.max())
        rows = self.limits.feature_rows(*self.limits.dispatch(n, longest))
        ints = torch.from_numpy(self.limits.pack(columns, n, longest)).to(self.device)
        seen = None if columns.seen is None else torch.from_numpy(columns.seen).to(self.device)
        logits = draft_logits if self.draft_logits and columns.num_drafts.any() else None
        self.pool, tokens, num_sampled, features = verify_step(
            self.config, self.limits, self.weights, self.pool, ints, logits, seen, taps=self.taps, feature_rows=rows,
            table_width=math.ceil(columns.longest / self.limits.page_size), attention=self.attention,
        )  # fmt: skip
        out = np.zeros((n, self.limits.query_len), np.int32)
        out[:, : tokens.shape[1]] = tokens.cpu().numpy()
        return TargetOutput(tokens=out, num_sampled=num_sampled.cpu().numpy(), features=features)
