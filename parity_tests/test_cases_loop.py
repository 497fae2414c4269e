"""cases.md, the greedy loop around a target: what is accepted, emitted and handed to the drafter. Framework-free."""

from types import SimpleNamespace

import numpy as np
import pytest

from jax_dflash.greedy_loop import GreedyLoop
from jax_dflash.sampling import greedy_verify
from jax_dflash.target_batch import TargetOutput
from parity_tests.engines import CONFIG, features, make_engine, one_thread, step_for
from parity_tests.tiny import numpy

__all__ = ["one_thread"]
MASK = 7


class ScriptedTarget:
    """A target whose next tokens are written down, call by call, row by row, behind the real verification."""

    def __init__(self, *calls: list[int]):
        self.calls, self.inputs = list(calls), []
        self.limits = SimpleNamespace(max_num_seqs=1, table_width=2)

    def run(self, batch):
        self.inputs.append((list(batch.start), [list(each) for each in batch.tokens]))
        (rows,), (num_drafts,), own = batch.tokens, batch.num_drafts, self.calls.pop(0)
        assert len(own) == len(rows)
        verified = len(rows) - 1 - num_drafts
        tokens, num_sampled = greedy_verify(
            np.eye(10, dtype=np.float32)[own[verified:]][None],
            np.array([rows[verified + 1 :]], np.int32),
            np.array([num_drafts]),
        )
        features = np.arange(len(own), dtype=np.float32)[:, None]
        return TargetOutput(tokens=np.asarray(tokens), num_sampled=np.asarray(num_sampled), features=features)


def columns(step):
    names = ("num_context", "num_rejected", "num_sampled", "last_sampled", "next_prefill")
    return {name: getattr(step, name).tolist() for name in names}


def test_acceptance_arithmetic():
    """Drafts [4, 5, 6] against the target's [4, 5, 9, 8]: a bonus token from the wrong row, rejected rows counted as
    context, an anchor that was not emitted."""
    target = ScriptedTarget([0, 3], [4, 5, 9, 8], [1, 1])
    loop = GreedyLoop(target, [[1, 2]], max_new_tokens=20, chunk=8, eos=())
    loop.advance()
    step = loop.live[0]
    assert step.generated == [3]
    step.drafts = [4, 5, 6]
    made = loop.advance().step
    assert columns(made) == {
        "num_context": [4], "num_rejected": [1], "num_sampled": [3], "last_sampled": [9], "next_prefill": [0]
    }  # fmt: skip
    assert step.generated == [3, 4, 5, 9]
    assert step.computed == 5  # the prompt's 2, the old anchor 3, and the accepted 4 and 5
    step.drafts = [2]
    loop.advance()
    assert target.inputs[-1] == ([5], [[9, 2]])


def test_a_real_token_that_equals_the_mask_id_stays():
    """C11: the unwritten tail taken away by value instead of by length. The mask id is in the prompt and in the output."""
    target = ScriptedTarget([0, 0, 0, 3], [MASK, 5, 1])
    loop = GreedyLoop(target, [[1, MASK, 2, MASK]], max_new_tokens=3, chunk=8, eos=())
    loop.advance()
    loop.live[0].drafts = [MASK, 5]
    loop.advance()
    answer = loop.finished[0]
    assert answer.tokens[:7] == [1, MASK, 2, MASK, 3, MASK, 5]
    assert target.inputs[0] == ([0], [[1, MASK, 2, MASK]])


@pytest.mark.parametrize("drafts, own, emitted", [
    ([4, 5, 6], [4, 5, 6, 8], [4, 5, 6, 8]),
    ([4, 5, 6], [9, 5, 6, 8], [9]),
    ([4, 5, 6], [4, 9, 6, 8], [4, 9]),
    ([4, 5, 6], [4, 5, 9, 8], [4, 5, 9]),
])  # fmt: skip
def test_the_first_rejection_ends_the_step(drafts, own, emitted):
    """Drafts accepted behind a rejected one because they happen to match, or a full block without its bonus token."""
    loop = GreedyLoop(ScriptedTarget([3], own), [[1]], max_new_tokens=20, chunk=8, eos=())
    loop.advance()
    loop.live[0].drafts = drafts
    made = loop.advance().step
    assert loop.live[0].generated == [3, *emitted]
    assert columns(made)["num_rejected"] == [4 - len(emitted)]
    assert columns(made)["last_sampled"] == [emitted[-1]]


def test_an_end_token_among_accepted_drafts_ends_the_answer():
    """Text behind the end token, accepted in the same step."""
    loop = GreedyLoop(ScriptedTarget([3], [4, 0, 6, 8]), [[1]], max_new_tokens=20, chunk=8, eos=(0, 5))
    loop.advance()
    loop.live[0].drafts = [4, 0, 6]
    made = loop.advance()
    assert made.step is None and loop.finished[0].generated == [3, 4, 0]


@pytest.mark.parametrize("kind", ["jax", "torch", "torch_static"])
def test_the_mask_id_is_a_token_like_any_other_to_the_engine(kind):
    """C11: an anchor that equals the mask id refused or taken for an empty row."""
    engine = make_engine(kind)
    engine.add_request(0)
    drafts = engine.propose(step_for([0], 4, last=CONFIG.mask_token_id), features(4))
    assert drafts.shape == (1, 3) and engine.requests.requests[0].context_len == 4


def test_mask_id_is_drafted_where_it_wins(f):
    """C11: a draft of the mask id replaced or dropped."""
    logits = np.zeros((2, 3, CONFIG.geometry.vocab_size))
    logits[..., CONFIG.mask_token_id] = 1
    assert numpy(f.sampling.greedy(f.floats(logits))).tolist() == [[CONFIG.mask_token_id] * 3] * 2
