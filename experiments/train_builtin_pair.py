"""Can a pair small enough to ship draft real text well? The builtin pair, made from nothing in minutes on one GPU.

A byte-level Qwen3-form target learns the standard library's source; then it writes its own continuations of training
text, and a DFlash drafter learns to draft those. Expected: an accepted length of at least 3 of 8 on held-out modules.

    python experiments/stdlib_corpus.py corpus.npz --excerpts jax_dflash/assets/excerpts
    python experiments/train_builtin_pair.py corpus.npz OUT_DIR
"""

import argparse
import dataclasses
import json
import time
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from rich.console import Console
from rich.progress import Progress, track
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from jax_dflash import decoding, excerpts, train
from jax_dflash import drafter as drafters
from jax_dflash import target as targets
from jax_dflash.config import parse_draft_config, parse_target_config
from jax_dflash.decoder import Decoder
from jax_dflash.decoding import DecodeLoop
from jax_dflash.modules import tensors
from jax_dflash.names import write_config
from jax_dflash.numerics import as_dtype
from jax_dflash.sampling_params import SamplingParams
from jax_dflash.weights import save_tensors

EOS, MASK, VOCAB = 256, 257, 264
SHARED = {
    "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": None, "dtype": "bfloat16", "eos_token_id": EOS,
    "head_dim": 32, "hidden_act": "silu", "hidden_size": 192, "initializer_range": 0.02, "intermediate_size": 384,
    "max_position_embeddings": 1024, "model_type": "qwen3", "num_attention_heads": 6, "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6, "rope_scaling": None, "rope_theta": 10000, "sliding_window": None, "tie_word_embeddings": True,
    "use_cache": True, "use_sliding_window": False, "vocab_size": VOCAB,
}  # fmt: skip
TARGET = SHARED | {"architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": 14}
DRAFTER = SHARED | {
    "architectures": ["DFlashDraftModel"], "block_size": 8, "num_hidden_layers": 2, "num_target_layers": 14,
    "layer_types": ["full_attention"] * 2, "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [1, 4, 6, 8, 11]},
}  # fmt: skip
PROMPT_LENS = (48, 160, 352)
CHUNK = 50  # optimiser steps of one call on the device


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How long and how wide. A target stage is (steps, batch, length, peak rate, seconds at most); the second teaches
    long positions."""

    target_stages: tuple[tuple[int, int, int, float, float], ...] = (
        (6000, 64, 512, 3e-3, 150),
        (800, 32, 1024, 6e-4, 35),
    )
    answers: int = 36864
    answer_batch: int = 2048
    answer_len: int = 256
    answer_seconds: float = 100
    draft_steps: int = 9000
    draft_batch: int = 48
    anchors: int = 48
    draft_seconds: float = 130
    draft_lr: float = 2e-3
    gamma: float = 4.0  # numbers.md: blocks of 8
    eval_prompts: int = 96


SMOKE = Recipe(((4, 4, 64, 1e-3, 60),), 8, 8, 32, 60, 4, 2, 4, 60, 1e-3, 4.0, 2)


def write_tokenizer(directory: Path) -> None:
    """A byte is a token of its own value: byte-level BPE without merges, in the usual printable alphabet."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    names = {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}
    special = {"<|endoftext|>": EOS, "<|mask|>": MASK} | {f"<|unused{i}|>": i for i in range(MASK + 1, VOCAB)}
    tokenizer = Tokenizer(models.BPE(vocab={name: b for b, name in names.items()} | special, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>", "mask_token": "<|mask|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def fit(name: str, loss, params: dict, key, num_steps: int, rate: float, seconds: float, log: list[dict]) -> dict:
    """Run a stage in chunks on the device, with a progress bar and one log row per chunk; the parameters.

    After two chunks the steps are cut to what fits into `seconds`, the schedule with them.
    """
    tx, size = train.optimizer(), min(CHUNK, num_steps)
    state = train.init_state(params, tx)
    run = jax.jit(partial(train.train_steps, loss, tx), donate_argnums=0)
    start, done = time.perf_counter(), 0
    with Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task(name, total=num_steps)
        while done < num_steps:
            rates = train.learning_rate(rate, done + np.arange(size), num_steps).astype("float32")
            before = time.perf_counter()
            state, losses, aux = jax.block_until_ready(run(state, key, rates))
            if done == size:
                per_step = (time.perf_counter() - before) / size
                num_steps = min(num_steps, done + int(seconds / per_step / size) * size)
                bar.update(task, total=num_steps)
            row = {"stage": name, "step": done + len(losses), "loss": float(losses.mean()), "aux": float(aux.mean())}
            log.append(row | {"seconds": round(time.perf_counter() - start, 2)})
            bar.update(task, advance=len(losses), description=f"{name} loss {row['loss']:.3f} aux {row['aux']:.3f}")
            if done % (20 * size) == 0 or done + size >= num_steps:
                print(log[-1], flush=True)
            done += size
    return state.params


def make_target(corpus, recipe: Recipe, dtype, key, log: list[dict]) -> dict:
    config = parse_target_config(TARGET)
    params = tensors(targets.Target(config, rngs=nnx.Rngs(0), dtype=as_dtype("float32")))
    for stage, (steps, batch, length, rate, seconds) in enumerate(recipe.target_stages):
        loss = train.target_batch_loss(config, dtype, corpus, batch, length)
        params = fit(f"target {length}", loss, params, jax.random.fold_in(key, stage), steps, rate, seconds, log)
    return {name: value.astype(as_dtype("bfloat16")) for name, value in params.items()}


def own_answers(config, weights, corpus: np.ndarray, recipe: Recipe, key) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The target's continuations of training text, right-padded: sequences, and each one's first and last anchor."""
    rng = np.random.default_rng(0)
    width = max(PROMPT_LENS) + recipe.answer_len
    T, rows, first, last = DRAFTER["block_size"], [], [], []
    start = time.perf_counter()
    for batch in track(range(recipe.answers // recipe.answer_batch), "answers", console=Console(stderr=True)):
        if time.perf_counter() - start > recipe.answer_seconds:
            break
        P = PROMPT_LENS[batch % len(PROMPT_LENS)]
        starts = rng.integers(0, len(corpus) - P, recipe.answer_batch)
        prompts = corpus[starts[:, None] + np.arange(P)].astype(np.int32)
        # Most answers greedy, as they will be judged; the rest at temperatures that leave the rut.
        heat = np.where(np.arange(recipe.answer_batch) % 8 < 5, 0.0, rng.uniform(0.4, 0.9, recipe.answer_batch))
        text = train.continue_text(
            weights, config, jnp.asarray(prompts), jnp.asarray(heat, "float32"), jax.random.fold_in(key, batch),
            num_new=recipe.answer_len,
        )  # fmt: skip
        text = np.asarray(text)
        ends = train.end_of_answers(text, P, EOS)
        keep = ends - P >= 2 * T
        rows.append(np.pad(text[keep], ((0, 0), (0, width - text.shape[1]))).astype(np.uint16))
        first.append(np.full(keep.sum(), P))
        last.append(ends[keep] - T)
    return np.concatenate(rows), np.concatenate(first), np.concatenate(last)


def make_drafter(target_config, weights, answers, recipe: Recipe, key, log: list[dict]) -> dict:
    config = parse_draft_config(DRAFTER)
    sequences, first, last = map(jnp.asarray, answers)
    loss = train.draft_batch_loss(
        config, target_config, weights, sequences, first, last,
        batch=recipe.draft_batch, num_anchors=recipe.anchors, gamma=recipe.gamma,
    )  # fmt: skip
    params = tensors(drafters.Drafter(config, rngs=nnx.Rngs(1), dtype=as_dtype("float32")))
    params = fit("drafter", loss, params, key, recipe.draft_steps, recipe.draft_lr, recipe.draft_seconds, log)
    return {name: value.astype(as_dtype("bfloat16")) for name, value in params.items()}


def accepted_length(out: Path, dtype_name: str, K: int, num_prompts: int) -> dict:
    """Greedy decoding of held-out prompts with the saved pair, through the engine that users run."""
    decoder = Decoder.load(
        out / "drafter",
        out / "target",
        dtype_name,
        max_num_seqs=16,
        max_model_len=768,
        num_speculative_tokens=K,
        chunk=128,
    )
    decoder.capture(loops=["host"], progress=False)
    # A text that repeats 32 tokens has begun to loop, and easy loops would flatter the drafter.
    loop = DecodeLoop(decoder.runner, decoder.engine, eos_token_ids=(EOS,), repeat=32, **decoder.sizes.loop)
    for prompt in excerpts.prompts(out / "target", num_prompts, (200, 300, 400)):
        loop.add(prompt, SamplingParams(max_new_tokens=128))
    generations = [g for g in loop.run() if g.accepted]
    return {
        "dtype": dtype_name, "K": K, "tau": round(decoding.accepted_length(generations), 3),
        "tau_request_mean": round(float(np.mean([g.accepted_length for g in generations])), 3),
        "answers": len(generations), "looped": sum(g.finish_reason == "repeat" for g in generations),
        "tokens": sum(len(g.generated) for g in generations),
    }  # fmt: skip


def write_log(path: Path, rows: list[dict]) -> None:
    """One JSON line a row, with the device and version that made it."""
    about = {"device": jax.devices()[0].device_kind, "jax": jax.__version__}
    path.write_text("".join(json.dumps(row | about) + "\n" for row in rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("corpus", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--smoke", action="store_true", help="a few steps of everything, on a CPU")
    parser.add_argument("--target-only", action="store_true", help="stop after the target; a later run goes on from it")
    parser.add_argument("--evaluate", type=int, nargs="*", default=[7], help="drafts per step to judge the pair at")
    args = parser.parse_args()
    recipe = SMOKE if args.smoke else Recipe()
    dtype, key, log = as_dtype("float32" if args.smoke else "bfloat16"), jax.random.key(0), []
    corpus = np.load(args.corpus)["tokens"]
    device_corpus = jnp.asarray(corpus)
    target_config = parse_target_config(TARGET)
    started = time.perf_counter()

    for part, raw in (("target", TARGET), ("drafter", DRAFTER)):
        (args.out / part).mkdir(parents=True, exist_ok=True)
        write_config(args.out / part, raw)
    write_tokenizer(args.out / "target")
    if not (args.out / "target" / "model.safetensors").exists():
        save_tensors(args.out / "target", make_target(device_corpus, recipe, dtype, jax.random.fold_in(key, 1), log))
        write_log(args.out / "train-target.jsonl", log)
    if args.target_only:
        return
    if not (args.out / "drafter" / "model.safetensors").exists():
        log = []
        weights = targets.pack_target(targets.load_target(args.out / "target", dtype)[1], target_config)
        answers = own_answers(target_config, weights, corpus, recipe, jax.random.fold_in(key, 2))
        row = {"stage": "answers", "kept": len(answers[0]), "tokens": int((answers[2] - answers[1]).sum())}
        log.append(row | {"seconds": round(time.perf_counter() - started, 1)})
        print(log[-1], flush=True)
        values = make_drafter(target_config, weights, answers, recipe, jax.random.fold_in(key, 3), log)
        save_tensors(args.out / "drafter", values)
        write_log(args.out / "train-drafter.jsonl", log)
    results = [accepted_length(args.out, "float32", K, recipe.eval_prompts) for K in args.evaluate]
    write_log(args.out / "accepted-length.jsonl", results)
    print(
        json.dumps(
            {"job": "train_builtin_pair", "seconds": round(time.perf_counter() - started, 1), "results": results}
        )
    )


if __name__ == "__main__":
    main()
