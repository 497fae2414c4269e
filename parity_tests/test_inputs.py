"""prepare_inputs in both frameworks: literal values of the published examples, then bit-equality on random batches."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_dflash.batch import IntsLayout
from parity_tests.tiny import FRAMEWORKS


def prepare(f, *, num_reqs, width, context_rows, num_rows=None, page_size=4, **options):
    """Inputs of a step given column by column; unnamed columns are zeros, unnamed requests are padding."""
    columns = {name: options.pop(name) for name in (*IntsLayout.PER_REQUEST, "block_tables") if name in options}
    n = len(columns["block_tables"])
    defaults = dict.fromkeys(IntsLayout.PER_REQUEST, np.zeros(n, np.int32)) | {"request_index": np.arange(n)}
    columns = {name: np.asarray(value, np.int32) for name, value in (defaults | columns).items()}
    num_rows = int(columns["num_context"].sum()) if num_rows is None else num_rows
    layout = IntsLayout(num_reqs, width)
    run = _prepare(f.name, layout, tuple((options | {"context_rows": context_rows, "page_size": page_size}).items()))
    inputs = run(f.ints(layout.pack(columns, num_rows)))
    values = {name: np.asarray(value) for name, value in inputs._asdict().items()}
    return {name: (value[0] if name.endswith("slots") else value).tolist() for name, value in values.items()}


@functools.cache
def _prepare(framework, layout, options):
    """prepare_inputs of a packed array; in JAX compiled once per bucket."""
    f = FRAMEWORKS[framework]

    def run(ints):
        return f.inputs.prepare_inputs(layout.unpack(ints), **dict(options))

    return jax.jit(run) if framework == "jax" else run


FIXTURE = {
    "width": 4, "context_rows": 6, "query_len": 4, "mask_token_id": 99, "max_model_len": 16,
    "start_position": [4, 0], "num_context": [4, 2], "num_rejected": [1, 0], "num_sampled": [1, 0],
    "last_sampled": [50, 0], "next_prefill": [0, 60], "block_tables": [[5, 2, 7, 0], [3, 6, 0, 0]],
}  # fmt: skip


def test_a_decode_with_a_rejected_row_beside_a_prefill(f):
    """A rejected row that writes K/V, a block that starts after rejected rows, an anchor from the wrong source, or
    sample rows that count the anchor."""
    assert prepare(f, num_reqs=2, **FIXTURE) == {
        "context_positions": [4, 5, 6, 0, 0, 1],
        "context_slots": [8, 9, 10, -1, 12, 13],
        "input_ids": [50, 99, 99, 99, 60, 99, 99, 99],
        "query_positions": [7, 8, 9, 10, 2, 3, 4, 5],
        "query_slots": [11, 28, 29, 30, 14, 15, 24, 25],
        "query_start_loc": [0, 4, 8],
        "seq_lens": [11, 6],
        "sample_indices": [1, 2, 3, 5, 6, 7],
        "sample_positions": [8, 9, 10, 3, 4, 5],
        "sample_request": [0, 0, 0, 1, 1, 1],
    }


def test_padding_to_four_requests_and_nine_context_rows(f):
    """Padded requests or rows that write, attend, or name a request."""
    inputs = prepare(f, num_reqs=4, **FIXTURE | {"context_rows": 9})
    assert inputs == {
        "context_positions": [4, 5, 6, 0, 0, 1, 0, 0, 0],
        "context_slots": [8, 9, 10, -1, 12, 13, -1, -1, -1],
        "input_ids": [50, 99, 99, 99, 60, 99, 99, 99] + [0] * 8,
        "query_positions": [7, 8, 9, 10, 2, 3, 4, 5] + [0] * 8,
        "query_slots": [11, 28, 29, 30, 14, 15, 24, 25] + [-1] * 8,
        "query_start_loc": [0, 4, 8, 8, 8],
        "seq_lens": [11, 6, 0, 0],
        "sample_indices": [1, 2, 3, 5, 6, 7] + [0] * 6,
        "sample_positions": [8, 9, 10, 3, 4, 5] + [0] * 6,
        "sample_request": [0, 0, 0, 1, 1, 1] + [-1] * 6,
    }


def test_worked_example_of_the_specification(f):
    """State rows and batch rows mixed up: here they differ (states 3 and 1)."""
    inputs = prepare(
        f, num_reqs=4, width=8, context_rows=9, query_len=4, mask_token_id=500, max_model_len=32,
        start_position=[6, 0], num_context=[4, 5], num_rejected=[2, 0], num_sampled=[2, 0], last_sampled=[66, 0],
        next_prefill=[0, 71], request_index=[3, 1], block_tables=[[5, 6, 7, 0], [9, 10, 11, 0]],
    )  # fmt: skip
    assert inputs == {
        "context_positions": [6, 7, 0, 0, 0, 1, 2, 3, 4],
        "context_slots": [26, 27, -1, -1, 36, 37, 38, 39, 40],
        "input_ids": [66, 500, 500, 500, 71, 500, 500, 500] + [0] * 8,
        "query_positions": [8, 9, 10, 11, 5, 6, 7, 8] + [0] * 8,
        "query_slots": [28, 29, 30, 31, 41, 42, 43, 44] + [-1] * 8,
        "query_start_loc": [0, 4, 8, 8, 8],
        "seq_lens": [12, 9, 0, 0],
        "sample_indices": [1, 2, 3, 5, 6, 7] + [0] * 6,
        "sample_positions": [9, 10, 11, 6, 7, 8] + [0] * 6,
        "sample_request": [3, 3, 3, 1, 1, 1] + [-1] * 6,
    }


@pytest.mark.parametrize(
    "last_valid, max_model_len, table, positions, slots, seq_len, samples",
    [
        (14, 16, [5, 2, 7, 9], [15, 15, 15, 15], [39, -1, -1, -1], 16, [16, 17, 18]),
        (29, 32, [1, 2, 3, 4, 5, 6, 7, 8], [30, 31, 31, 31], [34, 35, -1, -1], 32, [31, 32, 33]),
    ],
)
def test_positions_from_max_model_len_on_write_nothing(
    f, last_valid, max_model_len, table, positions, slots, seq_len, samples
):
    """The block's tail, cut off at the length limit, written over the last page (position 16 has the column of 12)."""
    inputs = prepare(
        f, num_reqs=1, width=len(table), context_rows=1, query_len=4, mask_token_id=99, max_model_len=max_model_len,
        start_position=[last_valid], num_context=[1], num_sampled=[1], last_sampled=[50], block_tables=[table],
    )  # fmt: skip
    assert inputs["query_positions"] == positions
    assert inputs["query_slots"] == slots
    assert inputs["seq_lens"] == [seq_len]
    assert inputs["sample_positions"] == samples


def test_rejected_suffix_in_late_pages(f):
    """Rejected rows that keep their slots, or a block that starts after them; early pages are null."""
    inputs = prepare(
        f, num_reqs=1, width=5, context_rows=4, query_len=3, mask_token_id=123, max_model_len=20, start_position=[10],
        num_context=[4], num_rejected=[2], num_sampled=[2], last_sampled=[99], request_index=[2],
        block_tables=[[0, 0, 7, 8]],
    )  # fmt: skip
    assert inputs["context_positions"] == [10, 11, 0, 0]
    assert inputs["context_slots"] == [30, 31, -1, -1]
    assert inputs["input_ids"] == [99, 123, 123]
    assert inputs["query_positions"] == [12, 13, 14]
    assert inputs["query_slots"] == [32, 33, 34]
    assert (inputs["sample_indices"], inputs["sample_positions"], inputs["sample_request"]) == (
        [1, 2],
        [13, 14],
        [2, 2],
    )


def test_two_requests_with_state_rows_three_and_one(f):
    """Per-request state read by batch row."""
    inputs = prepare(
        f, num_reqs=2, width=8, context_rows=8, query_len=3, mask_token_id=123, max_model_len=32,
        start_position=[10, 20], num_context=[4, 4], num_rejected=[2, 1], num_sampled=[2, 3], last_sampled=[99, 77],
        request_index=[3, 1],
        block_tables=[[0, 0, 7, 8, 0, 0, 0, 0], [0, 0, 0, 0, 0, 4, 6, 0]],
    )  # fmt: skip
    assert inputs["input_ids"] == [99, 123, 123, 77, 123, 123]
    assert inputs["query_positions"] == [12, 13, 14, 23, 24, 25]
    assert inputs["query_slots"] == [32, 33, 34, 19, 24, 25]
    assert inputs["sample_request"] == [3, 3, 1, 1]


def test_the_null_page_is_never_written(f):
    """Context or block rows stored in page 0, which every padded table entry shares."""
    inputs = prepare(
        f, num_reqs=1, width=4, context_rows=4, query_len=4, mask_token_id=99, max_model_len=16, start_position=[2],
        num_context=[4], num_sampled=[1], last_sampled=[50], block_tables=[[0, 7, 0, 0]],
    )  # fmt: skip
    assert inputs["context_slots"] == [-1, -1, 28, 29]
    assert inputs["query_slots"] == [30, 31, -1, -1]


@pytest.mark.parametrize("num_reqs", range(1, 9))
def test_every_padding_of_every_bucket(f, num_reqs):
    """A padding rule that holds only for some n, such as n = N - 1: the live prefix must not depend on the bucket."""
    K, width, M = 2, 4, 3
    prepared = {}
    for n in range(1, num_reqs + 1):
        tables = 1 + np.arange(4 * n).reshape(n, 4)
        inputs = prepare(
            f, num_reqs=num_reqs, width=width, context_rows=num_reqs * M, query_len=K + 1, mask_token_id=59,
            max_model_len=16, start_position=[5] * n, num_context=[M] * n, num_sampled=[1] * n,
            last_sampled=np.arange(n), block_tables=tables,
        )  # fmt: skip
        prepared[n] = inputs
        padded = num_reqs - n
        assert inputs["query_start_loc"] == [min(i, n) * 3 for i in range(num_reqs + 1)]
        assert inputs["seq_lens"] == [11] * n + [0] * padded
        assert inputs["context_slots"][n * M :] == [-1] * padded * M
        assert inputs["query_slots"][n * 3 :] == [-1] * padded * 3
        assert inputs["sample_indices"][n * K :] == [0] * padded * K
        assert inputs["sample_positions"][n * K :] == [0] * padded * K
        assert inputs["sample_request"] == [i for i in range(n) for _ in range(K)] + [-1] * padded * K
    for n, inputs in prepared.items():
        full = prepared[num_reqs]
        for name, each in (("input_ids", 3), ("query_slots", 3), ("context_slots", M), ("sample_positions", K)):
            assert inputs[name][: n * each] == full[name][: n * each], name


def test_context_stored_elsewhere_leaves_no_slot(f):
    """A step whose context a program of its own has stored (num_rows 0) storing its blank rows over it."""
    inputs = prepare(f, num_reqs=2, num_rows=0, **FIXTURE)
    assert inputs["context_slots"] == [-1] * 6
    assert inputs["context_positions"] == [0] * 6
    assert inputs["query_positions"] == [7, 8, 9, 10, 2, 3, 4, 5]


def test_fewer_context_rows_than_the_step_has(f):
    """A step of a bucket that stores only the first C rows: the block must still follow the whole context."""
    inputs = prepare(f, num_reqs=2, **FIXTURE | {"context_rows": 3})
    assert inputs["context_slots"] == [8, 9, 10]
    assert inputs["seq_lens"] == [11, 6]


BUCKETS = [(1, 7, 5), (3, 7, 11), (5, 11, 23)]
OPTIONS = {"query_len": 5, "mask_token_id": 59, "page_size": 3}


@st.composite
def batches(draw):
    """A packed batch of a bucket: any number of live requests, pages in any order, null pages, rejected rows."""
    num_reqs, width, context_rows = bucket = draw(st.sampled_from(BUCKETS))
    n = draw(st.integers(1, num_reqs))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    num_context = rng.integers(1, 8, n)
    columns = {
        "start_position": rng.integers(0, 3 * width - 1, n),
        "num_context": num_context,
        "num_rejected": rng.integers(0, num_context),
        "num_sampled": rng.integers(0, 3, n),
        "last_sampled": rng.integers(0, 50, n),
        "next_prefill": rng.integers(0, 50, n),
        "request_index": rng.permutation(num_reqs)[:n],
        "block_tables": rng.integers(0, 40, (n, draw(st.integers(1, width)))),
    }
    num_rows = draw(st.sampled_from([0, 1, int(num_context.sum())]))
    return bucket, IntsLayout(num_reqs, width).pack(columns, num_rows)


@settings(max_examples=300, deadline=None)
@given(batches())
def test_jax_equals_torch_bit_for_bit(batch):
    """Any difference in integer arithmetic: floor division, clamping, wrap-around, dtype."""
    (num_reqs, width, context_rows), ints = batch
    options = tuple((OPTIONS | {"context_rows": context_rows, "max_model_len": 3 * width - 1}).items())
    on_jax, on_torch = (_prepare(name, IntsLayout(num_reqs, width), options) for name in ("jax", "torch"))
    expected, found = on_jax(jnp.asarray(ints)), on_torch(torch.from_numpy(ints))
    for name, a, b in zip(expected._fields, expected, found, strict=True):
        assert b.dtype is torch.int32 and a.dtype == np.int32, name
        np.testing.assert_array_equal(np.asarray(a), b.numpy(), err_msg=name)
