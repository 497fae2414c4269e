"""The bucket ladder against vLLM's golden values, and the engine's own ladder without holes."""

import pytest

from jax_dflash.buckets import (
    BatchDescriptor,
    BucketLadder,
    GraphMode,
    row_bucket_sizes,
    uniform_token_count,
    vllm_default_sizes,
)
from jax_dflash.config import InputError

FULL, PIECEWISE, NONE = GraphMode.FULL, GraphMode.PIECEWISE, GraphMode.NONE


@pytest.fixture
def mixed():
    return BucketLadder([1, 2, 4, 8, 16, 24], max_num_seqs=8, query_lens=3, mode=GraphMode.FULL_AND_PIECEWISE)


def full_reqs(ladder: BucketLadder) -> list[int | None]:
    return [d.num_reqs for d in ladder.capture_order(FULL)]


def default_ladder(max_num_seqs: int, num_speculative_tokens: int) -> BucketLadder:
    return BucketLadder.vllm_default(
        max_num_seqs=max_num_seqs, num_speculative_tokens=num_speculative_tokens, max_num_batched_tokens=8192
    )


@pytest.mark.parametrize(
    ("mode", "decode", "mixed_mode", "separate"),
    [
        (NONE, NONE, NONE, False),
        (PIECEWISE, PIECEWISE, PIECEWISE, False),
        (FULL, FULL, FULL, False),
        (GraphMode.FULL_DECODE_ONLY, FULL, NONE, True),
        (GraphMode.FULL_AND_PIECEWISE, FULL, PIECEWISE, True),
    ],
)
def test_modes(mode, decode, mixed_mode, separate):
    """A composite mode with its two halves swapped would run mixed batches in uniform programs."""
    assert (mode.decode_mode(), mode.mixed_mode(), mode.separate_routine()) == (decode, mixed_mode, separate)


def test_capture_order(mixed):
    """Smallest first makes every later, larger program allocate anew; unrounded sizes give no whole requests."""
    assert mixed.capture_order(FULL) == [
        BatchDescriptor(FULL, tokens, reqs, 3) for tokens, reqs in [(24, 8), (18, 6), (9, 3), (6, 2), (3, 1)]
    ]
    assert [d.num_tokens for d in mixed.capture_order(PIECEWISE)] == [24, 16, 8, 4, 2, 1]


def test_each_mode_has_its_own_ladder(mixed):
    """One ladder over both modes' sizes sends this uniform batch to PIECEWISE 16 although FULL 18 covers it."""
    full, piecewise = BatchDescriptor(FULL, 18, 6, 3), BatchDescriptor(PIECEWISE, 16, None)
    assert mixed.candidates[12] == [full, piecewise]
    assert mixed.dispatch(4, 12, 3) == full


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        ((3, 9, 3), BatchDescriptor(FULL, 9, 3, 3)),
        ((2, 12, None), BatchDescriptor(PIECEWISE, 16, None)),
        ((2, 3, None), BatchDescriptor(PIECEWISE, 4, None)),
        ((2, 6, None), BatchDescriptor(PIECEWISE, 8, None)),
        ((2, 9, None), BatchDescriptor(PIECEWISE, 16, None)),
        ((2, 18, None), BatchDescriptor(PIECEWISE, 24, None)),
        ((9, 27, 3), BatchDescriptor(NONE, 27, 9)),
        ((0, 0, None), BatchDescriptor(NONE, 0, 0)),
    ],
)
def test_dispatch(mixed, batch, expected):
    """A uniform program given a batch of unknown lengths misplaces rows; an overfull one padded down loses requests."""
    assert mixed.dispatch(*batch) == expected


def test_own_shape_dispatches_to_itself():
    """With several query lengths, a group of equal token counts must be searched past its first entry."""
    ladder = BucketLadder([2, 4, 6, 8], max_num_seqs=8, query_lens=(1, 2, 3, 4))
    for d in ladder.capture_order(FULL):
        assert d.num_reqs is not None
        assert ladder.dispatch(d.num_reqs, d.num_tokens, d.uniform_token_count) == d
    assert len(ladder.capture_order(FULL)) == 12


@pytest.mark.parametrize(
    ("sizes", "query_len"), [([1, 2, 4, 8], 1), ([2, 4, 8, 16], 2), ([8, 16, 32, 64], 8)]
)  # fmt: skip
def test_smallest_covering_size(sizes, query_len):
    """An off-by-one at a size's edge runs a full bucket in the next larger program."""
    ladder = BucketLadder(sizes, max_num_seqs=8, query_lens=query_len)
    expected = [1, 2, 4, 4, 8, 8, 8, 8]
    for n, reqs in enumerate(expected, start=1):
        assert ladder.dispatch(n, n * query_len, query_len) == BatchDescriptor(
            FULL, reqs * query_len, reqs, query_len
        )  # fmt: skip


def test_dflash_padded_requests():
    """A drafter's padded request count comes from rounded sizes, not from the batch."""
    ladder = BucketLadder([4, 8, 16, 32], max_num_seqs=8, query_lens=4)
    assert [ladder.dispatch(n, 4 * n, 4).num_reqs for n in range(1, 9)] == [1, 2, 4, 4, 8, 8, 8, 8]


def test_rounding_past_the_largest_size_is_dropped():
    """24 rounds up to 25 tokens, more than any static buffer was sized for."""
    ladder = BucketLadder([1, 2, 4, 8, 16, 24], max_num_seqs=8, query_lens=5)
    assert [d.num_tokens for d in ladder.capture_order(FULL)] == [20, 10, 5]
    ladder = BucketLadder(range(1, 25), max_num_seqs=8, query_lens=5)
    assert [d.num_tokens for d in ladder.capture_order(FULL)] == [20, 15, 10, 5]


@pytest.mark.parametrize(
    ("max_num_seqs", "num_speculative_tokens", "expected"),
    [
        (8, 3, [8, 6, 4, 2, 1]),
        (8, 15, [8, 7, 6, 5, 4, 3, 2, 1]),
        (33, 3, [*range(32, 1, -2), 1]),
        (128, 7, [*range(64, 32, -2), *range(32, 0, -1)]),
    ],
)
def test_vllm_default(max_num_seqs, num_speculative_tokens, expected):
    """A ladder unlike vLLM's makes a comparison of padding or of eager steps meaningless."""
    assert full_reqs(default_ladder(max_num_seqs, num_speculative_tokens)) == expected


def test_vllm_default_holes():
    """vLLM's ladder leaves large batches eager: padding them into a smaller bucket would drop requests."""
    assert default_ladder(33, 3).dispatch(33, 132, 4) == BatchDescriptor(NONE, 132, 33)
    ladder = default_ladder(128, 7)
    assert ladder.dispatch(64, 512, 8).mode is FULL
    assert all(ladder.dispatch(n, 8 * n, 8) == BatchDescriptor(NONE, 8 * n, n) for n in range(65, 129))


def test_vllm_default_sizes():
    """The step changes from 8 to 16 at 256, and a small token budget is a size itself."""
    assert vllm_default_sizes(8, 3, 8192) == [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64]
    assert vllm_default_sizes(128, 7, 8192)[-19:-15] == [240, 248, 256, 272]
    assert vllm_default_sizes(8, 3, 37) == [1, 2, 4, 8, 16, 24, 32, 37]


@pytest.mark.parametrize("max_num_seqs", range(1, 129))
def test_without_holes(max_num_seqs):
    """A request count without a bucket compiles or runs eagerly in the middle of serving."""
    ladder = BucketLadder.without_holes(max_num_seqs=max_num_seqs, query_len=7)
    for n in range(1, max_num_seqs + 1):
        d = ladder.dispatch(n, 7 * n, 7)
        assert d.mode is FULL and d.num_reqs is not None and d.num_tokens == 7 * d.num_reqs
        assert n <= d.num_reqs <= max_num_seqs
        assert n < 3 or d.num_reqs <= 1.5 * n
    assert ladder.dispatch(max_num_seqs + 1, 7 * (max_num_seqs + 1), 7).mode is NONE


def test_without_holes_counts():
    """Start-up time is the number of programs: 64 requests must not take more than a dozen."""
    ladder = BucketLadder.without_holes(max_num_seqs=64, query_len=7)
    assert full_reqs(ladder) == [64, 48, 32, 24, 16, 12, 8, 6, 4, 2, 1]
    assert full_reqs(BucketLadder.without_holes(max_num_seqs=5, query_len=7)) == [5, 4, 2, 1]


@pytest.mark.parametrize(
    ("batch", "expected"), [((3, 12, 4), 4), ((3, 11, 4), None), ((3, 12, 5), None), ((1, 1, 1), 1)]
)
def test_uniform_token_count(batch, expected):
    """12 tokens of lengths 5, 4, 3 average 4 but are not uniform."""
    assert uniform_token_count(*batch) == expected


@pytest.mark.parametrize(
    ("max_rows", "expected"), [(100, (16, 32, 64, 100)), (16, (16,)), (10, (10,)), (17, (16, 17)), (64, (16, 32, 64))]
)
def test_row_buckets(max_rows, expected):
    """The largest prefill needs a bucket of exactly max_num_batched_tokens, and none twice."""
    assert row_bucket_sizes(max_rows) == expected


def test_mode_none_has_no_buckets():
    """A ladder that is switched off must not leave programs to capture."""
    ladder = BucketLadder([4, 8], max_num_seqs=2, query_lens=4, mode=NONE)
    assert ladder.candidates == {} and ladder.capture_order(FULL) == []
    assert ladder.dispatch(1, 4, 4).mode is NONE


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"capture_sizes": [4], "max_num_seqs": 0, "query_lens": 4}, "max_num_seqs=0"),
        ({"capture_sizes": [4], "max_num_seqs": 1, "query_lens": 0}, r"query_lens=\[0\]"),
        ({"capture_sizes": [4], "max_num_seqs": 1, "query_lens": ()}, r"query_lens=\[\]"),
        ({"capture_sizes": [8, 4], "max_num_seqs": 1, "query_lens": 4}, r"capture_sizes=\[8, 4\].*ascending"),
        ({"capture_sizes": [4, 4], "max_num_seqs": 1, "query_lens": 4}, "distinct"),
        ({"capture_sizes": [0, 4], "max_num_seqs": 1, "query_lens": 4}, "positive"),
    ],
)
def test_bad_input(arguments, message):
    """Unsorted or empty input builds a ladder that silently runs everything eagerly."""
    with pytest.raises(InputError, match=message):
        BucketLadder(**arguments)
