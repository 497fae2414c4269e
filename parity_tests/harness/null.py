"""The null distribution: one implementation run on the same function written in another order.

Model channels, MLP units, value channels, feature channels and heads can be permuted, and signs flipped, without changing
the function; in real arithmetic nothing changes, in the machine the order of sums does. How much the reference's own error
changes is how much another implementation's may differ.

On a CPU in bfloat16 another order of float32 sums hardly turns a rounding, so most bands are 1 to MARGIN there.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from jax_dflash.taps import Tap, live_part, tap_table
from parity_tests.harness import metrics
from parity_tests.harness.case import Case
from parity_tests.harness.runners import Runner, Trace, oracle, runner

NUM_SYMMETRIES = 16
MARGIN = 1.15  # over the largest of 16 draws; 16 draws of a ratio that scatters by 3% leave about as much unseen
FEW = 64  # elements; fewer, and 16 symmetries say too little of how a ratio of two errors scatters
# Largest of thousands of ratios between independent runs: 1.07 at 4096 elements, 1.45 at 256, 3.38 at 16.
SCATTER = 5.0  # so exp(SCATTER / sqrt(elements))


@dataclass(frozen=True)
class Signed:
    """A permutation with signs: `apply` gives y[j] = sign[j] x[order[j]] along one axis."""

    order: np.ndarray
    sign: np.ndarray

    @classmethod
    def draw(cls, rng: np.random.Generator, size: int, *, signs: bool = True) -> "Signed":
        return cls(rng.permutation(size), rng.choice([-1.0, 1.0], size) if signs else np.ones(size))

    def apply(self, x: np.ndarray, axis: int) -> np.ndarray:
        shape = [1] * x.ndim
        shape[axis] = -1
        return np.take(x, self.order, axis) * self.sign.reshape(shape).astype(x.dtype)

    def undo(self, x: np.ndarray, axis: int) -> np.ndarray:
        inverse = np.argsort(self.order)
        return Signed(inverse, self.sign[inverse]).apply(x, axis)


class Symmetry:
    """One random exact symmetry of a case. `apply` changes the case, `map` a tap's value, `unmap` changes it back."""

    def __init__(self, case: Case, seed: int):
        rng, c = np.random.default_rng(seed), case.config
        L, H = c["num_hidden_layers"], c["head_dim"]
        self.K = c["num_key_value_heads"]
        self.G = c["num_attention_heads"] // self.K
        self.model = Signed.draw(rng, c["hidden_size"])
        self.feature = Signed.draw(rng, case.hidden_states.shape[-1])
        self.taps = case.hidden_states.shape[-1]
        self.units = [Signed.draw(rng, c["intermediate_size"]) for _ in range(L)]
        self.values = [Signed.draw(rng, H) for _ in range(L)]
        self.kv_heads = [Signed.draw(rng, self.K, signs=False) for _ in range(L)]
        self.group = [Signed.draw(rng, self.G, signs=False) for _ in range(L)]
        # Negating channels j and j + H/2 of q and k alike commutes with their rotation.
        self.pairs = [np.tile(rng.choice([-1.0, 1.0], H // 2), 2).astype(np.float32) for _ in range(L)]

    def _heads(self, layer: int, x: np.ndarray, axis: int, undo: bool) -> np.ndarray:
        """Permute an axis of N query heads, group by group, or of K KV heads."""
        move = Signed.undo if undo else Signed.apply
        if x.shape[axis] == self.K and self.G > 1:
            return move(self.kv_heads[layer], x, axis)
        shape = x.shape
        x = x.reshape(*shape[:axis], self.K, self.G, *shape[axis + 1 :])
        x = move(self.kv_heads[layer], x, axis)
        return move(self.group[layer], x, axis + 1).reshape(shape)

    def apply(self, case: Case) -> Case:
        """The same function with its weights, features and pool reordered."""
        t, H = dict(case.tensors), case.config["head_dim"]
        D = self.model
        E = t["fc.weight"].shape[1] // self.taps
        fc = D.apply(t["fc.weight"], 0)
        t["fc.weight"] = self.feature.apply(fc.reshape(len(fc), E, self.taps), 2).reshape(fc.shape)
        for name in ("hidden_norm.weight", "norm.weight"):
            t[name] = t[name][D.order]
        for name in ("embed_tokens.weight", "lm_head.weight"):
            t[name] = D.apply(t[name], 1)
        if "mask_embedding" in t:
            t["mask_embedding"] = D.apply(t["mask_embedding"], 0)
        pool = case.pool.copy()
        for i in range(case.num_layers):
            p = f"layers.{i}."
            for name in ("input_layernorm", "post_attention_layernorm"):
                t[f"{p}{name}.weight"] = t[f"{p}{name}.weight"][D.order]
            for part in "qkv":
                name = f"{p}self_attn.{part}_proj.weight"
                w = D.apply(t[name], 1).reshape(-1, H, t[name].shape[1])
                w = self.values[i].apply(w, 1) if part == "v" else w * self.pairs[i][:, None]
                t[name] = self._heads(i, w, 0, False).reshape(t[name].shape)
            name = f"{p}self_attn.o_proj.weight"
            w = D.apply(t[name], 0)
            w = self.values[i].apply(w.reshape(len(w), -1, H), 2)
            t[name] = self._heads(i, w, 1, False).reshape(t[name].shape)
            unit, gate, up, down = self.units[i], *(f"{p}mlp.{part}_proj.weight" for part in ("gate", "up", "down"))
            t[gate] = D.apply(t[gate], 1)[unit.order]
            t[up] = unit.apply(D.apply(t[up], 1), 0)
            t[down] = unit.apply(D.apply(t[down], 0), 1)
            pool[i, 0] = self._heads(i, pool[i, 0] * self.pairs[i], 2, False)
            pool[i, 1] = self._heads(i, self.values[i].apply(pool[i, 1], 3), 2, False)
        return replace(case, tensors=t, pool=pool, hidden_states=self.feature.apply(case.hidden_states, 2))

    def _move(self, tap: Tap, x: np.ndarray, undo: bool) -> np.ndarray:
        move = Signed.undo if undo else Signed.apply
        if tap.kind in ("int", "token") or tap.name == "logits":
            return x
        if tap.name == "features":
            E = x.shape[1] // self.taps
            return move(self.feature, x.reshape(len(x), E, self.taps), 2).reshape(x.shape)
        if tap.dims.split()[-1] == "D":
            return move(self.model, x, x.ndim - 1)
        layered = tap.dims.startswith("L ")
        layers = range(len(x)) if layered else [int(tap.name.split(".")[1])]
        rows = [self._layer(tap, i, x[i] if layered else x, undo) for i in layers]
        return np.stack(rows) if layered else rows[0]

    def _layer(self, tap: Tap, i: int, x: np.ndarray, undo: bool) -> np.ndarray:
        move, kind = Signed.undo if undo else Signed.apply, tap.name.rpartition(".")[2]
        if kind == "act":
            return move(self.units[i], x, x.ndim - 1)
        if kind == "pool":
            keys = self._heads(i, x[0] * self.pairs[i], x.ndim - 3, undo)
            return np.stack([keys, self._heads(i, move(self.values[i], x[1], x.ndim - 2), x.ndim - 3, undo)])
        x = x * self.pairs[i] if kind in ("q", "k", "context_k") else move(self.values[i], x, x.ndim - 1)
        return self._heads(i, x, x.ndim - 2, undo)

    def map(self, tap: Tap, x: np.ndarray) -> np.ndarray:
        """A tap's value as the changed case would have it."""
        return self._move(tap, x, undo=False)

    def unmap(self, tap: Tap, x: np.ndarray) -> np.ndarray:
        """The value that the unchanged case would have had."""
        return self._move(tap, x, undo=True)

    def runs(self, case: Case, run: Runner, dtype: str, forced: Trace) -> tuple[Trace, Trace]:
        """The changed case's traces in the unchanged case's order: forced by these values, and free."""
        table = {tap.name: tap for tap in tap_table(case.num_layers)}
        changed = self.apply(case)
        mapped = {name: self.map(table[name], value) for name, value in forced.items()}

        def back(trace):
            return {name: self.unmap(table[name], value) for name, value in trace.items()}

        return back(run(changed, dtype, mapped, rerun=False)), back(run(changed, dtype, rerun=False))


class Band(NamedTuple):
    """The smallest ratio seen, and the largest times the margin."""

    low: float
    high: float

    def holds(self, rho: float | None) -> bool:
        return rho is not None and rho <= self.high


def distinct(x: np.ndarray) -> int:
    """Elements of a tap that are not repeats: the mask rows of a block are alike in its first layer, and so are their
    errors."""
    rows = x.reshape(-1, x.shape[-1])
    return len(np.unique(rows, axis=0)) * x.shape[-1]


def independent(size: int) -> float:
    """The largest ratio of two independent runs' errors over so many elements."""
    return float(np.exp(SCATTER / np.sqrt(size)))


class Reference:
    """An implementation's own run of a case and how its error scatters: made at first use, to be judged against often.

    `trace` is its free run, `exact` the oracle's, `local_exact` the oracle's with the reference's values forced on every tap
    up to `level`.
    """

    def __init__(self, case: Case, name: str, dtype: str, device: str = "cpu", level: int = 2):
        self.case, self.name, self.dtype = case, name, dtype
        self.run = runner(name, device)
        self.table = [tap for tap in tap_table(case.num_layers) if tap.level <= level or tap.kind == "pool"]
        self.floats = [tap for tap in self.table if tap.kind == "float"]

    def live(self, tap: Tap, trace: Trace) -> np.ndarray:
        """The entries of a tap that are compared: integers whole, since padded rows have theirs too."""
        value = trace[tap.name]
        return value if tap.kind == "int" else live_part(tap, value, self.case.live_reqs, self.case.live_rows)

    @property
    def longest_sum(self) -> int:
        """Terms of the longest sum of a step: over features, channels, units, heads or keys."""
        c, widths = self.case.config, [self.case.max_model_len, *(max(t.shape) for t in self.case.tensors.values())]
        return max(c["num_attention_heads"] * c["head_dim"], *widths)

    @cached_property
    def trace(self) -> Trace:
        return self.run(self.case, self.dtype)

    @cached_property
    def exact(self) -> Trace:
        return oracle(self.case)

    @cached_property
    def forced(self) -> Trace:
        return {tap.name: self.trace[tap.name] for tap in self.floats if tap.name != "features"}

    @cached_property
    def local_exact(self) -> Trace:
        return oracle(self.case, forced=self.forced)

    @cached_property
    def bands(self) -> dict[str, tuple[Band, Band]]:
        """Per float tap the bands of the local and of the end-to-end ratio, over NUM_SYMMETRIES changed cases. A tap of
        fewer than FEW elements gets at least the band of independent runs, and so does every end-to-end ratio: there one
        rounding that turns makes the rest of a run another draw."""
        seen: dict[str, tuple[list, list]] = {tap.name: ([], []) for tap in self.floats}
        for seed in range(NUM_SYMMETRIES):
            traces = Symmetry(self.case, seed).runs(self.case, self.run, self.dtype, self.forced)
            for tap in self.floats:
                for values, trace, exact in zip(seen[tap.name], traces, (self.local_exact, self.exact), strict=True):
                    rho = self.ratio(tap, trace, exact)
                    values.append(float("inf") if rho is None else rho)
        result = {}
        for tap in self.floats:
            local, free = (Band(min(1.0, *v), MARGIN * max(1.0, *v)) for v in seen[tap.name])
            if (size := distinct(self.live(tap, self.exact))) < FEW:
                local = Band(local.low, max(local.high, independent(size)))
            result[tap.name] = local, Band(free.low, max(free.high, independent(self._free_size(tap))))
        return result

    def _free_size(self, tap: Tap) -> int:
        """Independent errors of a tap along a free run: what a token carries comes through the model's D channels."""
        shape, D = self.live(tap, self.exact).shape, self.case.config["hidden_size"]
        tokens = np.prod(
            [n for n, name in zip(shape, tap.dims.split(), strict=True) if name in ("B", "T", "T-1", "C", "L")]
        )
        return int(tokens * min(np.prod(shape) // tokens, D))

    def ratio(self, tap: Tap, trace: Trace, exact: Trace) -> float | None:
        """`metrics.error_ratio` of another trace, live entries only."""
        return metrics.error_ratio(*(self.live(tap, t) for t in (trace, self.trace, exact)))
