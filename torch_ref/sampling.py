"""Sampling: noise, drafts, and the verification of drafts. Pure functions.

N requests, K drafts of one request, Q = K + 1 target rows of it, V vocabulary. Row i of a request is where its draft i is
verified; its position is that of the token before the predicted one, for drafts and for the target alike.

Noise is a function of (seed, position, token id) and of what it is for (`Stream`), never of a batch: Threefry-2x32 (Salmon
et al. 2011) with key (seed, position + stream) and counter (token id, 0), of which the first word is used. JAX draws the
same bits.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from jax_dflash.sampling_params import SamplingColumns, SamplingMode, Stream
from torch_ref.numerics import to_accum

# Half a step above 0, and the step a hair below 2^-32, so that no uniform rounds to 0 or 1 in float32.
UNIFORM_STEP = 2.0**-32 * (1 - 2.0**-24)
ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
INFINITY = float("inf")


def greedy(logits: Float[Tensor, "... V"]) -> Int[Tensor, "..."]:
    """The most likely token; the lowest id on ties, which `torch.max` documents and `argmax` refers to."""
    return torch.argmax(logits, dim=-1).int()


def rotate_(words: Int[Tensor, "..."], bits: int) -> Int[Tensor, "..."]:
    """Rotate int32 words left in place; their right shift fills with the sign."""
    low = (words >> (32 - bits)).bitwise_and_((1 << bits) - 1)
    return words.bitwise_left_shift_(bits).bitwise_or_(low)


def threefry_2x32(key: tuple[Tensor, Tensor], counter: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Threefry-2x32 in 20 rounds (Salmon et al. 2011, section 4.1). Words are int32, which wraps as uint32 does, and
    shapes of key and counter are broadcast. In place: with fresh memory for every operation a CPU took seven
    times as long."""
    keys = (*key, key[0] ^ key[1] ^ 0x1BD11BDA)
    x, y = counter[0] + keys[0], counter[1] + keys[1]
    for i in range(5):
        for bits in ROTATIONS[i % 2]:
            x += y
            y = rotate_(y, bits).bitwise_xor_(x)
        x += keys[(i + 1) % 3]
        y += keys[(i + 2) % 3] + (i + 1)
    return x, y


def random_bits(
    stream: Stream, seeds: Int[Tensor, "*rows"], positions: Int[Tensor, "*rows"], num_ids: int
) -> Int[Tensor, "*rows V"]:
    """32 random bits of each token id below `num_ids`, as int32; seeds and positions are broadcast."""
    ids = torch.arange(num_ids, dtype=torch.int32, device=seeds.device)
    seeds, positions = torch.broadcast_tensors(seeds.int()[..., None], positions.int()[..., None] + stream)
    return threefry_2x32((seeds, positions), (ids, torch.zeros_like(ids)))[0]


def uniform(stream: Stream, seeds: Tensor, positions: Tensor, num_ids: int, dtype: torch.dtype) -> Tensor:
    """Uniform in (0, 1) `[*rows, V]`, fine near 0: the least is 2^-33, the largest of float32 1 - 2^-24."""
    bits = random_bits(stream, seeds, positions, num_ids).long() & 0xFFFFFFFF
    return (bits.to(dtype) + 0.5) * UNIFORM_STEP


def gumbel(stream: Stream, seeds: Tensor, positions: Tensor, num_ids: int, dtype: torch.dtype) -> Tensor:
    """Gumbel noise -log(-log(1 - u)) `[*rows, V]`. The large values, which win, come from small u, where floats are dense:
    up to 22.9 in float32, where -log(-log u) ends at 16.6."""
    return -torch.log(-torch.log1p(-uniform(stream, seeds, positions, num_ids, dtype)))


def without_nan(logits: Float[Tensor, "... V"]) -> Float[Tensor, "... V"]:
    """Logits in the accumulation dtype, -inf where NaN, so that a broken row still gives a token of the vocabulary."""
    logits = to_accum(logits)
    return torch.where(logits.isnan(), -INFINITY, logits)


def per_row(column: Float[Tensor, "N"], logits: Tensor) -> Tensor:
    """A column of requests that broadcasts against logits `[N, ..., V]`."""
    return column.to(logits.dtype).reshape(-1, *[1] * (logits.ndim - 1))


def over_temperature(logits: Float[Tensor, "N ... V"], temperature: Float[Tensor, "N"]) -> Float[Tensor, "N ... V"]:
    """Logits divided by the temperature; those of greedy requests as they are."""
    return logits / per_row(torch.where(temperature == 0, 1, temperature), logits)


def sample_drafts(
    logits: Float[Tensor, "N K V"],
    temperature: Float[Tensor, "N"],
    seeds: Int[Tensor, "N"],
    positions: Int[Tensor, "N K"],
) -> Int[Tensor, "N K"]:
    """Drafts by the Gumbel-max of logits / temperature, the most likely where the temperature is 0. No other parameter
    applies to drafts. `positions` are those of the tokens before the drafts. The caller caches `logits` as they came, for
    `verify`; rows of padded requests give some token and touch nothing."""
    logits = over_temperature(without_nan(logits), temperature)
    noise = gumbel(Stream.DRAFT, seeds[:, None], positions, logits.shape[-1], logits.dtype)
    return greedy(torch.where(per_row(temperature, logits) == 0, logits, logits + noise))


def mark_seen(
    seen: Bool[Tensor, "N V"], tokens: Int[Tensor, "N T"], num_tokens: Int[Tensor, "N"]
) -> Bool[Tensor, "N V"]:
    """`seen` with each request's first `num_tokens` tokens; ids outside the vocabulary mark nothing."""
    ids = torch.arange(seen.shape[-1], device=seen.device)
    for i in range(tokens.shape[1]):
        seen = seen | ((tokens[:, i, None] == ids) & (i < num_tokens[:, None]))
    return seen


def penalise(
    logits: Float[Tensor, "N Q V"],
    penalty: Float[Tensor, "N"],
    seen: Bool[Tensor, "N V"],
    draft_tokens: Int[Tensor, "N K"] | None,
) -> Float[Tensor, "N Q V"]:
    """The repetition penalty of CTRL (Keskar et al. 2019; in transformers): positive logits of seen tokens divided by it,
    negative ones multiplied. Row i has seen its request's drafts before it too, as plain decoding would have."""
    rows = [seen]
    for drafts in () if draft_tokens is None else draft_tokens.T:
        rows.append(mark_seen(rows[-1], drafts[:, None], torch.ones_like(drafts)))
    assert len(rows) == logits.shape[1], f"{logits.shape[1]} rows, drafts for {len(rows)}"
    penalty = per_row(penalty, logits)
    return torch.where(torch.stack(rows, dim=1), torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def keep_top(
    logits: Float[Tensor, "N Q V"], top_k: Int[Tensor, "N"], top_p: Float[Tensor, "N"]
) -> Float[Tensor, "N Q V"]:
    """-inf outside the k most likely tokens (0: all), and then outside the fewest that hold `top_p` of their mass (Holtzman
    et al. 2020), at least one. Tokens as likely as the last one kept are kept."""
    V = logits.shape[-1]
    descending = logits.sort(dim=-1, descending=True).values
    last = torch.where(top_k == 0, V, top_k.clamp(max=V)).long() - 1
    last = last[:, None, None].expand(*logits.shape[:2], 1)
    descending = torch.where(descending >= descending.gather(-1, last), descending, -INFINITY)
    mass = descending.softmax(dim=-1)
    top_p = per_row(top_p, logits)
    kept = (mass.cumsum(dim=-1) - mass < top_p) | (top_p >= 1)  # a sum of all may round above 1
    least = torch.where(kept & (descending > -INFINITY), descending, INFINITY).amin(dim=-1, keepdim=True)
    return torch.where(logits >= least.minimum(descending[..., :1]), logits, -INFINITY)


def process_logits(
    logits: Float[Tensor, "N Q V"],
    columns: SamplingColumns,
    mode: SamplingMode,
    seen: Bool[Tensor, "N V"] | None = None,
    draft_tokens: Int[Tensor, "N K"] | None = None,
) -> Float[Tensor, "N Q V"]:
    """The target's logits with penalty, temperature, top-k and top-p, in that order (vLLM's), in the accumulation dtype;
    of greedy requests with the penalty only. `seen` (prompt and output so far) is read if `mode.penalised`, and
    `draft_tokens` where there is more than one row. `mode` covers every request."""
    logits = without_nan(logits)
    if mode.penalised:
        assert seen is not None, "a penalty needs the tokens seen"
        logits = penalise(logits, columns.repetition_penalty, seen, draft_tokens)
    if mode.sampled:
        logits = over_temperature(logits, columns.temperature)
    if mode.filtered:
        logits = keep_top(logits, columns.top_k, columns.top_p)
    return logits


def log_prob(logits: Float[Tensor, "N K V"], ids: Int[Tensor, "N K"]) -> Float[Tensor, "N K"]:
    """Log probability of one token of each row; of an id outside the vocabulary, some token's."""
    ids = ids.clamp(0, logits.shape[-1] - 1).long()[..., None]
    return logits.gather(-1, ids)[..., 0] - logits.logsumexp(dim=-1)


def residual(
    logits: Float[Tensor, "N V"], rejected: Int[Tensor, "N"], draft_logits: Float[Tensor, "N V"] | None
) -> Float[Tensor, "N V"]:
    """Logits of max(p - q, 0), which a rejected draft's place is sampled from (Leviathan et al. 2023): p without the draft
    if drafts were greedy. Of p itself where nothing was rejected (-1), and where rounding leaves no residual."""
    if draft_logits is None:
        ids = torch.arange(logits.shape[-1], device=logits.device)
        left = torch.where(ids == rejected[:, None], -INFINITY, logits)
    else:
        log_p, log_q = logits.log_softmax(dim=-1), draft_logits.log_softmax(dim=-1)
        left = torch.where(log_q < log_p, log_p + torch.log(-torch.expm1(log_q - log_p)), -INFINITY)
    whole = (rejected < 0) | (left == -INFINITY).all(dim=-1)
    return torch.where(whole[:, None], logits, left)


def verify(
    logits: Float[Tensor, "N Q Vt"],
    draft_tokens: Int[Tensor, "N K"],
    num_drafts: Int[Tensor, "N"],
    positions: Int[Tensor, "N"],
    columns: SamplingColumns,
    mode: SamplingMode,
    draft_logits: Float[Tensor, "N K Vd"] | None = None,
    seen: Bool[Tensor, "N Vt"] | None = None,
) -> tuple[Int[Tensor, "N Q"], Int[Tensor, "N"]]:
    """Accept drafts while the target agrees, then take one token of its own: `(tokens, num_sampled)`. A request emits
    `tokens[:num_sampled]`; behind them stand zeros.

    A greedy request accepts a draft that is the target's most likely token. A sampled one accepts d if
    log p(d) > log u + log q(d), with q of `draft_logits` / temperature, as cached by the draft step, or q(d) = 1 if there
    are none and drafts were greedy. After the first failure the token comes from the residual, after the last draft from
    the target, so that tokens follow the target exactly (Leviathan et al. 2023; Chen et al. 2023). Drafts from `num_drafts`
    on are never accepted, nor is -1, in whose place the target's own token is drawn.

    `positions` are those of row 0, of the last emitted token. Of two vocabularies the smaller is used. `mode` covers every
    request. K may be 0: plain decoding. Padded requests emit one token that nobody reads. Nothing waits for the device.
    """
    K = draft_tokens.shape[1]
    if draft_logits is not None:
        V = min(logits.shape[-1], draft_logits.shape[-1])
        draft_logits = over_temperature(without_nan(draft_logits[..., :V]), columns.temperature)
        logits = logits[..., :V]
        seen = None if seen is None else seen[:, :V]
    V, steps = logits.shape[-1], torch.arange(K + 1, device=logits.device)
    exists = (steps[:K] < num_drafts[:, None]) & (draft_tokens < V)
    draft_tokens = torch.where(exists, draft_tokens, -1)
    logits = process_logits(logits, columns, mode, seen, draft_tokens)

    own = greedy(logits)
    accept = own[:, :K] == draft_tokens
    sampled = columns.temperature > 0
    if mode.sampled:
        rows = positions[:, None] + steps[:K]
        log_u = torch.log(uniform(Stream.ACCEPT, columns.seeds[:, None], rows, 1, logits.dtype)[..., 0])
        log_q = 0 if draft_logits is None else log_prob(draft_logits, draft_tokens)
        likely = log_prob(logits[:, :K], draft_tokens) > log_u + log_q
        accept = torch.where(sampled[:, None], likely & (draft_tokens >= 0), accept)
    num_accepted = accept.int().cumprod(dim=1).sum(dim=1)
    requests = torch.arange(len(logits), device=logits.device)

    drafts = torch.nn.functional.pad(draft_tokens, (0, 1), value=-1)
    last = own[requests, num_accepted]
    if mode.sampled:
        q = None if draft_logits is None else draft_logits[requests, num_accepted.clamp(max=K - 1)]
        left = residual(logits[requests, num_accepted], drafts[requests, num_accepted], q)
        noise = gumbel(Stream.TARGET, columns.seeds, positions + num_accepted, V, logits.dtype)
        last = torch.where(sampled, greedy(left + noise), last)
    n = num_accepted[:, None]
    tokens = torch.where(steps < n, drafts, torch.where(steps == n, last[:, None], 0))
    return tokens.int(), num_accepted.int() + 1


def greedy_verify(
    logits: Float[Tensor, "N Q V"], draft_tokens: Int[Tensor, "N K"], num_drafts: Int[Tensor, "N"]
) -> tuple[Int[Tensor, "N Q"], Int[Tensor, "N"]]:
    """`verify` of requests that are all greedy."""
    off = num_drafts * 0
    return verify(logits, draft_tokens, num_drafts, off, SamplingColumns(off, off, off, off, off), SamplingMode())


def keep_logits(
    draft_logits: Float[Tensor, "R1 Kmax V"], logits: Float[Tensor, "N K V"], request_index: Int[Tensor, "N"]
) -> Float[Tensor, "R1 Kmax V"]:
    """`draft_logits` with the rows of these requests, in place, as they came. Its last row belongs to nobody: -1, a padded
    request, wraps to it, so that nothing depends on a condition, which a CUDA graph could not hold."""
    draft_logits[request_index.long(), : logits.shape[1]] = logits.to(draft_logits.dtype)
    return draft_logits
