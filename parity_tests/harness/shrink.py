"""Make a failing case smaller in the model's own dimensions while it fails at the same tap in the same way.

Requests, rows and stored context go first, then layers, heads, channels, units and the vocabulary. A smaller case that
does not fail alike is thrown away, so nothing is assumed of what failure depends on.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from parity_tests.harness.case import Case, exact
from parity_tests.harness.verdict import Result


def same_failure(result: Result) -> Callable[[Result], bool]:
    """Whether another result has this verdict at this tap; a layer's number may change as layers go."""

    def place(r: Result):
        return (r.first_divergence or "").rpartition(".")[2], r.verdict

    return lambda other: place(other) == place(result)


def shrink(
    case: Case, judge: Callable[[Case], Result], advance: Callable[[Case, int], None]
) -> tuple[Result, Result | None]:
    """The smallest failing case found, and the largest one on the way that does not fail alike. `advance(case, tries)` is
    called after every try. Raises ValueError for a case that does not fail."""
    best = judge(case)
    if best.ok:
        raise ValueError(f"case {case.name} passes; there is nothing to shrink")
    alike, passing, tries = same_failure(best), None, 0
    smaller = True
    while smaller:
        smaller = False
        for candidate in candidates(best.case):
            result = judge(candidate)
            tries += 1
            if alike(result):
                best, smaller = result, True
            elif result.ok and (passing is None or size(candidate) > size(passing.case)):
                passing = result
            advance(best.case, tries)
            if smaller:
                break
    return best, passing


def size(case: Case) -> int:
    """Numbers in a case."""
    return sum(a.size for a in (*case.tensors.values(), case.hidden_states, case.pool))


def candidates(case: Case) -> Iterator[Case]:
    """Smaller cases, the boldest first."""
    n, c = case.live_reqs, case.config
    for half in ([*range(n // 2)], [*range(n // 2, n)]) if n > 3 else ():
        yield keep_requests(case, half)
    if n > 1:
        yield from (keep_requests(case, [r for r in range(n) if r != drop]) for drop in range(n))
    if case.num_reqs > n or case.context_rows > case.live_rows:
        yield replace(case, num_reqs=n, context_rows=case.live_rows)
    if c["num_hidden_layers"] > 1:
        yield drop_layers(case, c["num_hidden_layers"] // 2)
        yield drop_layers(case, c["num_hidden_layers"] - 1)
    for r in range(n):
        if (rows := case.columns["num_context"][r] - case.columns["num_rejected"][r]) > 1:
            yield fewer_rows(case, r, int(rows // 2))
        if case.columns["start_position"][r] > 0:
            yield earlier(case, r)
    if c["num_key_value_heads"] > 1:
        yield fewer_heads(case, c["num_key_value_heads"] // 2)
        yield fewer_heads(case, c["num_key_value_heads"] - 1)
    for cut, axis in (
        (narrower_units, "intermediate_size"),
        (narrower_model, "hidden_size"),
        (smaller_vocabulary, "vocab_size"),
    ):
        if c[axis] > 4:
            yield cut(case)
    if case.hidden_states.shape[-1] > 4:
        yield narrower_target(case)
    yield from fewer_pages(case)


def _config(case: Case, **changes) -> dict:
    return {**case.config, **changes}


def keep_requests(case: Case, keep: list[int]) -> Case:
    """Only these requests, without padding of the batch."""
    rows = np.repeat(np.arange(case.live_reqs), case.columns["num_context"])
    states = case.hidden_states[:, np.isin(rows, keep)]
    columns = {name: value[keep] for name, value in case.columns.items()}
    padded = case.num_reqs - case.live_reqs, case.context_rows - case.live_rows
    return replace(
        case,
        columns=columns,
        hidden_states=states,
        num_reqs=len(keep) + padded[0],
        context_rows=states.shape[1] + padded[1],
    )


def drop_layers(case: Case, keep: int) -> Case:
    """The first layers only."""
    gone = tuple(f"layers.{i}." for i in range(keep, case.num_layers))
    tensors = {name: value for name, value in case.tensors.items() if not name.startswith(gone)}
    config = _config(case, num_hidden_layers=keep)
    if config.get("layer_types"):
        config["layer_types"] = config["layer_types"][:keep]
    return replace(case, config=config, tensors=tensors, pool=case.pool[:keep])


def fewer_rows(case: Case, request: int, valid: int) -> Case:
    """The first `valid` rows of a request and its rejected ones."""
    counts = case.columns["num_context"].copy()
    start, rejected = int(counts[:request].sum()), int(case.columns["num_rejected"][request])
    gone = np.arange(start + valid, start + counts[request] - rejected)
    counts[request] = valid + rejected
    states = np.delete(case.hidden_states, gone, axis=1)
    columns = case.columns | {"num_context": counts}
    return replace(case, columns=columns, hidden_states=states, context_rows=case.context_rows - len(gone))


def earlier(case: Case, request: int) -> Case:
    """Half as much stored context before a request's rows."""
    start = case.columns["start_position"].copy()
    start[request] //= 2
    first = np.minimum(case.columns["first_context_position"], start)
    return replace(case, columns=case.columns | {"start_position": start, "first_context_position": first})


def fewer_heads(case: Case, keep: int) -> Case:
    """The first KV heads and the query heads that read them."""
    c, H = case.config, case.config["head_dim"]
    group = c["num_attention_heads"] // c["num_key_value_heads"]
    tensors = dict(case.tensors)
    for i in range(case.num_layers):
        p = f"layers.{i}.self_attn."
        for part, heads in (("q", keep * group), ("k", keep), ("v", keep)):
            tensors[f"{p}{part}_proj.weight"] = tensors[f"{p}{part}_proj.weight"][: heads * H]
        tensors[f"{p}o_proj.weight"] = tensors[f"{p}o_proj.weight"][:, : keep * group * H]
    config = _config(case, num_attention_heads=keep * group, num_key_value_heads=keep)
    return replace(case, config=config, tensors=tensors, pool=case.pool[..., :keep, :])


def narrower_units(case: Case) -> Case:
    """Half of the MLP's units."""
    F, tensors = case.config["intermediate_size"] // 2, dict(case.tensors)
    for i in range(case.num_layers):
        p = f"layers.{i}.mlp."
        tensors |= {f"{p}{part}_proj.weight": tensors[f"{p}{part}_proj.weight"][:F] for part in ("gate", "up")}
        tensors[f"{p}down_proj.weight"] = tensors[f"{p}down_proj.weight"][:, :F]
    return replace(case, config=_config(case, intermediate_size=F), tensors=tensors)


def narrower_model(case: Case) -> Case:
    """Half of the draft model's channels."""
    D, out = case.config["hidden_size"] // 2, {}
    own_target = case.config.get("target_hidden_size") or case.config["hidden_size"]
    for name, value in case.tensors.items():
        inner = name.rpartition("layers.")[2].partition(".")[2] if name.startswith("layers.") else name
        if inner in ("self_attn.o_proj.weight", "mlp.down_proj.weight", "fc.weight"):
            out[name] = value[:D]
        elif inner.endswith(("q_norm.weight", "k_norm.weight")):
            out[name] = value
        else:
            out[name] = value[..., :D]
    return replace(case, config=_config(case, hidden_size=D, target_hidden_size=own_target), tensors=out)


def narrower_target(case: Case) -> Case:
    """Half of the target's channels."""
    Dt = case.hidden_states.shape[-1]
    fc = case.tensors["fc.weight"].reshape(len(case.tensors["fc.weight"]), -1, Dt)[..., : Dt // 2]
    tensors = case.tensors | {"fc.weight": fc.reshape(len(fc), -1)}
    config = _config(case, target_hidden_size=Dt // 2)
    return replace(case, config=config, tensors=tensors, hidden_states=case.hidden_states[..., : Dt // 2])


def smaller_vocabulary(case: Case) -> Case:
    """Half of the token ids; anchors are folded into it and the last row becomes the mask's."""
    V, mask = case.config["vocab_size"] // 2, case.config["dflash_config"]["mask_token_id"]
    embed, head = case.tensors["embed_tokens.weight"], case.tensors["lm_head.weight"]
    embed = np.concatenate([embed[: V - 1], embed[mask : mask + 1]])
    folded = {name: case.columns[name] % (V - 1) for name in ("last_sampled", "next_prefill")}
    config = _config(case, vocab_size=V, dflash_config={**case.config["dflash_config"], "mask_token_id": V - 1})
    tensors = case.tensors | {"embed_tokens.weight": exact(embed), "lm_head.weight": head[:V]}
    return replace(case, config=config, tensors=tensors, columns=case.columns | folded)


def fewer_pages(case: Case) -> Iterator[Case]:
    """Without the pages that no request uses, but for the last one, which shows what wraps; and narrower tables."""
    tables, P = case.columns["block_tables"], case.pool.shape[2]
    ends = case.columns["start_position"] + case.columns["num_context"] - case.columns["num_rejected"]
    longest = min(int(ends.max()) + case.num_speculative_tokens + 1, case.max_model_len)
    width = -(-longest // case.page_size)
    needed = [-(-min(int(e) + case.num_speculative_tokens + 1, case.max_model_len) // case.page_size) for e in ends]
    tables = np.stack(
        [np.where(np.arange(width) < count, row[:width], 0) for row, count in zip(tables, needed, strict=True)]
    )
    used = sorted({0, P - 1, *map(int, tables.reshape(-1))})
    if len(used) < P:
        new = np.zeros(P, np.int32)
        new[used] = np.arange(len(used))
        yield replace(case, pool=case.pool[:, :, used], columns=case.columns | {"block_tables": new[tables]})
