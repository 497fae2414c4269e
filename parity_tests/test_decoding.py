"""The loop: what a target over paged K/V emits is what plain decoding emits, whatever is drafted, preempted or cut."""

import itertools

import numpy as np
import pytest

from jax_dflash.config import InputError
from jax_dflash.decoding import DecodeLoop, acceptance_by_position, accepted_length
from jax_dflash.pages import PageAllocator, PrefixCache
from jax_dflash.sampling_params import SamplingParams
from jax_dflash.target_batch import TargetOutput

V = 29


def next_token(history) -> int:
    """A language in which every earlier token counts."""
    return int(np.dot(history, np.arange(1, len(history) + 1) ** 2) % V)


def continuation(prompt, count):
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


class PagedTarget:
    """A target whose K/V is the token itself, one per slot: it reads its history through the block table."""

    def __init__(self, num_pages, page_size):
        self.slots = np.full((num_pages, page_size), -1)
        self.batches = []

    def run(self, batch, draft_logits=None):
        self.batches.append([len(rows) for rows in batch.tokens])
        n, Q = len(batch.tokens), max(batch.num_drafts, default=0) + 1
        tokens, num_sampled = np.zeros((n, Q), np.int32), np.zeros(n, np.int32)
        for i, rows in enumerate(batch.tokens):
            first = batch.start[i]
            for position, token in enumerate(rows, first):
                page = batch.block_tables[i, position // self.slots.shape[1]]
                assert page != 0, "a row in the null page"
                self.slots[page, position % self.slots.shape[1]] = token
            history = self.slots[batch.block_tables[i]].reshape(-1)
            drafts = rows[len(rows) - batch.num_drafts[i] :]
            base = first + len(rows) - len(drafts)
            for k in range(len(drafts) + 1):
                tokens[i, k] = next_token(history[: base + k])
                num_sampled[i] = k + 1
                if k == len(drafts) or drafts[k] != tokens[i, k]:
                    break
        return TargetOutput(tokens=tokens, num_sampled=num_sampled, features=None)


class Drafts:
    """A drafter that is right about its first `right` tokens; it sees every step, as an engine would."""

    def __init__(self, right, prompts, max_new_tokens):
        self.right = right
        self.texts = [list(p) + continuation(p, max_new_tokens + 64) for p in prompts]
        self.live, self.context, self.asked = {}, {}, []

    draft_logits = None

    def request_index(self, request_id):
        return -1

    def add_request(self, request_id, num_prompt_tokens=0, cached_tokens=0, params=None):
        assert request_id not in self.live
        self.live[request_id], self.context[request_id] = num_prompt_tokens, None

    def remove_request(self, request_id):
        del self.live[request_id]

    def propose(self, step, features, num_speculative_tokens=None):
        K = num_speculative_tokens
        self.asked.append(K)
        drafts = np.zeros((len(step.request_ids), K), np.int32)
        for i, request_id in enumerate(step.request_ids):
            start = step.start_position[i] if self.context[request_id] is None else self.context[request_id]
            assert step.start_position[i] == start, "a gap in the context"
            self.context[request_id] = start + step.num_context[i] - step.num_rejected[i]
            text, at = self.texts[request_id], self.context[request_id]
            anchor = step.last_sampled[i] if step.num_sampled[i] else step.next_prefill[i]
            assert text[at] == anchor, "the anchor is not the token after the context"
            drafts[i] = [text[at + 1 + k] if k < self.right else (text[at + 1 + k] + 1) % V for k in range(K)]
        return drafts


def decode(
    prompts, right, K=3, max_new_tokens=20, page_size=4, num_pages=64, drafter=True, params=None, target=None, **options
):
    drafts = Drafts(right, prompts, max_new_tokens) if drafter else None
    target = target or PagedTarget(num_pages, page_size)
    sizes = {"max_num_seqs": 3, "max_model_len": 96, "chunk": 5} | options
    loop = DecodeLoop(target, drafts, num_speculative_tokens=K, num_pages=num_pages, page_size=page_size, **sizes)
    for prompt in prompts:
        loop.add(prompt, params or SamplingParams(max_new_tokens=max_new_tokens))
    return loop, loop.run(), drafts


PROMPTS = [[3, 1, 4, 1, 5], [9], [2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8], [4, 6], [2] * 7]


@pytest.mark.parametrize("right", [0, 1, 3])
@pytest.mark.parametrize("K", [1, 3, 7])
def test_output_is_plain_decoding_s(K, right):
    """A draft accepted that the target would not have made, or context that parts from the text after a rejection."""
    loop, found, _ = decode(PROMPTS, right, K)
    assert [g.generated for g in found] == [continuation(p, 20) for p in PROMPTS]
    assert all(g.finish_reason == "length" for g in found)
    assert loop.allocator.num_free == 63 and not loop.live


def test_accepted_lengths_of_known_drafters():
    """Counting the bonus token twice, or a verify that was cut: 20 tokens are 1 of the prefill and 19 in blocks of 4."""
    _, found, _ = decode([PROMPTS[0]], right=3, K=3, max_new_tokens=21)
    assert found[0].accepted == [3] * 5 and found[0].proposed == [3] * 5
    assert accepted_length(found) == 4 and acceptance_by_position(found) == [1, 1, 1]
    _, found, _ = decode([PROMPTS[0]], right=1, K=3, max_new_tokens=21)
    assert accepted_length(found) == 2 and acceptance_by_position(found) == [1, 0, 0]


def test_requests_join_and_leave():
    """Batch mates that change a text: five prompts through three places, one admitted a step."""
    loop, found, _ = decode(PROMPTS, right=2, joins_per_step=1)
    assert [g.generated for g in found] == [continuation(p, 20) for p in PROMPTS]
    assert max(map(len, loop.target.batches)) == 3


def test_prompts_in_chunks_take_turns_with_decoding():
    """A long prompt that starves requests which decode, or is not prefilled in chunks of at most 5 rows."""
    long = list(itertools.islice(itertools.cycle([1, 2, 3]), 31))
    loop, found, drafts = decode([PROMPTS[0], long], right=3, joins_per_step=1)
    assert [g.generated for g in found] == [continuation(p, 20) for p in (PROMPTS[0], long)]
    assert max(max(rows) for rows in loop.target.batches) == 5
    kinds = ["prefill" if k == 0 else "decode" for k in drafts.asked[1:8]]
    assert kinds == ["decode", "prefill"] * 3 + ["decode"]


def test_no_query_forward_for_unfinished_prompts():
    """Drafting K tokens after every chunk of a prompt: only the last chunk has an anchor that is new."""
    _, _, drafts = decode([list(range(1, 14))], right=3, max_new_tokens=5)
    assert drafts.asked[:3] == [0, 0, 3]


def test_preempted_requests_go_on_with_the_tokens_they_have():
    """A request that loses its pages and then its text: 11 pages of 4 cannot hold three of 30 tokens."""
    loop, found, _ = decode(PROMPTS[:3], right=1, max_new_tokens=25, num_pages=14)
    assert [g.generated for g in found] == [continuation(p, 25) for p in PROMPTS[:3]]
    assert loop.allocator.num_free == 13
    prefills = sum(max(rows) > 4 for rows in loop.target.batches)
    assert prefills > 4, "nobody was preempted, so the test says nothing"


def test_a_prompt_that_no_empty_pool_holds_is_refused():
    """One that waits for ever, or takes the others down with it."""
    _, found, _ = decode([PROMPTS[0], [1] * 60, PROMPTS[1]], right=3, num_pages=14)
    assert [g.finish_reason for g in found] == ["length", "refused", "length"]
    assert found[1].error == (
        "request 1: 60 tokens and a block need 16 pages of 4, the pool has 13; pass a larger num_pages"
    )
    assert [found[i].generated for i in (0, 2)] == [continuation(PROMPTS[i], 20) for i in (0, 1)]


def test_the_end_of_text_cuts_inside_a_block():
    """Tokens accepted after the end of the text are kept, or the text stops only at the block's end."""
    text = continuation(PROMPTS[0], 40)
    eos = text[6]
    _, found, _ = decode([PROMPTS[0]], right=3, max_new_tokens=40, eos_token_ids=(eos,))
    assert found[0].generated == text[: text.index(eos) + 1] and found[0].finish_reason == "eos"
    ignoring = SamplingParams(max_new_tokens=40, ignore_eos=True)
    _, found, _ = decode([PROMPTS[0]], right=3, params=ignoring, max_new_tokens=40, eos_token_ids=(eos,))
    assert found[0].generated == text


@pytest.mark.parametrize("right", [0, 3])
def test_full_context_ends_a_request(right):
    """A row past the last position, or a text that is shorter than plain decoding's."""
    _, found, _ = decode([PROMPTS[0]], right, max_new_tokens=60, max_model_len=32)
    _, plain, _ = decode([PROMPTS[0]], 0, max_new_tokens=60, max_model_len=32, drafter=False)
    assert found[0].generated == plain[0].generated == continuation(PROMPTS[0], 27)
    assert found[0].finish_reason == plain[0].finish_reason == "context"


def test_a_repeat_ends_a_text():
    """An easy loop that flatters the drafter."""
    _, found, _ = decode([PROMPTS[0]], right=3, max_new_tokens=60, repeat=1)
    assert found[0].finish_reason == "repeat"
    text = found[0].generated
    assert len(set(text)) == len(text) - 1 and text[-1] in text[:-1]


def test_fewer_drafts_by_schedule():
    """A schedule that is asked and then ignored (C88): two requests draft 1 each, one alone 3."""
    _, found, drafts = decode(
        PROMPTS[:2], right=3, max_new_tokens=20, schedule_k=lambda num_live: 3 if num_live == 1 else 1
    )
    assert [g.generated for g in found] == [continuation(p, 20) for p in PROMPTS[:2]]
    assert set(drafts.asked) >= {1} and max(found[0].proposed) == 1


def test_what_is_streamed_is_the_text():
    """A callback that misses the first token, repeats one or counts the target's own as a draft."""
    streamed, drafted = [], 0

    def on_tokens(generation, new, num_drafts):
        nonlocal drafted
        streamed.extend(new)
        drafted += num_drafts

    _, found, _ = decode([PROMPTS[0]], right=3, max_new_tokens=21, on_tokens=on_tokens)
    assert streamed == found[0].generated and drafted == 15


def test_prompts_that_cannot_run():
    """A prompt without a token, or without a position to generate at."""
    loop, _, _ = decode([], right=0)
    with pytest.raises(InputError, match="the prompt is empty; pass at least one token"):
        loop.add([], SamplingParams(max_new_tokens=1))
    with pytest.raises(InputError, match="a prompt of 96 tokens leaves no room in max_model_len=96"):
        loop.add([1] * 96, SamplingParams(max_new_tokens=1))


@pytest.mark.parametrize("right", [0, 3])
def test_prompts_that_begin_alike_share_pages(right):
    """A page shared before it is full, held by nobody and given away, or written by a request that only reads it."""
    cache = PrefixCache(PageAllocator(64), 4)
    prompts = [[1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 4, 5, 0], [1, 2, 3, 4]]
    target, ran = PagedTarget(64, 4), []
    for prompt in prompts:
        _, found, _ = decode([prompt], right, prefix_cache=cache, target=target)
        assert found[0].generated == continuation(prompt, 20)
        ran.append(target.batches[0][0])
        target.batches.clear()
    assert ran == [5, 1, 2, 4]  # rows of the first chunk: behind 0, 2, 1 and 0 pages of 4
    hits = [cache.hold(prompt) for prompt in prompts]
    assert [len(hit) for hit in hits] == [2, 2, 1, 0]  # the last token of a prompt always runs
    assert hits[0][0].holders == 3 and {page.id for page in hits[0]} == {page.id for page in hits[1]}
    held = {page.id for page in hits[0]}
    cache.reclaim(99)
    assert cache.allocator.num_free == 63 - len(held) and cache.num_idle == 0


def test_many_prompts_through_a_small_cached_pool():
    """Idle pages that are never given back: requests wait for ever, or lose their text to another's pages."""
    cache = PrefixCache(PageAllocator(14), 4)
    rng = np.random.default_rng(0)
    prompts = [[1, 2, 3, 4, *rng.integers(0, V, rng.integers(1, 9)).tolist()] for _ in range(12)]
    _, found, _ = decode(prompts, right=1, max_new_tokens=12, num_pages=14, prefix_cache=cache)
    assert [g.generated for g in found] == [continuation(p, 12) for p in prompts]
    assert cache.allocator.num_free + cache.num_idle == 13


def test_the_end_of_a_prefix_is_given_back_first():
    """The first page of a prompt given away: the others are still kept, and nobody finds them."""
    cache = PrefixCache(PageAllocator(64), 4)
    prompt = list(range(13))
    decode([prompt], right=3, max_new_tokens=1, prefix_cache=cache)
    for left in (2, 1, 0):
        cache.reclaim(1)
        hit = cache.hold(prompt)
        assert len(hit) == left
        cache.release(prompt, 4 * left, [page.id for page in hit], range(0))
    assert cache.allocator.num_free == 63
