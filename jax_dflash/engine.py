"""DraftEngine: requests in, draft tokens out. What a researcher imports.

config, drafter = load_drafter(path)
engine = DraftEngine(config, pack_drafter(drafter, config, embed_tokens, lm_head), max_num_seqs=8, max_model_len=2048)
engine.capture()
engine.add_request("a", num_prompt_tokens=100)
tokens = engine.propose(TargetStep(...), features)      # [n, K]
"""

import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Float, Int

from jax_dflash.attention.dense import padded_width
from jax_dflash.batch import EngineConfig, TargetStep, check_scheduled_ks
from jax_dflash.buckets import BatchDescriptor, BucketLadder, GraphMode
from jax_dflash.config import DraftConfig, InputError
from jax_dflash.draft_step import DraftState, zero_state
from jax_dflash.drafter import DraftWeights
from jax_dflash.programs import Programs, forbid_compiles
from jax_dflash.request_table import RequestTable
from jax_dflash.sampling_params import SamplingParams


class DraftEngine:
    """The draft pool, its pages, and the captured programs behind one call per target step.

    Args:
        config: the drafter.
        weights: `pack_drafter(...)`; their dtype is the engine's.
        max_num_seqs: requests in one step at most.
        max_model_len: positions of a request at most; programs are captured for it, cost follows the live length.
        num_speculative_tokens: drafts K per request; default the drafter's block_size - 1.
        allow_long_block: let K exceed that; the drafter never saw such blocks.
        max_num_batched_tokens: rows of a target step at most; default fits a verify of all requests and 512.
        page_size, num_pages: the pool, for each page group or, one number, for all; by default every request can grow to
            max_model_len. A group of layers with a window holds the pages that the window reaches.
        ladder: request buckets; default `BucketLadder.without_holes`.
        strict: raise where no bucket fits instead of compiling an eager program.
        external_pages: the caller passes block tables in each step (page 0 is the null page), as vLLM does.
        draft_sample_method: greedy, or probabilistic: drafts are sampled at each request's temperature, and `draft_logits`
            keeps what they were sampled from.
        scheduled_ks: fewer drafts than K that a step may ask for; each has programs of its own. 0 always may be asked for.
        context_in_program: False stores context K/V by programs of its own, before the step.
        taps: programs also return the values of `taps.tap_table` up to this level, kept in `last_taps`; 0 for none.
        compiler_options: XLA options over those of `numerics.COMPILER_OPTIONS`.
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
        strict: bool = False,
        external_pages: bool = False,
        allow_long_block: bool = False,
        draft_sample_method: str = "greedy",
        scheduled_ks: Sequence[int] = (),
        context_in_program: bool = True,
        taps: int = 0,
        compiler_options: dict[str, Any] | None = None,
    ):
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
            table_width=padded_width(-(-max_model_len // page_size), page_size),
        )
        K = self.config.num_speculative_tokens
        self.ladder = ladder or BucketLadder.without_holes(max_num_seqs=max_num_seqs, query_len=self.config.query_len)
        self.requests = RequestTable(self.config, external_pages=external_pages)
        self.scheduled: dict[int, Programs] = {}
        for k in check_scheduled_ks(scheduled_ks, K):
            self.scheduled[k] = Programs(
                self.config if k == K else self.config.scheduled(k),
                self.ladder if k == K else self.ladder.with_query_len(k + 1),
                weights,
                context_in_program=context_in_program,
                taps=taps,
                compiler_options=compiler_options,
            )
        self._context_rows = set(self.config.row_buckets)
        if 0 in scheduled_ks:  # a verify's rows, stored without drafting
            verifies = self.ladder.capture_order(GraphMode.FULL)
            self._context_rows |= {self.programs.context_rows(descriptor.padded_reqs) for descriptor in verifies}
        self.waited = 0.0  # seconds, for results of the device
        self.strict = strict
        self._state: DraftState | None = zero_state(self.config, self.programs.dtype)
        self.captured = False
        self.eager_compiles = 0
        self.last_taps: dict[str, jax.Array] = {}

    @property
    def programs(self) -> Programs:
        """Those of K drafts."""
        return self.scheduled[self.config.num_speculative_tokens]

    @property
    def state(self) -> DraftState:
        """The pools. Raises RuntimeError once a failed step has consumed them."""
        if self._state is None:
            raise RuntimeError("the engine lost its pool in a step that failed; make a new DraftEngine")
        return self._state

    @state.setter
    def state(self, state: DraftState) -> None:
        self._state = state

    def set_weights(self, weights: DraftWeights) -> None:
        """Draft with other weights of the same shapes, through the programs that are there. Raises InputError."""

        def kind(tree):
            return jax.tree.map(lambda x: (x.shape, x.dtype), tree)

        if kind(weights) != kind(self.programs.weights):
            raise InputError("these weights have other shapes or dtypes; make a new DraftEngine for them")
        for programs in self.scheduled.values():
            programs.set_weights(weights)

    def capture(self, *, progress: bool = True) -> None:
        """Compile and warm up every bucket, largest first. The pools keep their bits."""
        for programs in self.scheduled.values():
            rows = self._context_rows if programs is self.programs else ()
            self.state = self._donate(
                lambda state, programs=programs, rows=rows: programs.capture(state, rows, progress=progress)
            )
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
    def draft_logits(self) -> jax.Array | None:
        """`[R, K, V]`, what the last drafts of each request were sampled from; None where drafts are greedy."""
        return self.state.draft_logits

    def remove_request(self, request_id) -> None:
        """Forget a request and free its pages."""
        self.requests.remove(request_id)

    def propose(
        self,
        step: TargetStep,
        features: Float[np.ndarray | jax.Array, "M F"],
        num_speculative_tokens: int | None = None,
    ) -> Int[np.ndarray, "n K"]:
        """K draft tokens for each request of the step, in its order; waits for them. Fewer where `num_speculative_tokens`,
        one of `scheduled_ks`, says so; with 0 the step's context is stored and nothing drafted.

        `features` are the target's hidden states at the drafter's taps for all rows of the step, request by request:
        numpy of exactly the step's rows, or a device array that the target padded to a row bucket. Raises InputError,
        before anything has changed, for a step that cannot run.
        """
        tokens = self.propose_padded(step, features, num_speculative_tokens)
        start = time.perf_counter()
        try:
            return np.asarray(tokens)[: len(step.request_ids)]
        except Exception:
            self._state = None  # the step failed while it ran, after its state had been consumed
            raise
        finally:
            self.waited += time.perf_counter() - start

    def propose_padded(
        self,
        step: TargetStep,
        features: Float[np.ndarray | jax.Array, "M F"],
        num_speculative_tokens: int | None = None,
    ) -> Int[np.ndarray | jax.Array, "N K"]:
        """As `propose` without waiting: the bucket's device array, whose rows past the step's requests mean nothing."""
        if not self.captured:
            raise InputError("the engine has no programs yet; call capture() first")
        K = self.config.num_speculative_tokens if num_speculative_tokens is None else num_speculative_tokens
        if K and K not in self.scheduled:
            raise InputError(f"num_speculative_tokens={K}; this engine has programs for 0 and {sorted(self.scheduled)}")
        num_rows, n = int(np.sum(step.num_context)), len(step.request_ids)
        self._check_count(n)
        if K == 0:
            shape = np.shape(features)
            rows = self._stage(features, num_rows, shape[0] if shape and shape[0] in self._context_rows else 0)
            columns = self.requests.reserve(step)
            with forbid_compiles("propose()"):
                self.last_taps = self._store_context(columns, num_rows, rows)
            return np.zeros((n, 0), np.int32)
        programs = self.scheduled[K]
        descriptor = self._dispatch(programs, n)
        own_rows = programs.context_rows(descriptor.padded_reqs)
        features = self._stage(features, num_rows, own_rows)
        columns = self.requests.reserve(step)
        layout = self.config.layout(descriptor.padded_reqs)
        with forbid_compiles("propose()"):
            taps = {}
            if features.shape[0] != own_rows:
                taps = self._store_context(columns, num_rows, features)
                num_rows, features = 0, programs.blank_features(own_rows)
            ints = layout.pack(columns, num_rows)
            self.state, tokens, step_taps = self._donate(
                lambda state: programs.run_step(descriptor, state, features, ints)
            )
        self.last_taps = step_taps | taps
        return tokens

    def _store_context(self, columns: dict[str, np.ndarray], num_rows: int, features) -> dict[str, jax.Array]:
        """Store all context rows of a step by the program of their row bucket; its taps."""
        ints = self.config.layout(self.config.max_num_seqs).pack(columns, num_rows)
        self.state, taps = self._donate(
            lambda state: self.programs.run_context(features.shape[0], state, features, ints)
        )
        return taps

    def _check_count(self, num_reqs: int) -> None:
        if num_reqs > self.config.max_num_seqs:
            raise InputError(
                f"{num_reqs} requests exceed max_num_seqs={self.config.max_num_seqs}; pass a larger max_num_seqs"
            )

    def _dispatch(self, programs: Programs, num_reqs: int) -> BatchDescriptor:
        Q = programs.config.query_len
        descriptor = programs.ladder.dispatch(num_reqs, num_reqs * Q, Q)
        if descriptor.mode is GraphMode.NONE and num_reqs not in programs.eager and num_reqs:
            if self.strict:
                raise InputError(f"no bucket covers {num_reqs} requests; pass another ladder or strict=False")
            programs.compile_eager(num_reqs)
            self.eager_compiles += 1
        return descriptor

    def _stage(self, features, num_rows: int, own_rows: int):
        """Features at a row count that some program takes: a device array as it is, numpy padded."""
        on_device = isinstance(features, jax.Array)
        features = features if on_device else np.asarray(features)
        rows = self.config.padded_rows(features.shape, num_rows, own_rows, on_device=on_device)
        dtype = self.programs.dtype
        if on_device:
            if features.dtype != dtype:
                raise InputError(f"features are {features.dtype}, expected {dtype}, the dtype of the drafter's weights")
            return features
        padded = np.zeros((rows, features.shape[1]), dtype)
        padded[:num_rows] = features
        return padded

    def _donate(self, call):
        """Run a call that consumes the state. If it fails the pool is gone, and the engine says so from then on."""
        state, self._state = self.state, None
        return call(state)
