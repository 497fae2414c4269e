"""DraftEngine: requests in, draft tokens out. What a researcher imports.

config, drafter = load_drafter(path)
engine = DraftEngine(config, pack_drafter(drafter, config, embed_tokens, lm_head), max_num_seqs=8, max_model_len=2048)
engine.capture()
engine.add_request("a", num_prompt_tokens=100)
tokens = engine.propose(TargetStep(...), features)      # [n, K]
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Float, Int

from jax_dflash.attention.dense import padded_width
from jax_dflash.batch import EngineConfig, RequestTable, TargetStep
from jax_dflash.buckets import BatchDescriptor, BucketLadder, GraphMode
from jax_dflash.config import DraftConfig, InputError
from jax_dflash.draft_step import DraftState, zero_state
from jax_dflash.drafter import DraftWeights
from jax_dflash.programs import Programs, forbid_compiles


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
            max_num_batched_tokens=max_num_batched_tokens,
            page_size=page_size,
            num_pages=num_pages,
            table_width=padded_width(-(-max_model_len // page_size), page_size),
        )
        self.ladder = ladder or BucketLadder.without_holes(max_num_seqs=max_num_seqs, query_len=self.config.query_len)
        self.requests = RequestTable(self.config, external_pages=external_pages)
        self.programs = Programs(
            self.config,
            self.ladder,
            weights,
            context_in_program=context_in_program,
            taps=taps,
            compiler_options=compiler_options,
        )
        self.strict = strict
        self._state: DraftState | None = zero_state(self.config, self.programs.dtype)
        self.captured = False
        self.eager_compiles = 0
        self.last_taps: dict[str, jax.Array] = {}

    @property
    def state(self) -> DraftState:
        """The pools. Raises RuntimeError once a failed step has consumed them."""
        if self._state is None:
            raise RuntimeError("the engine lost its pool in a step that failed; make a new DraftEngine")
        return self._state

    @state.setter
    def state(self, state: DraftState) -> None:
        self._state = state

    def capture(self, *, progress: bool = True) -> None:
        """Compile and warm up every bucket, largest first. The pools keep their bits."""
        self.state = self._donate(lambda state: self.programs.capture(state, progress=progress))
        self.captured = True

    def add_request(self, request_id, num_prompt_tokens: int = 0, cached_tokens: int = 0) -> None:
        """Admit a request. The first `cached_tokens` of its prompt were restored by the target's prefix cache and never run:
        its context begins behind them, and no row sees them. Raises InputError past max_num_seqs or max_model_len."""
        self.requests.add(request_id, num_prompt_tokens, cached_tokens)

    def remove_request(self, request_id) -> None:
        """Forget a request and free its pages."""
        self.requests.remove(request_id)

    def propose(self, step: TargetStep, features: Float[np.ndarray | jax.Array, "M F"]) -> Int[np.ndarray, "n K"]:
        """K draft tokens for each request of the step, in its order; waits for them.

        `features` are the target's hidden states at the drafter's taps for all rows of the step, request by request:
        numpy of exactly the step's rows, or a device array that the target padded to a row bucket. Raises InputError,
        before anything has changed, for a step that cannot run.
        """
        tokens = self.propose_padded(step, features)
        try:
            return np.asarray(tokens)[: len(step.request_ids)]
        except Exception:
            self._state = None  # the step failed while it ran, after its state had been consumed
            raise

    def propose_padded(self, step: TargetStep, features: Float[np.ndarray | jax.Array, "M F"]) -> Int[jax.Array, "N K"]:
        """As `propose` without waiting: the bucket's device array, whose rows past the step's requests mean nothing."""
        if not self.captured:
            raise InputError("the engine has no programs yet; call capture() first")
        descriptor = self._dispatch(len(step.request_ids))
        own_rows = self.programs.context_rows(descriptor.padded_reqs)
        num_rows = int(np.sum(step.num_context))
        features = self._stage(features, num_rows, own_rows)
        columns = self.requests.reserve(step)
        layout = self.config.layout(descriptor.padded_reqs)
        with forbid_compiles("propose()"):
            taps = {}
            if features.shape[0] != own_rows:
                taps = self._store_context(columns, num_rows, features)
                num_rows, features = 0, self.programs.blank_features(own_rows)
            ints = layout.pack(columns, num_rows)
            self.state, tokens, step_taps = self._donate(
                lambda state: self.programs.run_step(descriptor, state, features, ints)
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

    def _dispatch(self, num_reqs: int) -> BatchDescriptor:
        Q = self.config.query_len
        if num_reqs > self.config.max_num_seqs:
            raise InputError(
                f"{num_reqs} requests exceed max_num_seqs={self.config.max_num_seqs}; pass a larger max_num_seqs"
            )
        descriptor = self.ladder.dispatch(num_reqs, num_reqs * Q, Q)
        if descriptor.mode is GraphMode.NONE and num_reqs not in self.programs.eager and num_reqs:
            if self.strict:
                raise InputError(f"no bucket covers {num_reqs} requests; pass another ladder or strict=False")
            self.programs.compile_eager(num_reqs)
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
