"""The tiers that are not tap-by-tap judgements: exact identities. Each function returns its faults as lines; none is a pass.

0 weights and inputs, 1b exact arithmetic, 5 identities, 6 compiles. Tiers 1 to 4 are `verdict.compare`, 7 is `mutate`.
"""

from dataclasses import replace

import numpy as np

from jax_dflash.config import parse_draft_config
from jax_dflash.taps import Tap, live_part, tap_table
from parity_tests.harness import case as cases
from parity_tests.harness import metrics, null, runners
from parity_tests.harness.case import Case, Request
from parity_tests.harness.mutations import Modules
from parity_tests.harness.runners import Trace

F64_LIMIT = 1e-12  # of two runs of one float64 function in another order; measured 1e-15


def weights(case: Case) -> list[str]:
    """Tier 0: packing and unpacking gives every tensor back bit for bit, in both frameworks, each exactly once."""
    faults = []
    draft = parse_draft_config(case.config)
    shared = "embed_tokens.weight", "lm_head.weight"
    for framework in ("jax", "torch"):
        m = Modules.of(framework)
        kind = m.numerics.as_dtype("bfloat16")
        values = {name: m.xp.asarray(value.copy()) for name, value in case.tensors.items()}
        values = {name: v.astype(kind) if framework == "jax" else v.to(kind) for name, v in values.items()}
        own = {name: value for name, value in values.items() if name not in shared}
        packed = m.drafter.pack(own, draft, *(values[name] for name in shared))
        back = m.drafter.unpack(packed, draft)
        for name in sorted(back.keys() ^ own.keys()):
            faults.append(f"{framework}: tensor {name} is {'invented' if name in back else 'lost'} by packing")
        plain = {name: runners.numpy_trace({"": value})[""] for name, value in own.items()}
        for name in sorted(back.keys() & own.keys()):
            if not np.array_equal(runners.numpy_trace({"": back[name]})[""], plain[name]):
                faults.append(f"{framework}: tensor {name} comes back changed from packing")
        # Context K and V are packed a second time, in arrays that unpacking does not read.
        layers = range(draft.geometry.num_layers)
        fused = np.concatenate([plain[f"layers.{i}.self_attn.{p}_proj.weight"] for i in layers for p in "kv"])
        norms = np.stack([plain[f"layers.{i}.self_attn.k_norm.weight"] for i in layers])
        for name, found, expected in (
            ("context_kv", packed.context_kv.T if framework == "jax" else packed.context_kv, fused),
            ("context_k_norm", packed.context_k_norm, norms),
        ):
            if not np.array_equal(runners.numpy_trace({"": found})[""], expected):
                faults.append(f"{framework}: {name} is not every layer's own tensors, in order")
    return faults


EXACT_TAPS = ("combined", "context_v", "embeds", "v", "attn", "post_attention", "out", "logits")


def exact_case() -> tuple[Case, Trace]:
    """Small integers, so that every product, sum and store of the linear parts is exact in bfloat16, and queries of zero
    over 8, 16 and 32 keys, so that attention is an exact mean. Returns the case and the values to force."""
    requests = [Request(3, 8), Request(21, 7, 1), Request(0, 3)]
    case = cases.build("exact", requests, seed=5, num_heads=6, num_kv_heads=3, num_reqs=4)
    rng = np.random.default_rng(5)

    def signs(shape, density):
        return (rng.integers(-1, 2, shape) * (rng.random(shape) < density)).astype(np.float32)

    tensors = {n: v if v.ndim == 1 else signs(v.shape, 0.3) for n, v in case.tensors.items()}
    pool = np.where(np.isnan(case.pool), case.pool, rng.integers(-3, 4, case.pool.shape)).astype(np.float32)
    states = rng.integers(-2, 3, case.hidden_states.shape).astype(np.float32)
    case = replace(case, tensors=tensors, pool=pool, hidden_states=states)
    floats = {tap.name for tap in tap_table(case.num_layers) if tap.kind == "float"} - {"features"}
    shapes = {name: value.shape for name, value in runners.oracle(case).items() if name in floats}
    forced = {name: rng.integers(-2, 3, shape).astype(np.float64) for name, shape in shapes.items()}
    forced |= {name: np.zeros(shape) for name, shape in shapes.items() if name.rpartition(".")[2] == "q"}
    return case, forced


def exact_arithmetic(sut: str, device: str = "cpu") -> list[str]:
    """Tier 1b: on integers that bfloat16 holds, the real kernels give the oracle's bits."""
    case, forced = exact_case()
    exact, ours = runners.oracle(case, forced=forced), runners.runner(sut, device)(case, "bfloat16", forced)
    faults = []
    for tap in tap_table(case.num_layers):
        if tap.name.rpartition(".")[2] in EXACT_TAPS:
            a, b = (live_part(tap, t[tap.name], case.live_reqs, case.live_rows) for t in (ours, exact))
            if not np.array_equal(a, b):
                faults.append(
                    f"{sut}: {tap.name} of small integers is not exact: {int((a != b).sum())} of {a.size} differ"
                )
    return faults


def _differences(table, a: Trace, b: Trace, live) -> list[str]:
    return [
        tap.name for tap in table if not np.array_equal(live(tap, a[tap.name]), live(tap, b[tap.name]), equal_nan=True)
    ]


def batch_mates(case: Case, sut: str, dtype: str, device: str = "cpu") -> list[str]:
    """Tier 5: with other features, anchor and stored context in request 0 the others keep their bits in the same bucket."""
    run, rng = runners.runner(sut, device), np.random.default_rng(0)
    rows = case.columns["num_context"][0]
    states = case.hidden_states.copy()
    states[:, :rows] = cases.exact(rng.standard_normal(states[:, :rows].shape))
    anchors = case.columns["last_sampled"].copy()
    anchors[0] = 0
    pages = case.columns["block_tables"][0]
    pages, pool = pages[pages > 0], case.pool.copy()
    pool[:, :, pages] = np.where(
        np.isnan(pool[:, :, pages]), np.nan, cases.exact(rng.standard_normal(pool[:, :, pages].shape))
    )
    other = replace(case, hidden_states=states, pool=pool, columns=case.columns | {"last_sampled": anchors})
    a, b = run(case, dtype), run(other, dtype)

    def mates(tap: Tap, x):
        dims = tap.dims.split()
        if "C" in dims:
            return x[(slice(None),) * dims.index("C") + (slice(rows, case.live_rows),)]
        return x[1 : case.live_reqs] if dims[0] == "B" else x[:0]

    table = [tap for tap in tap_table(case.num_layers) if tap.kind in ("float", "token")]
    return [
        f"{sut} {dtype}: {name} of a request changes with another request" for name in _differences(table, a, b, mates)
    ]


def ahead_of_time(case: Case, dtype: str) -> list[str]:
    """Tier 5: the compiled program gives the bits of `jax.jit` of the same function."""
    a, b = (runners.runner(name)(case, dtype) for name in ("jax", "jax.jitted"))
    names = _differences(
        tap_table(case.num_layers), a, b, lambda tap, x: live_part(tap, x, case.live_reqs, case.live_rows)
    )
    return [f"jax {dtype}: {name} of the compiled program is not jit's" for name in names]


def op_by_op(case: Case) -> list[str]:
    """Tier 5: a bfloat16 program against the same function op by op. RoPE's products are contracted to fused
    multiply-adds inside a program, which turns a rounding now and then, so float taps are held to the ratio; integers
    and drafts are equal."""
    program, single = (runners.runner(name)(case, "bfloat16", rerun=False) for name in ("jax", "jax.op"))
    return _within_band(case, "program against op by op", single, program)


def _within_band(case: Case, what: str, reference: Trace, ours: Trace) -> list[str]:
    """End-to-end ratio within the null's margin, integers equal, decided drafts equal."""
    exact, faults = runners.oracle(case), []
    for tap in tap_table(case.num_layers):
        a, b, truth = (live_part(tap, t[tap.name], case.live_reqs, case.live_rows) for t in (ours, reference, exact))
        if tap.kind == "int" and not np.array_equal(a, b):
            faults.append(f"{what}: {tap.name} differs")
        if tap.kind == "float" and truth.size >= null.FEW and tap.name != "logits":
            rho = metrics.error_ratio(a, b, truth)
            if rho is None or not 1 / LOOSE <= rho <= LOOSE:
                faults.append(f"{what}: {tap.name} has {rho} times the error")
    n = case.live_reqs
    decided = metrics.decided(exact["logits"][:n], reference["logits"][:n], 5)
    if (decided & (ours["draft_tokens"][:n] != reference["draft_tokens"][:n])).any():
        faults.append(f"{what}: a decided draft differs")
    return faults


LOOSE = 1.3  # end-to-end ratios of whole taps of 256 elements and more scatter within 0.77 and 1.30 (99% of draws)


def other_bucket(case: Case, sut: str) -> list[str]:
    """Tier 5: more padded requests and rows change no integer of a live request and no float64 value past 1e-12."""
    wide = replace(case, num_reqs=case.num_reqs + 3, context_rows=case.context_rows + 17)
    a, b = (runners.float64_run(c, sut) for c in (case, wide))
    faults = []
    for tap in tap_table(case.num_layers):
        x, y = (live_part(tap, t[tap.name], case.live_reqs, case.live_rows) for t in (a, b))
        if tap.kind == "int":
            same = np.array_equal(x, y[: len(x)]) or tap.name == "query_start_loc"
        elif tap.kind == "token":
            same = np.array_equal(x, y)
        else:
            same = metrics.relative_rmse(y, x) <= F64_LIMIT
        if not same:
            faults.append(f"{sut}: {tap.name} depends on the bucket")
    return faults


def in_steps(sut: str) -> list[str]:
    """Tier 5: a prompt whose context is stored in two steps drafts what it drafts when stored at once, in float64; the
    first step's block, which the second overwrites, leaves nothing behind."""
    whole = cases.build("whole", [Request(0, 9), Request(4, 3)], seed=7)
    first_rows, second_rows = 4, 5
    columns, rows = whole.columns, int(whole.columns["num_context"][0])

    def part(start, count, pool, sampled) -> Case:
        at = slice(start, start + count)
        changed = {name: value[:1].copy() for name, value in columns.items()}
        changed["start_position"][0], changed["num_context"][0], changed["num_sampled"][0] = start, count, sampled
        return replace(
            whole, columns=changed, hidden_states=whole.hidden_states[:, at], pool=pool, num_reqs=1, context_rows=count
        )

    assert first_rows + second_rows == rows
    first = runners.float64_run(part(0, first_rows, whole.pool, 0), sut)
    second = runners.float64_run(part(first_rows, second_rows, first["pool"], 1), sut)
    once = runners.float64_run(part(0, rows, whole.pool, 1), sut)
    faults = [
        f"{sut}: {n} differs between two steps and one" for n in ("draft_tokens",) if (second[n] != once[n]).any()
    ]
    for name in ("hidden", "logits", "pool"):
        if not metrics.relative_rmse(second[name], once[name]) <= F64_LIMIT:
            faults.append(f"{sut}: {name} differs between context stored in two steps and at once")
    return faults


def compiles() -> list[str]:
    """Tier 6: after capture a traffic of joining and leaving requests compiles nothing, and a shape without a bucket is
    refused."""
    from jax_dflash import drafter
    from jax_dflash.batch import TargetStep
    from jax_dflash.config import InputError
    from jax_dflash.engine import DraftEngine
    from jax_dflash.programs import num_compiles

    case = cases.mixed(num_layers=1)
    m, draft, faults = Modules.of("jax"), parse_draft_config(case.config), []
    values = {name: m.xp.asarray(value) for name, value in case.tensors.items()}
    embed, head = values.pop("embed_tokens.weight"), values.pop("lm_head.weight")
    engine = DraftEngine(draft, drafter.pack(values, draft, embed, head), max_num_seqs=3, max_model_len=64, page_size=4)
    engine.capture(progress=False)
    if any(row.temp_bytes < 0 or row.alias_bytes <= 0 for row in engine.programs.report):
        faults.append("a program reports no donated bytes: its pool is copied")
    rng, before = np.random.default_rng(1), num_compiles()
    lengths: dict[int, int] = {}
    for i in range(40):
        if len(lengths) < 3 and rng.random() < 0.6:
            lengths[i] = 0
            engine.add_request(i)
        for request in [r for r, length in lengths.items() if length > 40]:
            engine.remove_request(request)
            del lengths[request]
        if not lengths:
            continue
        rows = np.array([rng.integers(1, 13) if length == 0 else rng.integers(1, 6) for length in lengths.values()])
        rejected = np.array(
            [rng.integers(0, min(r, 5)) if length else 0 for r, length in zip(rows, lengths.values(), strict=True)]
        )
        n = len(lengths)
        step = TargetStep(
            request_ids=list(lengths), num_context=rows.astype(np.int32), num_rejected=rejected.astype(np.int32),
            num_sampled=np.ones(n, np.int32), last_sampled=np.ones(n, np.int32), next_prefill=np.zeros(n, np.int32),
        )  # fmt: skip
        engine.propose(step, rng.standard_normal((rows.sum(), draft.feature_size)).astype(np.float32))
        for request, r, j in zip(list(lengths), rows, rejected, strict=True):
            lengths[request] += int(r - j)
    if (count := num_compiles() - before) or engine.eager_compiles:
        faults.append(f"{count} compilations after capture")
    try:
        four = np.ones(4, np.int32)
        engine.propose(
            TargetStep(request_ids=[1, 2, 3, 4], num_context=four, num_rejected=0 * four, num_sampled=four,
                       last_sampled=four, next_prefill=four),
            np.zeros((4, draft.feature_size), np.float32),
        )  # fmt: skip
        faults.append("4 requests ran in an engine of 3")
    except InputError:
        pass
    return faults
