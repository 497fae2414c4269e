"""Decoding rounds without the host: draft, verify, accept, pages and stop conditions in one compiled loop per bucket.

N requests of the bucket, K drafts, Q = K + 1 rows of each, R rounds at most, W pages of a table, V vocabulary.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.stages import Compiled
from jaxtyping import Array, Bool, Int
from rich.console import Console
from rich.progress import track

from jax_dflash import sampling, target
from jax_dflash.batch import NULL_PAGE, EngineConfig
from jax_dflash.buckets import BucketLadder
from jax_dflash.config import TargetConfig
from jax_dflash.draft_step import DraftState, draft_step
from jax_dflash.drafter import DraftWeights
from jax_dflash.kv_cache import Pool
from jax_dflash.numerics import COMPILER_OPTIONS
from jax_dflash.sampling_params import GREEDY, SamplingColumns, SamplingMode
from jax_dflash.target import TargetWeights
from jax_dflash.target_runner import target_step


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


class DeviceLoop:
    """One compiled loop per bucket over the pools of a target runner and a draft engine, which it takes and gives back.

    Args:
        config, target_config: the drafter's engine and the target.
        draft_weights, target_weights: as packed; arguments of the programs, not constants.
        ladder: request buckets, the engine's own.
        eos_token_ids: tokens that end a request, unless it ignores them.
        mode: what the programs are compiled for.
        max_rounds: R; a call runs at most so many.
    """

    def __init__(
        self,
        config: EngineConfig,
        target_config: TargetConfig,
        draft_weights: DraftWeights,
        target_weights: TargetWeights,
        *,
        ladder: BucketLadder,
        eos_token_ids: tuple[int, ...] = (),
        mode: SamplingMode = GREEDY,
        max_rounds: int = 32,
    ):
        self.config, self.target_config, self.ladder = config, target_config, ladder
        self.weights = draft_weights, target_weights
        self.eos_token_ids, self.mode, self.max_rounds = eos_token_ids, mode, max_rounds
        self.programs: dict[int, Compiled] = {}

    def fits(self, computed: Int[Array, "N"], num_pages: Int[Array, "N"]) -> Bool[Array, "N"]:
        """Whether a request's pages cover the rows of a round and the block that is drafted after it."""
        last = jnp.minimum(computed + 2 * self.config.query_len, self.config.max_model_len)
        return num_pages * self.config.page_size >= last

    def rounds(
        self, weights: tuple[DraftWeights, TargetWeights], state: LoopState, columns: SamplingColumns, fixed: Fixed
    ) -> LoopState:
        """Rounds until one of the stop conditions holds."""

        def going_on(state: LoopState) -> Bool[Array, ""]:
            active = state.requests.active
            ended = fixed.stop_at_finish & jnp.any(fixed.live & ~active)
            paged = jnp.all(self.fits(state.requests.computed, fixed.num_pages) | ~active)
            return (state.round < fixed.max_rounds) & jnp.any(active) & paged & ~ended

        return lax.while_loop(going_on, lambda state: self.round(weights, state, columns, fixed), state)

    def round(
        self, weights: tuple[DraftWeights, TargetWeights], state: LoopState, columns: SamplingColumns, fixed: Fixed
    ) -> LoopState:
        """Verify the drafts of every active request, and draft again."""
        draft_weights, target_weights = weights
        config, requests, Q = self.config, state.requests, self.config.query_len
        active, N = requests.active, requests.active.shape[0]
        # A request that has ended runs along in the null page at position 0: it stores nothing and reads a block.
        tables = jnp.where(active[:, None], fixed.block_tables, NULL_PAGE)
        start = jnp.where(active, requests.computed, 0)
        num_drafts = jnp.clip(config.max_model_len - 1 - start, 0, requests.num_drafts)

        with jax.named_scope("verify"):
            ids = jnp.concatenate([requests.last_token[:, None], jnp.maximum(requests.drafts, 0)], axis=1)
            target_pool, hidden, features = target_step(
                self.target_config, target_weights, state.target_pool, ids, start, jnp.where(active, Q, 0), tables,
                taps=config.draft.hidden_state_indices, page_size=config.page_size, max_model_len=config.max_model_len,
            )  # fmt: skip
            tokens, num_sampled = sampling.verify(
                target.compute_logits(target_weights, hidden), requests.drafts, num_drafts, start, columns, self.mode,
                None if state.draft.draft_logits is None else state.draft.draft_logits[fixed.request_index], requests.seen,
            )  # fmt: skip
        with jax.named_scope("accept"):
            at = jnp.arange(Q, dtype=jnp.int32)
            emitted = at < jnp.minimum(num_sampled, requests.budget)[:, None]
            is_eos = jnp.zeros_like(emitted)
            for token in self.eos_token_ids:
                is_eos |= tokens == token
            is_eos &= emitted & fixed.stops_at_eos[:, None]
            count = jnp.where(active, num_sampled, 0)  # the caller cuts at the end of a request
            rounds, size = state.rounds, state.rounds.tokens.shape[1]
            where = jnp.where(at < count[:, None], rounds.total[:, None] + at, size)  # past the end: dropped
            rounds = Rounds(
                tokens=rounds.tokens.at[jnp.arange(N)[:, None], where].set(tokens, mode="drop"),
                num_emitted=rounds.num_emitted.at[:, state.round].set(count),
                num_verified=rounds.num_verified.at[:, state.round].set(jnp.where(active, num_drafts, 0)),
                total=rounds.total + count,
            )
            seen = requests.seen
            if seen is not None:
                new = jnp.where(at < count[:, None], tokens, seen.shape[1])
                seen = seen.at[jnp.arange(N)[:, None], new].set(True, mode="drop")
            last = jnp.take_along_axis(tokens, num_sampled[:, None] - 1, axis=1)[:, 0]
            budget = requests.budget - count
        with jax.named_scope("draft"):
            fields = {
                "num_rows": jnp.int32(N * Q),
                "start_position": start,
                "num_context": jnp.full(N, Q, jnp.int32),
                "num_rejected": jnp.where(active, Q - num_sampled, 0),
                "num_sampled": num_sampled,
                "last_sampled": last,
                "next_prefill": jnp.zeros(N, jnp.int32),
                "first_context_position": jnp.where(active, fixed.first_context_position, 0),
                "request_index": fixed.request_index,
                "temperature_bits": lax.bitcast_convert_type(columns.temperature.astype(jnp.float32), jnp.int32),
                "seed": columns.seeds,
                "block_tables": jnp.broadcast_to(tables, (config.num_groups, *tables.shape)),
            }
            draft, drafts = draft_step(config, draft_weights, state.draft, features.reshape(N * Q, -1), fields)
        requests = Requests(
            active=active & (budget > 0) & ~jnp.any(is_eos, axis=1),
            last_token=jnp.where(active, last, requests.last_token),
            computed=jnp.where(active, requests.computed + num_sampled, requests.computed),
            drafts=jnp.where(active[:, None], drafts, requests.drafts),
            num_drafts=jnp.where(active, config.num_speculative_tokens, requests.num_drafts),
            budget=budget,
            seen=seen,
        )
        return LoopState(target_pool, draft, requests, rounds, state.round + 1)

    def capture(self, runner: TargetRunner, engine: DraftEngine, *, progress: bool = True) -> None:
        """Compile every bucket, largest first; the pools keep their bits."""
        descriptors = self.ladder.capture_order(GraphMode.FULL)
        console = Console(stderr=True)
        for descriptor in track(descriptors, "Capturing decoding loops", console=console, disable=not progress):
            N = descriptor.padded_reqs
            state, columns, fixed = self._arguments(runner, engine, N)
            program = jax.jit(self.rounds, donate_argnums=1)
            lowered = program.lower(self.weights, state, columns, fixed)
            self.programs[N] = lowered.compile(COMPILER_OPTIONS)

    def _arguments(self, runner: TargetRunner, engine: DraftEngine, N: int) -> tuple[LoopState, SamplingColumns, Fixed]:
        """The arguments of a bucket with no live request: what is lowered and what a call fills in."""
        K, Q, V = self.config.num_speculative_tokens, self.config.query_len, self.target_config.vocab_size
        ints, off = np.zeros(N, np.int32), np.zeros(N, bool)
        requests = Requests(
            active=off,
            last_token=ints,
            computed=ints,
            drafts=np.zeros((N, K), np.int32),
            num_drafts=ints,
            budget=ints,
            seen=np.zeros((N, V), bool) if self.mode.penalised else None,
        )
        rounds = Rounds(
            tokens=np.zeros((N, self.max_rounds * Q), np.int32),
            num_emitted=np.zeros((N, self.max_rounds), np.int32),
            num_verified=np.zeros((N, self.max_rounds), np.int32),
            total=ints,
        )
        fixed = Fixed(
            max_rounds=np.int32(self.max_rounds),
            stop_at_finish=np.bool_(False),
            live=off,
            stops_at_eos=off,
            request_index=np.full(N, -1, np.int32),
            first_context_position=ints,
            num_pages=ints,
            block_tables=np.full((N, self.config.table_width), NULL_PAGE, np.int32),
        )
        floats = np.ones(N, np.float32)
        columns = SamplingColumns(floats * 0, ints, floats, floats, ints)
        return LoopState(runner.pool, engine.state, requests, rounds, np.int32(0)), columns, fixed
