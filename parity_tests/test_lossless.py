"""The text is the target's own greedy text: a part of the grid of `lossless.py` in which any two of its factors meet."""

import functools
from unittest import mock

import pytest

from jax_dflash.decoding import accepted_length
from jax_dflash.numerics import COMPILER_OPTIONS
from jax_dflash.programs import num_compiles
from parity_tests import lossless
from parity_tests.lossless import BATCHES, DRAFTERS, KS, Cell

PROMPTS, TOKENS = lossless.prompts(8, (1, 3, 9, 16, 33, 50, 70, 110)), 48


@functools.cache
def made(framework: str, K: int, page_size: int):
    """A decoder, its trained draft weights and the target's own texts."""
    # These programs run thousands of times: they are compiled as users' are.
    with mock.patch.dict(COMPILER_OPTIONS, xla_backend_optimization_level=3):
        decoder = lossless.decoder(framework, K, page_size, buckets=(8,))
    return decoder, lossless.draft_weights(decoder), lossless.plain(decoder, PROMPTS, TOKENS)


def cells() -> list[Cell]:
    """JAX with the smallest and the largest K (each is half a minute of compiling), PyTorch with all of them."""
    found = []
    for i, K in enumerate(KS):
        for batch in BATCHES:
            loop = ("host", "device")[(batch + i // 3) % 2]
            # A drafter that is always wrong takes a round a token: it gets large batches.
            drafter = "untrained" if batch in (6, 7) else "perfect" if loop == "host" and batch > 2 else "trained"
            if K in (1, 15):
                found.append(Cell("jax", loop, K, (4, 16)[i // 3], drafter, batch))
            else:
                found.append(Cell("torch", "host", K, (4, 16)[batch % 2], DRAFTERS[batch % 3], batch))
        if K in (1, 15):
            found += [Cell("torch", "host", K, (16, 4)[i // 3], DRAFTERS[batch % 3], batch) for batch in (3, 5)]
    return found


def test_any_two_factors_meet():
    """A covering set that covers less than it says: a fault of one page size with one K would go unseen. What it leaves out
    is `make lossless`'s: the middle Ks in JAX, and what a batch size meets beside K and the loop."""
    exempt = [{"batch", other} for other in ("page_size", "drafter", "framework")]
    exempt += [{"K", "framework"}, {"K", "loop"}]
    grid = lossless.grid()
    for a in range(len(Cell._fields)):
        for b in range(a):
            if {Cell._fields[a], Cell._fields[b]} not in exempt:
                together = {(cell[a], cell[b]) for cell in cells()}
                assert together == {(cell[a], cell[b]) for cell in grid}, (Cell._fields[a], Cell._fields[b])


@pytest.mark.parametrize("cell", cells(), ids=lambda cell: "-".join(map(str, cell)))
def test_the_text_is_the_target_s(cell):
    """A draft accepted that the target would not have made, K/V of a rejected row that is read, a page of another request,
    a text that depends on its batch mates, or a program that compiles on the way."""
    decoder, trained, texts = made(cell.framework, cell.K, cell.page_size)
    compiles = num_compiles()
    found = lossless.run(decoder, cell, trained, PROMPTS, texts, TOKENS)
    assert [g.tokens for g in found] == texts
    assert num_compiles() == compiles
    assert [g.finish_reason for g in found] == ["length"] * len(PROMPTS)
    tau = accepted_length(found)
    if cell.drafter == "perfect":
        # Each verify accepts K drafts until the text ends inside a block: 47 tokens behind the prefill's.
        assert all(a == k for g in found for a, k in list(zip(g.accepted, g.proposed, strict=True))[:-1])
        assert all(len(g.accepted) == -(-(TOKENS - 1) // (cell.K + 1)) for g in found)
    elif cell.drafter == "untrained":
        assert tau < 1.2
    else:
        assert tau > {1: 1.6, 3: 2.5, 7: 3.5, 15: 3.5}[cell.K]
