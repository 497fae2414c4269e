"""Decoding rounds without the host: draft, verify, accept, pages and stop conditions in one compiled loop per bucket.

N requests of the bucket, K drafts, Q = K + 1 rows of each, R rounds at most, W pages of a table, V vocabulary.
"""

import time
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.stages import Compiled
from jaxtyping import Array, Bool, Float, Int

from jax_dflash import sampling, target
from jax_dflash.buckets import GraphMode
from jax_dflash.decoding import Generation, RoundsOf
from jax_dflash.draft_step import DraftState, context_and_query, inputs_of
from jax_dflash.drafter import DraftWeights
from jax_dflash.engine import DraftEngine
from jax_dflash.kv_cache import Pool
from jax_dflash.numerics import COMPILER_OPTIONS, to_bits
from jax_dflash.pages import NULL_PAGE
from jax_dflash.programs import forbid_compiles, progress_bar
from jax_dflash.sampling_params import FLOAT, SamplingColumns
from jax_dflash.target import TargetWeights
from jax_dflash.target_runner import TargetRunner, target_step


class Requests(NamedTuple):
    """What the loop knows of each request, and changes. A request that is not `active` runs along and changes nothing."""

    active: Bool[Array, "N"]
    last_token: Int[Array, "N"]  # the token at position `computed`
    computed: Int[Array, "N"]  # tokens that have been through the target
    drafts: Int[Array, "N K"]
    num_drafts: Int[Array, "N"]  # 0 before the first draft
    budget: Int[Array, "N"]  # tokens that it may still emit
    seen: Bool[Array, "N V"] | None  # tokens of prompt and output, where they are penalised


class Rounds(NamedTuple):
    """What came of the rounds: `num_emitted[n, r]` tokens of each, end to end in `tokens`."""

    tokens: Int[Array, "N R*Q"]
    num_emitted: Int[Array, "N R"]
    num_verified: Int[Array, "N R"]  # drafts that were verified in that round
    total: Int[Array, "N"]


class LoopState(NamedTuple):
    target_pool: Pool
    draft: DraftState
    requests: Requests
    rounds: Rounds
    round: Int[Array, ""]


class Fixed(NamedTuple):
    """Data of a call that no round changes."""

    max_rounds: Int[Array, ""]
    stop_at_finish: Bool[Array, ""]  # hand control back as soon as a request ends, since another one waits
    live: Bool[Array, "N"]  # False for the bucket's padding
    stops_at_eos: Bool[Array, "N"]
    request_index: Int[Array, "N"]  # rows of per-request draft state
    first_context_position: Int[Array, "N"]
    num_pages: Int[Array, "N"]
    block_tables: Int[Array, "N W"]


class Verified(NamedTuple):
    """What the target made of a round's rows."""

    target_pool: Pool
    tokens: Int[Array, "N Q"]
    num_sampled: Int[Array, "N"]
    num_drafts: Int[Array, "N"]
    features: Float[Array, "N*Q F"]

    @property
    def last(self) -> Int[Array, "N"]:
        """The last token that each request emitted."""
        return jnp.take_along_axis(self.tokens, self.num_sampled[:, None] - 1, axis=1)[:, 0]


Weights = tuple[DraftWeights, TargetWeights]


class DeviceLoop:
    """One compiled loop per bucket over the pools of a draft engine and a target runner, which it takes and gives back.

    Args:
        engine, runner: captured before a call; both index their pools with the same pages.
        eos_token_ids: tokens that end a request, unless it ignores them.
        max_rounds: R; a call runs at most so many.
    """

    def __init__(
        self, engine: DraftEngine, runner: TargetRunner, *, eos_token_ids: tuple[int, ...] = (), max_rounds: int = 128
    ):
        self.engine, self.runner = engine, runner
        self.config, self.mode = engine.config, runner.limits.mode
        self.eos_token_ids, self.max_rounds = eos_token_ids, max_rounds
        self.programs: dict[int, Compiled] = {}
        self.waited = 0.0  # seconds, for results of the device

    @property
    def weights(self) -> Weights:
        """The drafter's and the target's."""
        return self.engine.programs.weights, self.runner.weights

    def fits(self, computed: Int[Array, "N"], num_pages: Int[Array, "N"]) -> Bool[Array, "N"]:
        """Whether a request's pages cover the rows of a round and the block that is drafted after it."""
        last = jnp.minimum(computed + 2 * self.config.query_len, self.config.max_model_len)
        return num_pages * self.config.page_size >= last

    def rounds(self, weights: Weights, state: LoopState, columns: SamplingColumns, fixed: Fixed) -> LoopState:
        """Rounds until one of the stop conditions holds."""

        def going_on(state: LoopState) -> Bool[Array, ""]:
            active = state.requests.active
            ended = fixed.stop_at_finish & jnp.any(fixed.live & ~active)
            paged = jnp.all(self.fits(state.requests.computed, fixed.num_pages) | ~active)
            return (state.round < fixed.max_rounds) & jnp.any(active) & paged & ~ended

        return lax.while_loop(going_on, lambda state: self.round(weights, state, columns, fixed), state)

    def round(self, weights: Weights, state: LoopState, columns: SamplingColumns, fixed: Fixed) -> LoopState:
        """Verify the drafts of every active request, take what was accepted, and draft again."""
        verified = self.verify(weights, state, columns, fixed)
        requests, rounds = self.accept(state, verified, fixed)
        draft, drafts = self.draft(weights, state, verified, columns, fixed)
        active = state.requests.active
        requests = requests._replace(
            drafts=jnp.where(active[:, None], drafts, requests.drafts),
            num_drafts=jnp.where(active, self.config.num_speculative_tokens, requests.num_drafts),
        )
        return LoopState(verified.target_pool, draft, requests, rounds, state.round + 1)

    def placed(self, requests: Requests, fixed: Fixed) -> tuple[Int[Array, "N W"], Int[Array, "N"]]:
        """Block tables and start positions of a round. A request that has ended runs along in the null page at position 0:
        it stores nothing and reads a block."""
        tables = jnp.where(requests.active[:, None], fixed.block_tables, NULL_PAGE)
        return tables, jnp.where(requests.active, requests.computed, 0)

    @jax.named_scope("verify")
    def verify(self, weights: Weights, state: LoopState, columns: SamplingColumns, fixed: Fixed) -> Verified:
        """The target over the last token and the drafts of each request."""
        config, requests, Q = self.config, state.requests, self.config.query_len
        tables, start = self.placed(requests, fixed)
        num_rows = jnp.where(requests.active, jnp.minimum(config.max_model_len - start, Q), 0)
        num_drafts = jnp.clip(num_rows - 1, 0, requests.num_drafts)
        ids = jnp.concatenate([requests.last_token[:, None], jnp.maximum(requests.drafts, 0)], axis=1)
        pool, hidden, features = target_step(
            self.runner.config, weights[1], state.target_pool, ids, start, num_rows, tables,
            taps=config.draft.hidden_state_indices, page_size=config.page_size, max_model_len=config.max_model_len,
        )  # fmt: skip
        draft_logits = state.draft.draft_logits
        if draft_logits is not None:
            draft_logits = draft_logits[jnp.maximum(fixed.request_index, 0)]
        tokens, num_sampled = sampling.verify(
            target.compute_logits(weights[1], hidden), requests.drafts, num_drafts, start, columns, self.mode,
            draft_logits, requests.seen,
        )  # fmt: skip
        return Verified(pool, tokens, num_sampled, num_drafts, features.reshape(-1, features.shape[-1]))

    @jax.named_scope("accept")
    def accept(self, state: LoopState, verified: Verified, fixed: Fixed) -> tuple[Requests, Rounds]:
        """Note what each active request emitted, and whether that was its end; the caller cuts what lies behind it."""
        requests, rounds, tokens = state.requests, state.rounds, verified.tokens
        active, seen = requests.active, requests.seen
        (N, Q), size = tokens.shape, rounds.tokens.shape[1]
        at, each = jnp.arange(Q, dtype=jnp.int32), jnp.arange(N, dtype=jnp.int32)[:, None]
        count = jnp.where(active, verified.num_sampled, 0)
        new = at < count[:, None]
        is_eos = jnp.zeros_like(new)
        for token in self.eos_token_ids:
            is_eos |= tokens == token
        is_eos &= new & (at < requests.budget[:, None]) & fixed.stops_at_eos[:, None]
        rounds = Rounds(  # tokens that are none go past the end, where a scatter drops them
            tokens=rounds.tokens.at[each, jnp.where(new, rounds.total[:, None] + at, size)].set(tokens, mode="drop"),
            num_emitted=rounds.num_emitted.at[:, state.round].set(count),
            num_verified=rounds.num_verified.at[:, state.round].set(jnp.where(active, verified.num_drafts, 0)),
            total=rounds.total + count,
        )
        if seen is not None:
            seen = sampling.mark_seen(seen, tokens, count)
        budget = requests.budget - count
        return requests._replace(
            active=active & (budget > 0) & ~jnp.any(is_eos, axis=1),
            last_token=jnp.where(active, verified.last, requests.last_token),
            computed=requests.computed + count,
            budget=budget,
            seen=seen,
        ), rounds

    @jax.named_scope("draft")
    def draft(
        self, weights: Weights, state: LoopState, verified: Verified, columns: SamplingColumns, fixed: Fixed
    ) -> tuple[DraftState, Int[Array, "N K"]]:
        """The draft step after a verify."""
        tables, start = self.placed(state.requests, fixed)
        active, (N, Q) = state.requests.active, verified.tokens.shape
        fields = {
            "num_rows": jnp.int32(N * Q),
            "start_position": start,
            "num_context": jnp.full(N, Q, jnp.int32),
            "num_rejected": jnp.where(active, Q - verified.num_sampled, 0),
            "num_sampled": verified.num_sampled,
            "last_sampled": verified.last,
            "next_prefill": jnp.zeros(N, jnp.int32),
            "first_context_position": jnp.where(active, fixed.first_context_position, 0),
            "request_index": fixed.request_index,
            "temperature_bits": to_bits(columns.temperature),
            "seed": columns.seeds,
            "block_tables": jnp.broadcast_to(tables, (len(self.config.num_pages), *tables.shape)),
        }
        inputs = inputs_of(self.config, fields, N * Q)
        return context_and_query(self.config, weights[0], state.draft, verified.features, inputs, fields)

    def capture(self, *, progress: bool = True) -> None:
        """Compile every bucket, largest first, and run each once with no live request; the pools keep their bits."""
        with progress_bar(progress) as bar:
            descriptors = self.engine.ladder.capture_order(GraphMode.FULL)
            task = bar.add_task("Capturing decoding loops", total=len(descriptors), last="")
            for N in (descriptor.padded_reqs for descriptor in descriptors):
                start = time.perf_counter()
                arguments = self._state(self._requests(N), N), self._columns(N), self._fixed(N)
                shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (self.weights, *arguments))
                self.programs[N] = jax.jit(self.rounds, donate_argnums=1).lower(*shapes).compile(COMPILER_OPTIONS)
                self._call(N, *arguments)
                bar.update(task, advance=1, last=f"{N} requests: {time.perf_counter() - start:.1f} s")

    def _requests(self, N: int) -> Requests:
        K, V = self.config.num_speculative_tokens, self.runner.limits.vocab_size
        return Requests(
            active=np.zeros(N, bool),
            last_token=np.zeros(N, np.int32),
            computed=np.zeros(N, np.int32),
            drafts=np.zeros((N, K), np.int32),
            num_drafts=np.zeros(N, np.int32),
            budget=np.zeros(N, np.int32),
            seen=np.zeros((N, V), bool) if self.mode.penalised else None,
        )

    def _state(self, requests: Requests, N: int) -> LoopState:
        R, Q = self.max_rounds, self.config.query_len
        rounds = Rounds(
            tokens=np.zeros((N, R * Q), np.int32),
            num_emitted=np.zeros((N, R), np.int32),
            num_verified=np.zeros((N, R), np.int32),
            total=np.zeros(N, np.int32),
        )
        return LoopState(self.runner.pool, self.engine.state, requests, rounds, np.int32(0))

    def _columns(self, N: int) -> SamplingColumns:
        zeros, ones = np.zeros(N, np.int32), np.ones(N, FLOAT)
        return SamplingColumns(
            temperature=0 * ones, top_k=zeros, top_p=ones, repetition_penalty=ones.copy(), seeds=zeros.copy()
        )

    def _fixed(self, N: int) -> Fixed:
        return Fixed(
            max_rounds=np.int32(self.max_rounds),
            stop_at_finish=np.bool_(False),
            live=np.zeros(N, bool),
            stops_at_eos=np.zeros(N, bool),
            request_index=np.full(N, -1, np.int32),
            first_context_position=np.zeros(N, np.int32),
            num_pages=np.zeros(N, np.int32),
            block_tables=np.full((N, self.config.table_width), NULL_PAGE, np.int32),
        )

    def _call(self, N: int, state: LoopState, columns: SamplingColumns, fixed: Fixed) -> LoopState:
        """Run a bucket's loop and wait. It consumes the pools: if it fails they are gone, and their owners say so. Who
        interrupts the wait keeps them."""
        self.runner.pool = self.engine.state = None
        state = self.programs[N](self.weights, state, columns, fixed)
        self.runner.pool, self.engine.state = state.target_pool, state.draft
        start = time.perf_counter()
        try:
            return jax.device_get((state.requests, state.rounds))
        except Exception:
            self.runner.pool = self.engine.state = None
            raise
        finally:
            self.waited += time.perf_counter() - start

    def run(
        self,
        batch: Sequence[Generation],
        block_tables: np.ndarray,
        *,
        budgets: list[int],
        num_rounds: int,
        stop_at_finish: bool,
    ) -> list[RoundsOf]:
        """Decode requests that wait for a verify for `num_rounds` rounds, or until one of the stop conditions holds."""
        n = len(batch)
        N = self.engine.ladder.dispatch(n, n * self.config.query_len, self.config.query_len).padded_reqs
        requests, columns, fixed = self._requests(N), self._columns(N), self._fixed(N)
        requests.active[:n] = fixed.live[:n] = True
        requests.budget[:n] = budgets
        fixed = fixed._replace(max_rounds=np.int32(num_rounds), stop_at_finish=np.bool_(stop_at_finish))
        fixed.block_tables[:n, : block_tables.shape[1]] = block_tables
        for i, generation in enumerate(batch):
            params, drafts = generation.params, generation.drafts
            requests.last_token[i], requests.computed[i] = generation.tokens[-1], generation.computed
            requests.drafts[i, : len(drafts)], requests.num_drafts[i] = drafts, len(drafts)
            if requests.seen is not None:
                requests.seen[i, generation.tokens] = True
            for name in ("temperature", "top_k", "top_p", "repetition_penalty"):
                getattr(columns, name)[i] = getattr(params, name)
            columns.seeds[i] = params.seed
            fixed.stops_at_eos[i] = not params.ignore_eos
            fixed.request_index[i] = self.engine.request_index(generation.request_id)
            fixed.first_context_position[i] = generation.context_start
            fixed.num_pages[i] = len(generation.pages)
        with forbid_compiles("the loop on the device"):
            requests, rounds = self._call(N, self._state(requests, N), columns, fixed)
        found = []
        for i in range(n):
            counts = rounds.num_emitted[i][rounds.num_emitted[i] > 0].tolist()
            ends = np.cumsum([0, *counts])
            emitted = [rounds.tokens[i, a:b].tolist() for a, b in zip(ends, ends[1:], strict=False)]
            drafts = requests.drafts[i, : requests.num_drafts[i]].tolist()
            found.append(RoundsOf(emitted, rounds.num_verified[i, : len(counts)].tolist(), drafts))
        return found
