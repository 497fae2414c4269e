"""Lockstep: one drafter to the decoding loop, several engines behind it that are asked alike and compared.

n requests of a step, K drafts, V vocabulary, L layers, R rows of a pool, K heads of H in a pool's shape.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from jax_dflash.batch import PAD_SLOT, TargetStep
from jax_dflash.decoding import Generation
from jax_dflash.engine import DraftEngine
from jax_dflash.programs import num_compiles
from jax_dflash.sampling_params import SamplingParams
from jax_dflash.taps import live_part, tap_table
from torch_ref import numerics as torch_numerics
from torch_ref.engine import DraftEngine as TorchEngine

# A token is decided if its float64 top-2 margin is more than this many sigma, sigma being the RMS error of PyTorch
# eager's logits on that row. One run is one draw of that error, at times a lucky one: both of eager's attention kernels
# count. Even so bfloat16's errors have heavier tails than a Gaussian's (LOG.md).
SIGMAS = 5
MAX_ERROR = 1e30  # stands for an error that is not finite: JSON has no infinity
NO_BUCKET = 0  # context that is stored without drafting, and the pools


@dataclass
class Tally:
    """What the lockstep counted."""

    tokens_compared: int = 0
    tokens_equal: int = 0
    undecidable: int = 0
    undecidable_unequal: int = 0
    fused_equal: int = 0  # tokens that PyTorch's fused attention drafts like JAX
    pool_checks: int = 0
    errors: dict[str, float] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    by_bucket: dict[int, list[float]] = field(default_factory=dict)  # num_reqs -> [equal, compared, worst error]
    compiles: int = 0
    torch_accepted: int = 0
    torch_steps: int = 0

    def fault(self, what: str) -> None:
        if len(self.faults) < 20:
            self.faults.append(what)

    def float_error(self, bucket: int, name: str, ours: np.ndarray, theirs: np.ndarray, limit: float) -> None:
        """Keep the relative RMS distance of one tap; past the limit, or not finite alike, it is a fault."""
        error = min(relative_rms(ours, theirs), MAX_ERROR)
        error = MAX_ERROR if np.isnan(error) else error
        self.errors[name] = max(self.errors.get(name, 0.0), error)
        row = self.by_bucket.setdefault(bucket, [0, 0, 0.0])
        row[2] = max(row[2], error)
        if not error <= limit:
            self.fault(f"{name} of {_step_of(bucket)} differs by {error:.2e} (limit {limit:.0e})")

    def compare_tokens(
        self,
        bucket: int,
        drafts: Int[np.ndarray, "n K"],
        torch_drafts: Int[np.ndarray, "n K"],
        torch_logits: Float[np.ndarray, "runs n K V"],
        exact_logits: Float[np.ndarray, "n K V"],
    ) -> None:
        """Equal or not, and decided or not: by the float64 margin against PyTorch's own error on that row, `torch_logits`
        being those of several eager runs."""
        top2 = np.partition(exact_logits, -2, axis=-1)[..., -2:]
        margin = top2[..., 1] - top2[..., 0]
        squared = np.mean(_difference(torch_logits.astype(np.float64), exact_logits[None]) ** 2, axis=0).sum(-1)
        sigma = np.sqrt(squared / np.isfinite(exact_logits).sum(-1))
        decided, equal = margin > SIGMAS * sigma, drafts == torch_drafts
        self.tokens_compared += equal.size
        self.tokens_equal += int(equal.sum())
        self.undecidable += int((~decided).sum())
        self.undecidable_unequal += int((~decided & ~equal).sum())
        row = self.by_bucket.setdefault(bucket, [0, 0, 0.0])
        row[0] += int(equal.sum())
        row[1] += equal.size
        for request, position in np.argwhere(decided & ~equal):
            self.fault(
                f"draft {position + 1} of a request differs: JAX {drafts[request, position]}, PyTorch "
                f"{torch_drafts[request, position]}, margin {margin[request, position] / sigma[request, position]:.1f} sigma"
            )


def _step_of(bucket: int) -> str:
    return f"a bucket of {bucket} requests" if bucket else "stored context"


def _difference(ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    """ours - theirs; 0 where both are -inf, as the logits of tokens that a reduced vocabulary lacks."""
    return np.subtract(ours, theirs, out=np.zeros(np.shape(ours)), where=~(np.isneginf(ours) & np.isneginf(theirs)))


def relative_rms(ours: np.ndarray, theirs: np.ndarray) -> float:
    """RMS(ours - theirs) / RMS(theirs); NaN if either is not finite. The pool `[L, 2, R, K, H]` is judged by its worst
    layer and kind and other arrays of heads by their worst layer or request, which may differ in scale."""
    ours, theirs = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    axes = tuple(range(ours.ndim - 3, ours.ndim)) if ours.ndim > 3 else None
    scale = np.sqrt(np.mean(np.where(np.isneginf(theirs), 0, theirs) ** 2, axis=axes))
    error = np.sqrt(np.mean(_difference(ours, theirs) ** 2, axis=axes))
    return float(np.max(error / np.where(scale == 0, 1.0, scale)))


class Engines(NamedTuple):
    """The same drafter in every form that is compared, all captured and with external pages."""

    jax: DraftEngine  # whose drafts are verified
    tapped: DraftEngine  # the same programs with taps
    torch: TorchEngine  # eager, the contract's attention, taps
    oracle: TorchEngine  # as torch, in float64
    fused: TorchEngine  # eager, PyTorch's fused attention, taps
    graph: TorchEngine | None  # the latter's replayed CUDA graphs


class Lockstep:
    """A `decoding.Drafter`: every call goes to all engines, a proposal is compared, and the JAX drafts come back. Give
    `count_accepted` to the loop as its `on_tokens`.

    Args:
        engines: what is compared.
        max_error: the relative RMS distance of JAX from PyTorch that a tap or pool may have.
    """

    draft_logits = None  # drafts are greedy

    def __init__(self, engines: Engines, max_error: float):
        self.engines, self.max_error, self.tally = engines, max_error, Tally()
        self._all = [engine for engine in engines if engine is not None]
        self._to_verify: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # the drafts of JAX and of PyTorch

    def add_request(
        self, request_id, num_prompt_tokens: int = 0, cached_tokens: int = 0, params: SamplingParams | None = None
    ) -> None:
        """Admit a request to every engine."""
        for engine in self._all:
            engine.add_request(request_id, num_prompt_tokens, cached_tokens, params)

    def request_index(self, request_id) -> int:
        return self.engines.jax.request_index(request_id)

    def remove_request(self, request_id) -> None:
        """Forget a request in every engine."""
        self._to_verify.pop(request_id, None)
        for engine in self._all:
            engine.remove_request(request_id)

    def propose(self, step: TargetStep, features, num_speculative_tokens: int | None = None) -> Int[np.ndarray, "n K"]:
        """The JAX drafts of a step that all engines made; what differs is in the tally. With 0 drafts all of them store the
        step's context, which is compared."""
        engines, tally = self.engines, self.tally
        n, num_rows = len(step.request_ids), int(np.sum(step.num_context))
        arguments = step, np.asarray(features)[:num_rows], num_speculative_tokens
        before = num_compiles()
        drafts = engines.jax.propose(*arguments)
        tally.compiles += num_compiles() - before
        tapped, torch_drafts, fused = (e.propose(*arguments) for e in (engines.tapped, engines.torch, engines.fused))
        engines.oracle.propose(*arguments)
        K = drafts.shape[1]
        bucket = engines.jax.ladder.dispatch(n, n * (K + 1), K + 1).padded_reqs if K else NO_BUCKET
        if not np.array_equal(drafts, tapped):
            tally.fault("programs with taps draft other tokens than those without")
        if engines.graph is not None and not np.array_equal(engines.graph.propose(*arguments), fused):
            tally.fault(f"a CUDA graph of {bucket} requests drafts other tokens than PyTorch eager")
        self._compare_taps(bucket, n, num_rows)
        if K:
            tally.fused_equal += int((fused == drafts).sum())
            exact, *logits = (
                torch_numerics.to_numpy(engine.last_taps["logits"])[:n]
                for engine in (engines.oracle, engines.torch, engines.fused)
            )
            tally.compare_tokens(bucket, drafts, torch_drafts, np.stack(logits), exact)
            for row in np.flatnonzero(step.num_sampled).tolist():  # an unfinished prompt has no use for its drafts
                self._to_verify[step.request_ids[row]] = drafts[row], torch_drafts[row]
        return drafts

    def _compare_taps(self, bucket: int, n: int, num_rows: int) -> None:
        """Everything between features and logits of the step that JAX and PyTorch made last."""
        ours = {name: np.asarray(value) for name, value in self.engines.tapped.last_taps.items()}
        theirs = {name: torch_numerics.to_numpy(value) for name, value in self.engines.torch.last_taps.items()}
        if np.any(ours["context_slots"][..., num_rows:] != PAD_SLOT):
            self.tally.fault(f"padded context rows of {_step_of(bucket)} have slots")
        for tap in tap_table(self.engines.jax.config.draft.geometry.num_layers):
            if tap.level > 1 or (bucket == NO_BUCKET and "C" not in tap.dims.split()):
                continue
            if tap.name not in ours or tap.name not in theirs:
                self.tally.fault(f"tap {tap.name} is missing on one side")
                continue
            a, b = (live_part(tap, values[tap.name], n, num_rows) for values in (ours, theirs))
            if tap.kind == "token":
                continue  # judged by their margins
            if tap.kind == "int":
                if a.shape != b.shape or not np.array_equal(a, b):
                    self.tally.fault(f"integers of {tap.name} differ: JAX {a.tolist()[:16]}, PyTorch {b.tolist()[:16]}")
            else:
                self.tally.float_error(bucket, tap.name, a, b, self.max_error)

    def compare_pools(self, live: Sequence[Generation]) -> None:
        """The stored context K/V of these requests in both pools, and of CUDA graphs against eager."""
        self.tally.pool_checks += 1
        engines, page_size = self.engines, self.engines.jax.config.page_size
        for g, jax_pool in enumerate(engines.jax.state.pools):
            pairs = [("pool", np.asarray(jax_pool), torch_numerics.to_numpy(engines.torch.state.pools[g]))]
            if engines.graph is not None:
                graph, fused = (torch_numerics.to_numpy(e.state.pools[g]) for e in (engines.graph, engines.fused))
                pairs.append(("graph_pool", graph, fused))
            for generation in live:
                slots = np.array(generation.pages, np.int32)[:, None] * page_size + np.arange(page_size)
                rows = slots.reshape(-1)[: generation.computed]
                for name, *pools in pairs if rows.size else ():
                    a, b = (pool.reshape(*pool.shape[:2], -1, *pool.shape[4:])[:, :, rows] for pool in pools)
                    self.tally.float_error(NO_BUCKET, name, a, b, self.max_error)

    def count_accepted(self, generation: Generation, new: list[int], num_drafts: int) -> None:
        """PyTorch's own accepted length. Past a token in which the two drafters differ the target saw JAX's, so the count
        stops there: a lower bound, exact while the drafts agree."""
        if generation.request_id not in self._to_verify:
            return  # its first token, by its prompt
        ours, theirs = self._to_verify.pop(generation.request_id)
        accepted = generation.accepted[-1]
        own = [*ours[:accepted], *new[accepted:]]  # the target's; `new` may end before it
        self.tally.torch_steps += 1
        for our, their, token in zip(ours, theirs, own, strict=False):
            self.tally.torch_accepted += int(their == token)
            if not our == their == token:
                break
