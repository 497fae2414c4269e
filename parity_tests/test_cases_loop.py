"""cases.md, the greedy loop around a target: what is accepted, emitted and handed to the drafter. Framework-free."""

import numpy as np
import pytest

from jax_dflash.decoding import DecodeLoop
from jax_dflash.sampling import greedy_verify
from jax_dflash.sampling_params import SamplingParams
from jax_dflash.target_batch import TargetOutput
from parity_tests.engines import CONFIG, features, make_engine, one_thread, step_for
from parity_tests.tiny import numpy

__all__ = ["one_thread"]
MASK = 7


class ScriptedTarget:
    """A target whose next tokens are written down, call by call, row by row, behind the real verification."""

    def __init__(self, *calls: list[int]):
        self.calls, self.inputs = list(calls), []

    def run(self, batch, draft_logits=None):
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


class ScriptedDrafter:
    """A drafter whose drafts are written down, step by step; it keeps the steps that it saw."""

    draft_logits = None

    def __init__(self, *drafts: list[int]):
        self.drafts, self.steps = list(drafts), []

    def add_request(self, request_id, num_prompt_tokens=0, cached_tokens=0, params=None):
        pass

    def request_index(self, request_id):
        return 0

    def remove_request(self, request_id):
        pass

    def propose(self, step, features, num_speculative_tokens=None):
        self.steps.append(step)
        return np.array([self.drafts.pop(0)], np.int32)


def make_loop(prompt, target, drafter, K=3, max_new_tokens=20, eos=()):
    """A loop of one request, its prompt already run, and the request."""
    loop = DecodeLoop(
        target, drafter, num_speculative_tokens=K, max_num_seqs=1, max_model_len=32, num_pages=3, chunk=8,
        eos_token_ids=eos,
    )  # fmt: skip
    generation = loop.add(prompt, SamplingParams(max_new_tokens=max_new_tokens))
    loop.step()
    return loop, generation


def columns(step):
    names = ("start_position", "num_context", "num_rejected", "num_sampled", "last_sampled", "next_prefill")
    return {name: getattr(step, name).tolist() for name in names}


def test_acceptance_arithmetic():
    """Drafts [4, 5, 6] against the target's [4, 5, 9, 8]: a bonus token from the wrong row, rejected rows counted as
    context, an anchor that was not emitted."""
    target, drafter = ScriptedTarget([0, 3], [4, 5, 9, 8], [1] * 4), ScriptedDrafter([4, 5, 6], [2, 6, 6], [0] * 3)
    loop, generation = make_loop([1, 2], target, drafter)
    assert generation.generated == [3]
    loop.step()
    assert columns(drafter.steps[-1]) == {
        "start_position": [2], "num_context": [4], "num_rejected": [1], "num_sampled": [3], "last_sampled": [9],
        "next_prefill": [0],
    }  # fmt: skip
    assert generation.generated == [3, 4, 5, 9]
    assert generation.computed == 5  # the prompt's 2, the old anchor 3, and the accepted 4 and 5
    loop.step()
    assert target.inputs[-1] == ([5], [[9, 2, 6, 6]])


def test_a_real_token_that_equals_the_mask_id_stays():
    """C11: the unwritten tail taken away by value instead of by length. The mask id is in the prompt and in the output."""
    target, drafter = ScriptedTarget([0, 0, 0, 3], [MASK, 5, 1]), ScriptedDrafter([MASK, 5])
    loop, generation = make_loop([1, MASK, 2, MASK], target, drafter, K=2, max_new_tokens=3)
    loop.step()
    assert loop.done and generation.tokens == [1, MASK, 2, MASK, 3, MASK, 5]
    assert target.inputs[0] == ([0], [[1, MASK, 2, MASK]])


@pytest.mark.parametrize("drafts, own, emitted", [
    ([4, 5, 6], [4, 5, 6, 8], [4, 5, 6, 8]),
    ([4, 5, 6], [9, 5, 6, 8], [9]),
    ([4, 5, 6], [4, 9, 6, 8], [4, 9]),
    ([4, 5, 6], [4, 5, 9, 8], [4, 5, 9]),
])  # fmt: skip
def test_the_first_rejection_ends_the_step(drafts, own, emitted):
    """Drafts accepted behind a rejected one because they happen to match, or a full block without its bonus token."""
    drafter = ScriptedDrafter(drafts, [0] * 3)
    loop, generation = make_loop([1], ScriptedTarget([3], own), drafter)
    loop.step()
    assert generation.generated == [3, *emitted]
    assert columns(drafter.steps[-1])["num_rejected"] == [4 - len(emitted)]
    assert columns(drafter.steps[-1])["last_sampled"] == [emitted[-1]]


def test_an_end_token_among_accepted_drafts_ends_the_answer():
    """Text behind the end token, accepted in the same step."""
    drafter = ScriptedDrafter([4, 0, 6])
    loop, generation = make_loop([1], ScriptedTarget([3], [4, 0, 6, 8]), drafter, eos=(0, 5))
    loop.step()
    assert len(drafter.steps) == 1 and loop.done and generation.generated == [3, 4, 0]


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
