"""Where in an array the error sits, and what usually puts it there."""

from dataclasses import dataclass

import numpy as np

from jax_dflash.taps import Tap

AXES = {
    "B": "request", "T": "row of the block", "T-1": "draft", "C": "context row", "L": "layer", "2": "key or value",
    "N": "query head", "K": "KV head", "H": "channel", "D": "channel", "F": "unit", "V": "token id", "P": "page",
    "page": "row of the page",
}  # fmt: skip
SHARE = 0.9  # of the squared error
CONCENTRATED = 0.5  # an axis says something if this part of it, or less, holds that share
NOTHING = 1e-8  # of an even share of the squared error: float64's own noise is below 1e-20 of the smallest bug's


@dataclass(frozen=True)
class Attribution:
    """`lines` say where the error is; `axes` are the concentrated axes with the entries that hold it; `error_map` is
    squared error by token and head, or by the last two axes there are."""

    tap: str
    lines: list[str]
    axes: dict[str, list[int]]
    hypothesis: str
    error_map: dict | None


def attribute(tap: Tap, ours: np.ndarray, exact: np.ndarray) -> Attribution:
    """Axis by axis, which entries have no error at all, or how few hold 90% of its square."""
    if ours.shape != exact.shape:
        return _plain(tap, f"shape {list(ours.shape)}, expected {list(exact.shape)}")
    if tap.kind in ("int", "token"):
        wrong = np.argwhere(ours != exact)
        at = tuple(wrong[0])
        first = f"first at {[int(i) for i in at]}: {ours[at]}, expected {exact[at]}"
        return _plain(tap, f"{len(wrong)} of {ours.size} entries differ, {first}")
    error = _squared_error(ours, exact)
    if not error.any():
        return _plain(tap, "no error at all, where the contract has roundings")
    views = {name: (i, error) for i, name in enumerate(tap.dims.split())}
    if tap.name.rpartition(".")[2] in ("q", "k", "context_k"):
        views["pair"] = (error.ndim - 1, error.reshape(*error.shape[:-1], 2, -1).sum(-2))
    some, most = {}, {}  # axes with entries that have no error at all, and those where few hold nearly all of it
    for name, (axis, squared) in views.items():
        share = squared.sum(tuple(i for i in range(squared.ndim) if i != axis))
        share = share / share.sum()
        order = np.argsort(-share, kind="stable")
        held = int(np.searchsorted(np.cumsum(share[order]), SHARE) + 1)
        if (share <= NOTHING / share.size).any():
            some[name] = np.flatnonzero(share > NOTHING / share.size).tolist(), share.size, 1.0
        elif share.size > 1 and held <= CONCENTRATED * share.size:
            most[name] = sorted(order[:held].tolist()), share.size, share[order[:held]].sum()
    lines = [_line(tap, name, *found) for name, found in {**some, **most}.items()]
    axes = {name: entries for name, (entries, _, _) in (some or most).items()}
    lines = lines or ["the error is spread evenly over every axis"]
    return Attribution(tap.name, lines, axes, _hypothesis(tap.name, axes), _error_map(tap, error))


def _plain(tap: Tap, line: str) -> Attribution:
    return Attribution(tap.name, [line], {}, _hypothesis(tap.name, {}), None)


def _squared_error(ours: np.ndarray, exact: np.ndarray) -> np.ndarray:
    """Squared differences; where only one side is finite, or infinities differ, the largest of them and at least 1."""
    finite = np.isfinite(ours) & np.isfinite(exact)
    same = (np.isnan(ours) & np.isnan(exact)) | (ours == exact)
    squared = np.square(np.subtract(ours, exact, where=finite, out=np.zeros(ours.shape)))
    return np.where(finite, squared, np.where(same, 0.0, max(1.0, squared.max(initial=0))))


def _line(tap: Tap, name: str, entries: list[int], size: int, share: float) -> str:
    label = {"pair": "frequency pair", "F": "feature" if tap.name == "features" else "unit"}.get(name) or AXES[name]
    rest = sorted({*range(size)} - {*entries})
    if share == 1 and len(rest) < len(entries):
        return f"all but {len(rest)} of {size} err: none in {label} {_some(rest)}"
    return f"{100 * share:.0f}% of the squared error in {len(entries)} of {size}: {label} {_some(entries)}"


def _some(entries: list[int]) -> str:
    return ", ".join(map(str, entries[:6])) + (", ..." if len(entries) > 6 else "")


def _error_map(tap: Tap, error: np.ndarray) -> dict | None:
    """Token by head where there are heads, else token by a fold of the channels."""
    dims = tap.dims.split()
    if error.ndim < 2 or "V" in dims:
        return None
    row = next(i for i, name in enumerate(dims) if name in ("T", "T-1", "C", "P"))
    column = next((i for i, name in enumerate(dims) if name in ("N", "K")), len(dims) - 1)
    table = error.sum(tuple(i for i in range(error.ndim) if i not in (row, column)))
    return {"tap": tap.name, "rows": AXES[dims[row]], "columns": AXES[dims[column]], "values": np.sqrt(table).tolist()}


def _hypothesis(name: str, axes: dict[str, list[int]]) -> str:
    """The likeliest kind of bug: by the tap, then by the axis that holds the error."""
    kind = name.rpartition(".")[2]
    if kind == "attn":
        if "N" in axes:
            return "GQA: query heads read the wrong KV head (tile for repeat)"
        if "T" in axes:
            return "a mask inside the block: some rows do not see all keys"
        if "B" in axes:
            return "the keys of some requests: seq_lens, a page too many or too few, the last chunk"
        return "softmax: scale, a padding key, a mask added as a number, or the weights' rounding"
    if kind == "context_k" and "C" in axes and "L" not in axes:
        return "RoPE of the context: every position but 0 is off, so layout, base, frequencies or table"
    if kind in ("q", "k", "context_k") and "pair" in axes:
        return "RoPE: frequencies, base or table"
    if kind == "context_k" and "L" in axes:
        return "the K norm of one layer used for others, or another layer's rows of the fused product"
    return _BY_TAP[kind]


_BY_TAP = {
    "features": "target layers: target_layer_ids read with another meaning, or features in another order",
    "context_positions": "positions of context rows: start, rejected rows, padding",
    "context_slots": "slots of context rows: rejected or padded rows not PAD, the page table, the null page",
    "input_ids": "the anchor (last_sampled or next_prefill), mask id, or padded rows",
    "query_positions": "block positions: last valid position, rejected count, the clamp at max_model_len",
    "query_slots": "slots of the block: PAD of padded requests and past max_model_len, the page table",
    "query_start_loc": "query_start_loc of padded requests",
    "seq_lens": "seq_lens: the block's own rows, the rejected count, the clamp",
    "sample_indices": "which rows are sampled: the anchor's row is not",
    "sample_positions": "positions of sampled rows",
    "sample_request": "request index of padded rows, which must be -1",
    "combined": "fc: order of the features, or its layout",
    "context_norm": "hidden_norm: weight or epsilon",
    "context_k": "context K: its norm, position or projection",
    "context_v": "context V: normed, rotated, or another projection's rows",
    "embeds": "the embedding rows, or the mask row",
    "n1": "input_layernorm: weight or epsilon",
    "q": "query: q_norm, positions, or heads",
    "k": "key of the block: k_norm, positions, or heads",
    "v": "value of the block: normed, rotated, or another projection's rows",
    "post_attention": "o_proj or the residual before it",
    "n2": "post_attention_layernorm: weight or epsilon",
    "act": "SwiGLU: gate and up exchanged, or another activation",
    "out": "down_proj or the residual before it",
    "hidden": "final norm, or which rows are sampled",
    "logits": "LM head",
    "draft_tokens": "argmax: ties go to the lowest id",
    "pool": "what is stored where: PAD or null page written, rejected rows stored, K and V exchanged",
}
