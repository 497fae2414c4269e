"""Layers of several windows: a pool, block tables and pages for each window (cases.md, C46, C49)."""

import functools
from dataclasses import replace

import numpy as np
import pytest
import torch

import jax_dflash.engine
import torch_ref.engine
from jax_dflash.batch import EngineConfig, IntsLayout
from jax_dflash.buckets import BucketLadder
from jax_dflash.config import InputError
from jax_dflash.request_table import RequestTable
from jax_dflash.taps import live_part, tap_table
from parity_tests.engines import one_thread, set_pool, step_for  # noqa: F401
from parity_tests.harness import case as cases
from parity_tests.harness import runners
from parity_tests.tiny import DRAFT, FRAMEWORKS, WINDOWED, draft_weights, numpy


def windows(*sizes):
    """DRAFT with layers of these windows, to both sides."""
    layers = zip(DRAFT.layers, sizes, strict=True)
    return replace(DRAFT, layers=tuple(replace(layer, window=window) for layer, window in layers))


SANDWICH = windows(4, None, 4)
K, PAGE, LENGTH = 3, 2, 64


def make_engine(framework: str, config=SANDWICH, **options):
    """A captured engine of three requests, one bucket, and at most 12 rows a step."""
    arguments = {
        "max_num_seqs": 3, "max_model_len": LENGTH, "num_speculative_tokens": K, "page_size": PAGE,
        "max_num_batched_tokens": 12, "ladder": BucketLadder([12], max_num_seqs=3, query_lens=K + 1), "taps": 1,
    }  # fmt: skip
    package = {"jax": jax_dflash.engine, "torch": torch_ref.engine}[framework]
    more = {"attention": "dense"} if framework == "torch" else {}
    weights = draft_weights(FRAMEWORKS[framework], config)
    engine = package.DraftEngine(config, weights, **arguments | more | options)
    engine.capture(progress=False)
    return engine


@functools.cache
def whole_engine(framework: str):
    """An engine that is given its tables, shared by the tests."""
    return make_engine(framework, external_pages=True, num_pages=1 + 3 * LENGTH // PAGE)


def make_table(config=SANDWICH, external_pages=False, **options):
    sizes = {"max_num_seqs": 3, "max_model_len": LENGTH, "num_speculative_tokens": K, "page_size": PAGE}
    return RequestTable(EngineConfig.make(config, **sizes | options), external_pages=external_pages)


def features(rows: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, DRAFT.feature_size)).astype(np.float32)


def test_layers_of_one_window_are_a_group():
    """Groups of neighbours only (three here), in order of size, or split by direction, which changes no page."""
    assert DRAFT.page_groups == ((None, (0, 1, 2)),)
    assert SANDWICH.page_groups == ((4, (0, 2)), (None, (1,)))
    assert SANDWICH.layer_places == ((0, 0), (1, 0), (0, 1))
    assert WINDOWED.page_groups == ((4, (0,)), (6, (1,)), (None, (2,)))
    first = replace(SANDWICH.layers[0], causal=True)
    assert replace(SANDWICH, layers=(first, *SANDWICH.layers[1:])).page_groups == SANDWICH.page_groups


def test_pages_of_a_window():
    """C49: 12 keys of context, a window of 4, a block of 4, pages of 2. The anchor at 12 sees keys 9 to 15: columns 4 to 7;
    one column less is a null page inside the live window. Then 3 more tokens: keys 12 to 18, columns 6 to 9."""
    table = make_table()
    table.add(0)
    tables = table.reserve(step_for([0], 12))["block_tables"]
    assert tables[:, 0].tolist() == [[0, 0, 0, 0, 1, 2, 3, 4], [1, 2, 3, 4, 5, 6, 7, 8]]
    tables = table.reserve(step_for([0], 4, 1))["block_tables"]
    assert tables[0, 0].tolist() == [0, 0, 0, 0, 0, 0, 3, 4, 1, 2]
    assert tables[1, 0].tolist() == list(range(1, 11))
    table.remove(0)
    assert [allocator.num_free for allocator in table.allocators] == [n - 1 for n in table.config.num_pages]


def test_default_number_of_pages():
    """A pool of max_model_len for a window: 7 keys lie in 4 pages of 2, and of 5 in 3 at most (1 + 5 + 1)."""
    assert make_table().config.num_pages == (1 + 3 * 4, 1 + 3 * 32)
    assert make_table(page_size=5).config.num_pages == (1 + 3 * 3, 1 + 3 * 13)
    assert make_table(windows(100, None, 100)).config.num_pages == (1 + 3 * 32, 1 + 3 * 32)
    assert make_table(num_pages=50).config.num_pages == (50, 50)
    with pytest.raises(InputError, match="2 page groups"):
        make_table(num_pages=[1, 2, 3])


def test_at_the_length_limit_the_window_is_that_of_the_attention():
    """Attention counts the block's rows back from the last key: with 63 of 64 positions taken the anchor's row is key 60,
    whose window begins at 57, not at 60: column 28."""
    table = make_table()
    table.add(0)
    for count in (30, 30, 3):
        tables = table.reserve(step_for([0], count))["block_tables"]
    assert np.flatnonzero(tables[0, 0]).tolist() == [28, 29, 30, 31]


def test_a_refused_step_gives_back_no_page():
    """Pages of the windowed group given back before the full group turns out to have too few."""
    table = make_table(num_pages=[20, 9])  # 8 pages of 2: 12 tokens and a block
    table.add(0)
    table.reserve(step_for([0], 12))
    before = repr(table.requests), [allocator.num_free for allocator in table.allocators]
    with pytest.raises(InputError, match="needs 2 more pages of 2 tokens, 0 are free"):
        table.reserve(step_for([0], 4))
    assert (repr(table.requests), [allocator.num_free for allocator in table.allocators]) == before


def test_pages_that_one_request_gives_back_serve_another_in_the_same_step():
    """A step refused for want of pages that it frees itself."""
    table = make_table(num_pages=[9, 100])  # two windows of four pages
    for i in range(2):
        table.add(i)
        table.reserve(step_for([i], 12))
    tables = table.reserve(step_for([0, 1], 8))["block_tables"]
    assert sorted(tables[0][tables[0] > 0].tolist()) == list(range(1, 9))


def test_a_step_back_before_what_a_window_kept_is_refused():
    """A rewound request whose window reads pages that were given back. From its first key on the rows may come again."""
    table = make_table()
    table.add(0)
    table.reserve(step_for([0], 20))  # keys 17 on are held: from column 8, key 16
    with pytest.raises(
        InputError, match="sees keys from position 13 on, those before 16 are gone; pass start_position=13"
    ):
        table.reserve(step_for([0], 2, start_position=np.array([14])))
    assert table.requests[0].context_len == 20
    table.reserve(step_for([0], 3, start_position=np.array([13])))
    assert (table.requests[0].context_len, table.requests[0].pages[0].first) == (16, 6)


def test_pages_behind_a_cached_prompt():
    """Pages held for tokens that nobody sees, or a window that begins before them: 10 of 12 tokens were restored, so that
    both groups begin with key 10 (column 5); 5 tokens more, and the window begins at key 14 (column 7)."""
    table = make_table()
    table.add(0, 12, cached_tokens=10)
    tables = table.reserve(step_for([0], 2))["block_tables"]
    assert tables[:, 0].tolist() == [[0] * 5 + [1, 2, 3]] * 2
    columns = table.reserve(step_for([0], 5))
    assert np.flatnonzero(columns["block_tables"][0, 0]).tolist() == [7, 8, 9, 10]
    assert np.flatnonzero(columns["block_tables"][1, 0]).tolist() == [5, 6, 7, 8, 9, 10]
    assert columns["first_context_position"].tolist() == [10]


def test_a_gap_is_never_uncovered():
    """Keys of a gap, which nobody stored, seen once a later step lowers first_context_position."""
    table = make_table()
    table.add(0)
    table.reserve(step_for([0], 4))
    table.reserve(step_for([0], 4, start_position=np.array([21]), first_context_position=np.array([21])))
    assert table.requests[0].pages[1].first == 10
    with pytest.raises(InputError, match="sees keys from position 0 on, those before 21 are gone"):
        table.reserve(step_for([0], 4, first_context_position=np.array([0])))


def test_rows_that_run_after_all_begin_the_context():
    """A cached prompt that the target runs again: keys from its new start on are stored, and must be seen."""
    table = make_table()
    table.add(0, 12, cached_tokens=10)
    columns = table.reserve(step_for([0], 12, start_position=np.array([0])))
    assert columns["first_context_position"].tolist() == [0]
    assert columns["block_tables"][1, 0].tolist() == list(range(1, 9))


def test_slots_of_each_group(f):
    """All groups' rows in one group's pages. Two tables of one request: 2 context rows at 4, a block of 4 at 6; and a
    column that nobody packed is 0, not what the buffer held."""
    layout = IntsLayout(2, 5, num_groups=2)
    columns = {
        "start_position": [4], "num_context": [2], "num_sampled": [1], "last_sampled": [50], "request_index": [0],
        "block_tables": np.array([[[0, 0, 5, 2, 7]], [[1, 4, 6, 8, 9]]]),
    }  # fmt: skip
    sizes = {"context_rows": 3, "query_len": 4, "mask_token_id": 59, "page_size": 2, "max_model_len": LENGTH}
    ints = layout.pack(columns, 2)
    inputs = f.run(lambda ints: f.inputs.prepare_inputs(layout.unpack(ints), **sizes), f.ints(ints))
    assert numpy(inputs.context_slots).tolist() == [[10, 11, -1], [12, 13, -1]]
    assert numpy(inputs.query_slots).tolist() == [[4, 5, 14, 15] + [-1] * 4, [16, 17, 18, 19] + [-1] * 4]
    for name in ("num_rejected", "next_prefill", "first_context_position", "temperature_bits", "seed"):
        assert layout.unpack(ints)[name].tolist() == [0, 0]


def sliding_case(windows=(None, None), causal=True):
    """Requests whose stored context begins late, or not at all, with layers of these windows."""
    requests = [cases.Request(6, 2, cached=6), cases.Request(21, 5, 2, 3, cached=9), cases.Request(8, 6, sampled=0)]
    case = cases.build("cached", requests)
    types = ["full_attention" if window is None else "sliding_attention" for window in windows]
    sliding = {"sliding_window": next(filter(None, windows), None), "is_causal": causal}
    return replace(case, config=case.config | {"layer_types": types} | (sliding if any(windows) else {}))


@pytest.mark.parametrize(
    "runner, windows, causal",
    [
        ("jax", (None, 6), False),
        ("torch.eager", (None, 6), False),
        ("torch.eager", (6, None), True),
        ("torch.eager", (None, None), False),
    ],
)
def test_hidden_context_against_the_oracle(runner, windows, causal):
    """C46, C49: restored keys seen, the bound off by one, lost in windowed or in full layers, or one that hides rows of
    another request; integers, pools and layers of several groups out of order. Restored rows of the pool are NaN."""
    case = sliding_case(windows, causal)
    assert len(runners.draft_config(case).page_groups) == len(set(windows))
    dtype, limit = ("float64", 1e-11) if runner == "torch.eager" else ("float32", 1e-5)
    right, found = runners.oracle(case), runners.runner(runner)(case, dtype, rerun=False)
    for tap in tap_table(case.num_layers):
        a, b = (live_part(tap, trace[tap.name], case.live_reqs, case.live_rows) for trace in (found, right))
        assert a.shape == b.shape and np.array_equal(np.isnan(a), np.isnan(b)), tap.name
        np.testing.assert_allclose(
            np.nan_to_num(a), np.nan_to_num(b), atol=limit * np.nanmax(np.abs(b)), err_msg=tap.name
        )
    assert np.isfinite(found["logits"][: case.live_reqs]).all()
    hidden = runners.oracle(replace(case, columns=case.columns | {"first_context_position": np.zeros(3, np.int32)}))
    assert np.isnan(hidden["logits"][:2]).all(), "the case would not notice: nothing hidden is NaN"


def test_a_case_file_from_before_first_context_position(tmp_path):
    """Old case files refused for want of the column, or run with garbage in it."""
    case = cases.mixed()
    old = {name: value for name, value in case.columns.items() if name != "first_context_position"}
    read = cases.load(cases.save(replace(case, columns=old), tmp_path / "old.safetensors"))
    assert read.columns["first_context_position"].tolist() == [0, 0, 0, 0]
    assert cases.digest(read) == cases.digest(case)


def full_tables(num: int) -> np.ndarray:
    """A whole block table for each of `num` requests."""
    return 1 + np.arange(num * LENGTH // PAGE, dtype=np.int32).reshape(num, -1)


@pytest.mark.parametrize("framework", ["jax", "torch"])
def test_a_long_run_in_a_window_s_pages(framework):
    """C49: context that is overwritten or given back while a row still sees it: 60 steps of requests that come and go, in
    the pages that windows need, draft what an engine with whole tables drafts. Pages given back hold NaN in between, and so
    does the null page."""
    rng = np.random.default_rng(0)
    ours = make_engine(framework)
    whole = whole_engine(framework)
    set_pool(ours, np.nan)
    lengths: dict[int, int] = {}
    for number in range(60):
        for i in [i for i, length in lengths.items() if length > 50]:
            del lengths[i]
            ours.remove_request(i)
            whole.remove_request(i)
        if len(lengths) < 3:
            i = next(i for i in range(3) if i not in lengths)
            lengths[i] = 0
            ours.add_request(i)
            whole.add_request(i)
        ids = list(rng.permutation(list(lengths)))
        counts = np.array([4 if lengths[i] else rng.integers(1, 5) for i in ids])
        rejected = np.array([rng.integers(0, 4) if lengths[i] else 0 for i in ids])
        step = step_for(ids, counts, rejected, last=rng.integers(0, 59, len(ids)))
        rows = features(int(counts.sum()), number)
        drafts = ours.propose(step, rows)
        expected = whole.propose(replace(step, block_tables=full_tables(3)[ids]), rows)
        np.testing.assert_array_equal(drafts, expected, err_msg=str(number))
        hidden, right = (numpy(engine.last_taps["hidden"])[: len(ids)] for engine in (ours, whole))
        np.testing.assert_allclose(hidden, right, atol=1e-5)
        for i, count in zip(ids, counts - rejected, strict=True):
            lengths[i] += int(count)
        used = [
            pages - 1 - a.num_free for pages, a in zip(ours.config.num_pages, ours.requests.allocators, strict=True)
        ]
        assert used[0] <= 4 * len(ids) and used[1] == sum(-(-(length + K + 1) // PAGE) for length in lengths.values())
    for i in lengths:
        whole.remove_request(i)
    null = [numpy(pool)[:, :, 0] for pool in ours.state.pools]
    assert all(np.isnan(page).all() for page in null), "the null page was written"


@pytest.mark.parametrize("framework", ["jax", "torch"])
def test_tables_of_each_group(framework):
    """C49: the tables of the groups mixed up, or pages outside a window read though they are null. One table for all groups
    and one for each draft the same; a null page inside the live window is refused by name."""
    engine = whole_engine(framework)
    drafts, whole = [], full_tables(1)
    tables = np.stack([whole, whole + 32])
    tables[0, 0, :4] = 0
    for given in (whole, tables):
        set_pool(engine, np.nan)
        engine.add_request(0)
        drafts.append(engine.propose(step_for([0], 12, block_tables=given), features(12)).tolist())
        assert np.isfinite(numpy(engine.last_taps["hidden"])).all()
        engine.remove_request(0)
    assert drafts[0] == drafts[1]
    engine.add_request(0)
    tables[0, 0, 4] = 0
    with pytest.raises(InputError, match=r"no page for position 9; its block sees positions 9 to 15"):
        engine.propose(step_for([0], 12, block_tables=tables), features(12))
    with pytest.raises(InputError, match=r"block_tables has shape \[3, 1, 32\], expected \[1, .*\[2 page groups, 1"):
        engine.propose(step_for([0], 12, block_tables=np.stack([whole] * 3)), features(12))
    engine.remove_request(0)


def test_eager_pytorch_begins_with_the_chunk_that_a_window_sees(monkeypatch):
    """A windowed layer of eager PyTorch that gathers the keys before its window: 300 of context, chunks of 256 keys."""
    options = {"max_model_len": 400, "max_num_batched_tokens": 300, "max_num_seqs": 1, "page_size": 16}
    config = replace(SANDWICH, geometry=replace(SANDWICH.geometry, max_position_embeddings=512))
    engine, dense = make_engine("torch", config, **options), torch_ref.draft_step.dense
    engine.add_request(0)
    found, right = [], dense.find_keys

    def find_keys(*args):
        found.append(right(*args))
        return found[-1]

    monkeypatch.setattr(dense, "find_keys", find_keys)
    engine.propose(step_for([0], 300), features(300))
    assert [keys.slots.shape[1] for keys in found] == [304 - 256, 304]
    assert torch.isfinite(engine.last_taps["hidden"][0]).all()
