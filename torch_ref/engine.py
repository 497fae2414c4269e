"""DraftEngine: requests in, draft tokens out; the call surface of `jax_dflash.engine.DraftEngine`."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from jax_dflash.batch import EngineConfig, TargetStep, check_scheduled_ks
from jax_dflash.buckets import BatchDescriptor, BucketLadder, GraphMode
from jax_dflash.config import DraftConfig, InputError
from jax_dflash.request_table import RequestTable
from jax_dflash.sampling_params import SamplingParams
from jax_dflash.taps import Taps
from torch_ref.attention.dense import KERNELS
from torch_ref.cuda_graphs import CudaGraphs
from torch_ref.draft_step import DraftState, context_step, draft_step, step_inputs, zero_state
from torch_ref.drafter import DraftWeights
from torch_ref.numerics import to_device


class Scheduled(NamedTuple):
    """The steps of one number of drafts."""

    config: EngineConfig
    ladder: BucketLadder
    graphs: CudaGraphs | None


class DraftEngine:
    """The draft pool, its pages, and one call per target step, eager or by replayed CUDA graphs.

    Args:
        config: the drafter.
        weights: `pack_drafter(...)`; their dtype and device are the engine's.
        max_num_seqs, max_model_len, num_speculative_tokens, max_num_batched_tokens, page_size, num_pages, ladder,
            external_pages, allow_long_block, draft_sample_method, scheduled_ks: as in `jax_dflash.engine.DraftEngine`.
        mode: "eager", or "cuda_graph" for one captured graph per bucket.
        attention: "sdpa", PyTorch's fused kernel, or "dense", which rounds as the contract says (`attention/dense.py`).
        taps: keep the values of `jax_dflash.taps.tap_table` up to this level in `last_taps`; eager only, 0 for none.
    """

    def __init__(
        self,
        config: DraftConfig,
        weights: DraftWeights,
        *,
        max_num_seqs: int,
        max_model_len: int,
        num_speculative_tokens: int | None = None,
        max_num_batched_tokens: int | None = None,
        page_size: int = 16,
        num_pages: int | Sequence[int] | None = None,
        ladder: BucketLadder | None = None,
        external_pages: bool = False,
        allow_long_block: bool = False,
        draft_sample_method: str = "greedy",
        scheduled_ks: Sequence[int] = (),
        mode: str = "eager",
        attention: str = "sdpa",
        taps: int = 0,
    ):
        self.weights = weights
        self.device, self.dtype = weights.fc.device, weights.fc.dtype
        if mode not in ("eager", "cuda_graph"):
            raise InputError(f"mode {mode!r} is unknown; pass 'eager' or 'cuda_graph'")
        if mode == "cuda_graph" and self.device.type != "cuda":
            raise InputError(
                f"mode 'cuda_graph' needs weights on an NVIDIA GPU, they are on {self.device}; pass mode='eager'"
            )
        if attention not in KERNELS:
            raise InputError(f"attention {attention!r} is unknown; pass one of {', '.join(KERNELS)}")
        if taps and mode == "cuda_graph":
            raise InputError("taps are of eager steps only; pass mode='eager'")
        self.config = EngineConfig.make(
            config,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            num_speculative_tokens=num_speculative_tokens,
            allow_long_block=allow_long_block,
            draft_sample_method=draft_sample_method,
            max_num_batched_tokens=max_num_batched_tokens,
            page_size=page_size,
            num_pages=num_pages,
        )
        K = self.config.num_speculative_tokens
        self.ladder = ladder or BucketLadder.without_holes(max_num_seqs=max_num_seqs, query_len=self.config.query_len)
        self.requests = RequestTable(self.config, external_pages=external_pages)
        self.state: DraftState = zero_state(self.config, self.dtype, self.device)
        self.scheduled: dict[int, Scheduled] = {}
        for k in check_scheduled_ks(scheduled_ks, K):
            own = self.config if k == K else self.config.scheduled(k)
            steps = self.ladder if k == K else self.ladder.with_query_len(k + 1)
            graphs = CudaGraphs(own, steps, weights, self.state, attention) if mode == "cuda_graph" else None
            self.scheduled[k] = Scheduled(own, steps, graphs)
        self.graphs = self.scheduled[K].graphs
        self.taps, self.attention = taps, attention
        self.captured = self._lost = False
        self.last_taps: dict[str, Tensor] = {}

    def set_weights(self, weights: DraftWeights) -> None:
        """Draft with other weights. Raises InputError where graphs hold the ones they were captured with."""
        if self.graphs is not None:
            raise InputError("CUDA graphs hold their weights; make a new DraftEngine, or pass mode='eager'")
        self.weights = weights

    @torch.inference_mode()
    def capture(self, *, progress: bool = True) -> None:
        """Capture every bucket's graph, largest first; eager mode has nothing to capture."""
        for _, _, graphs in self.scheduled.values():
            if graphs is not None:
                graphs.capture(progress=progress)
        self.captured = True

    def add_request(
        self, request_id, num_prompt_tokens: int = 0, cached_tokens: int = 0, params: SamplingParams | None = None
    ) -> None:
        """Admit a request. The first `cached_tokens` of its prompt were restored by the target's prefix cache and never run:
        its context begins behind them, and no row sees them. Temperature and seed of `params` are its drafts', where drafts
        are sampled. Raises InputError past max_num_seqs or max_model_len."""
        self.requests.add(request_id, num_prompt_tokens, cached_tokens, params)

    def request_index(self, request_id) -> int:
        """The request's row in `draft_logits`."""
        return self.requests.requests[request_id].index

    @property
    def draft_logits(self) -> Tensor | None:
        """`[R, K, V]`, what the last drafts of each request were sampled from; None where drafts are greedy."""
        return None if self.state.draft_logits is None else self.state.draft_logits[:-1]

    def remove_request(self, request_id) -> None:
        """Forget a request and free its pages."""
        self.requests.remove(request_id)

    def propose(
        self, step: TargetStep, features: Float[np.ndarray | Tensor, "M F"], num_speculative_tokens: int | None = None
    ) -> Int[np.ndarray, "n K"]:
        """K draft tokens for each request of the step, in its order; waits for them. Fewer where `num_speculative_tokens`,
        one of `scheduled_ks`, says so; with 0 the step's context is stored and nothing drafted. `features` as in JAX: numpy
        of exactly the step's rows, or a tensor padded to a row bucket. Raises InputError before anything has changed."""
        return self.propose_padded(step, features, num_speculative_tokens)[: len(step.request_ids)].cpu().numpy()

    @torch.inference_mode()
    def propose_padded(
        self, step: TargetStep, features: Float[np.ndarray | Tensor, "M F"], num_speculative_tokens: int | None = None
    ) -> Int[Tensor, "N K"]:
        """As `propose` without waiting: the bucket's device tensor, whose rows past the step's requests mean nothing.
        A replayed graph's tokens are static memory, which its next replay overwrites."""
        if not self.captured:
            raise InputError("the engine has no programs yet; call capture() first")
        K = self.config.num_speculative_tokens if num_speculative_tokens is None else num_speculative_tokens
        if K and K not in self.scheduled:
            raise InputError(f"num_speculative_tokens={K}; this engine has programs for 0 and {sorted(self.scheduled)}")
        scheduled = self.scheduled.get(K, self.scheduled[self.config.num_speculative_tokens])
        n, Q = len(step.request_ids), scheduled.config.query_len
        if n > self.config.max_num_seqs:
            raise InputError(f"{n} requests exceed max_num_seqs={self.config.max_num_seqs}; pass a larger max_num_seqs")
        descriptor = scheduled.ladder.dispatch(n, n * Q, Q)
        num_rows, own_rows = int(np.sum(step.num_context)), self.config.context_rows(descriptor.padded_reqs)
        on_device = isinstance(features, Tensor)
        features = features if on_device else np.asarray(features)
        self.config.padded_rows(features.shape, num_rows, own_rows, on_device=on_device)
        if on_device and features.dtype != self.dtype:
            raise InputError(
                f"features are {features.dtype}, expected {self.dtype}, the dtype of the drafter's weights"
            )
        features = to_device(features, self.dtype, self.device)[:num_rows]
        if self._lost:
            raise RuntimeError("the engine lost its pool in a step that failed; make a new DraftEngine")
        columns = self.requests.reserve(step)
        self._lost = True  # until the whole step has been issued: half of one leaves context that nobody stored
        if K == 0:
            tokens = self._store_context(descriptor, columns, features)
        elif scheduled.graphs is None or descriptor.mode is GraphMode.NONE:
            tokens = self._eager(scheduled.config, descriptor, columns, features)
        else:
            tokens = self._replay(scheduled.graphs, descriptor, columns, features, own_rows)
        self._lost = False
        return tokens

    def _pack(self, descriptor: BatchDescriptor, columns: dict[str, np.ndarray], num_rows: int) -> Int[Tensor, "_"]:
        """The bucket's integers, still on the host."""
        return torch.from_numpy(self.config.layout(descriptor.padded_reqs).pack(columns, num_rows))

    def _store_context(
        self, descriptor: BatchDescriptor, columns: dict[str, np.ndarray], features: Tensor
    ) -> Int[Tensor, "N 0"]:
        """All context rows of a step that drafts nothing."""
        tap = Taps(self.taps)
        ints = self._pack(descriptor, columns, features.shape[0]).to(self.device)
        inputs, _ = step_inputs(self.config, ints, descriptor.padded_reqs, features.shape[0])
        context_step(self.config, self.weights, self.state.pools, features, inputs, tap)
        self.last_taps = tap.values
        return torch.zeros(descriptor.padded_reqs, 0, dtype=torch.int32)

    def _eager(
        self, config: EngineConfig, descriptor: BatchDescriptor, columns: dict[str, np.ndarray], features: Tensor
    ) -> Int[Tensor, "N K"]:
        """The bucket's step without a graph: all context rows at once, and pages of keys that some
        live request sees."""
        tap = Taps(self.taps)
        end = columns["start_position"] + columns["num_context"] - columns["num_rejected"]
        first_keys = config.first_keys(columns["first_context_position"], end)
        self.state, tokens = draft_step(
            config,
            self.weights,
            self.state,
            features,
            self._pack(descriptor, columns, features.shape[0]).to(self.device),
            num_reqs=descriptor.padded_reqs,
            table_width=self.requests.num_pages_for(int(config.stop_keys(end).max())),
            first_keys=tuple(int(keys.min()) for keys in first_keys),
            attention=self.attention,
            tap=tap,
        )
        self.last_taps = tap.values
        return tokens

    def _replay(
        self,
        graphs: CudaGraphs,
        descriptor: BatchDescriptor,
        columns: dict[str, np.ndarray],
        features: Tensor,
        own_rows: int,
    ) -> Int[Tensor, "N K"]:
        """vLLM's rule: rows past the graph's own are stored eagerly first, then the graph stores rows [0, own_rows)."""
        if (num_rows := features.shape[0]) > own_rows:
            ints = self._pack(descriptor, columns, num_rows).to(self.device)
            inputs, _ = step_inputs(self.config, ints, descriptor.padded_reqs, num_rows)
            surplus = inputs._replace(
                context_positions=inputs.context_positions[own_rows:], context_slots=inputs.context_slots[:, own_rows:]
            )
            context_step(self.config, self.weights, self.state.pools, features[own_rows:], surplus)
            features = features[:own_rows]
        return graphs.replay(descriptor, features, self._pack(descriptor, columns, features.shape[0]))
