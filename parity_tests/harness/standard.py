"""The cases that `run` judges by default: made-up ones that hold every kind of request, and a step of the shipped pair."""

from dataclasses import replace
from functools import cache

import numpy as np

from jax_dflash import excerpts
from jax_dflash.cli import ASSETS
from parity_tests.harness import case as cases
from parity_tests.harness import oracle64
from parity_tests.harness.case import Case, Request, exact

PAIR = ASSETS / "builtin"


def mixed() -> Case:
    """Decode with rejected rows, a whole prompt, an unfinished one, the length limit; padding of both kinds."""
    return cases.mixed()


def long() -> Case:
    """More keys than one chunk of the online softmax, one request whose last chunk holds a single key, K of 1."""
    requests = [Request(247, 3, 0, 1), Request(300, 2, 1, 1), Request(0, 1)]
    return cases.build(
        "long", requests, seed=1, num_layers=1, hidden_size=48, num_heads=4, num_kv_heads=4, head_dim=16, block_size=8,
        num_speculative_tokens=6, page_size=16, max_model_len=512, rope_theta=1e6, extra_rows=0, num_reqs=3,
    )  # fmt: skip


def narrow() -> Case:
    """One KV head, a target wider than the drafter, one request, one draft."""
    return cases.build(
        "narrow", [Request(13, 2, 1, 1)], seed=2, num_layers=3, hidden_size=32, num_heads=5, num_kv_heads=1, head_dim=6,
        block_size=2, target_hidden_size=56, target_layer_ids=(4, 1), page_size=3, num_reqs=1, extra_rows=0,
    )  # fmt: skip


def ties() -> Case:
    """Every row of the LM head twice: each draft is a tie, which goes to the lowest id. No draft is decided."""
    case = cases.build("ties", [Request(0, 5), Request(9, 2, 1)], seed=3, num_layers=1, hidden_size=32, vocab_size=40)
    head = case.tensors["lm_head.weight"]
    return replace(case, tensors=case.tensors | {"lm_head.weight": np.concatenate([head[:20], head[:20]])})


@cache
def builtin(offset: int = 0) -> Case:
    """The shipped drafter after three real prompts, the `offset`-th and on: hidden states of the shipped target, in
    float32, rounded to bfloat16."""
    import torch

    from jax_dflash.config import load_target_config
    from jax_dflash.names import target_tensors
    from torch_ref import target as torch_target
    from torch_ref.weights import load_tensors

    config, drafter = oracle64.load(PAIR / "drafter")
    target_config = load_target_config(PAIR / "target")
    values = load_tensors(PAIR / "target", target_tensors(target_config), torch.float32)
    weights = torch_target.pack(values, target_config)
    prompts = excerpts.prompts(PAIR / "target", offset + 3, (40, 23, 57))[offset:]
    count = target_config.geometry.num_layers + 1

    def attend(pool, layer, q, k, v):
        heads = (a.transpose(1, 2) for a in (q, k, v))
        return pool, torch.nn.functional.scaled_dot_product_attention(
            *heads, is_causal=True, enable_gqa=True
        ).transpose(1, 2)

    states, anchors = [], []
    with torch.inference_mode():
        for ids in prompts:
            tokens = torch.tensor([ids])
            positions = torch.arange(len(ids), dtype=torch.int32)[None]
            x = torch_target.embed(weights, tokens)
            _, hidden, features = torch_target.target_forward(
                weights, target_config, None, x, positions, attend, tuple(range(count))
            )
            states.append(features[0].reshape(len(ids), count, -1).permute(1, 0, 2).numpy())
            anchors.append(int(torch_target.compute_logits(weights, hidden)[0, -1].argmax()))
    drafter |= {
        "embed_tokens.weight": weights.embed_tokens.numpy(),
        "lm_head.weight": weights.lm_head.numpy(),
    }
    requests = [Request(0, len(ids)) for ids in prompts]  # an offset that is no multiple of 3 turns their order
    g = config
    blank = cases.build(
        "builtin", requests, num_layers=g["num_hidden_layers"], hidden_size=8, num_heads=g["num_attention_heads"],
        num_kv_heads=g["num_key_value_heads"], head_dim=g["head_dim"], intermediate_size=8, block_size=g["block_size"],
        page_size=16, max_model_len=128, num_reqs=4, extra_rows=8,
    )  # fmt: skip
    return replace(
        blank,
        config=config,
        tensors={name: exact(value) for name, value in drafter.items()},
        columns=blank.columns | {"last_sampled": np.asarray(anchors, np.int32)},
        hidden_states=exact(np.concatenate(states, axis=1)),
        meta={"pair": "builtin", "prompts": [len(ids) for ids in prompts]},
    )


CASES = {"mixed": mixed, "long": long, "narrow": narrow, "ties": ties, "builtin": builtin}
