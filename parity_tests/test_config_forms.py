"""Every published configuration as one record, or refused with its reason. Numbers C.. are cases met by users."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from jax_dflash import roofline
from jax_dflash.batch import EngineConfig
from jax_dflash.config import (
    InputError,
    check_pair,
    describe_draft_config,
    load_target_config,
    parse_draft_config,
)
from parity_tests.forms import CONFIGS, REFUSED, muse, speculators, zlab
from parity_tests.tiny import TARGET

S, F = "sliding_attention", "full_attention"
SHARED = Path(__file__).parents[2] / "shared" / "configs"

# format, hidden states, mask, block, (hidden, layers, heads, KV heads, head dim, MLP, positions), vocabulary, draft
# vocabulary, [(window, causal)] by layer, theta, YaRN's (factor, attention factor), parameters, where published
PUBLISHED = {
    "qwen3-4b-dflash-b16": (
        "z-lab", (2, 10, 18, 26, 34), 151669, 16, (2560, 5, 32, 8, 128, 9728, 40960), 151936, None,
        [(None, False)] * 5, 1e6, None, 537_427_200,
    ),
    "qwen3-8b-dflash-b16": (
        "z-lab", (2, 10, 18, 26, 34), 151669, 16, (4096, 5, 32, 8, 128, 12288, 40960), 151936, None,
        [(None, False)] * 5, 1e6, None, 1_048_626_432,
    ),
    "qwen3.5-4b-dflash-early": (
        "z-lab", (2, 9, 16, 23, 30), 248070, 16, (2560, 5, 32, 8, 128, 9728, 262144), 248320, None,
        [(None, False)] * 5, 1e7, None, 537_427_200,
    ),
    "qwen3.5-35b-a3b-dflash": (
        "z-lab", (2, 11, 20, 29, 38), 248070, 16, (2048, 8, 32, 4, 128, 6144, 40960), 248320, None,
        [(None, False)] * 8, 1e7, None, 473_995_264,
    ),
    "qwen3.6-27b-dflash": (
        "z-lab", (2, 17, 32, 47, 62), 248070, 16, (5120, 5, 32, 8, 128, 17408, 262144), 248320, None,
        [(2048, True)] * 4 + [(None, False)], 1e7, None, 1_730_213_120,
    ),
    "qwen3.6-27b-dflash-yarn-upload": (
        "z-lab", (2, 17, 32, 47, 62), 248070, 16, (5120, 5, 32, 8, 128, 17408, 262144), 248320, None,
        [(2048, True)] * 4 + [(None, False)], 1e7, (64.0, 1.4158883083), 1_730_213_120,
    ),
    "gpt-oss-20b-dflash": (
        "z-lab", (2, 7, 12, 17, 22), 200000, 8, (2880, 8, 64, 8, 64, 7680, 131072), 201088, None,
        [(None, False)] * 8, 1e6, (32.0, 1.3465735903), 784_703_104,
    ),
    "kimi-k2.5-dflash": (
        "z-lab", (2, 13, 25, 36, 48, 59), 163838, 8, (7168, 6, 64, 8, 128, 18432, 262144), 163840, None,
        [(None, False)] * 6, 1e6, (64.0, 1.0), 3_479_277_056,
    ),
    "specforge-qwen2.5-0.5b-dflash": (
        "z-lab", (2, 7, 12, 17, 22), 151669, 16, (896, 5, 14, 2, 64, 4864, 32768), 151936, None,
        [(None, False)] * 5, 1e6, None, 78_572_672,
    ),
    "muse-glimmer-30b-assistant": (
        "muse", (2, 14, 26, 38, 50), 201818, 16, (6656, 5, 32, 8, 128, 19968, 131072), None, None,
        [(2048, False)] * 5, 5e5, None, 2_555_985_152,
    ),
    "speculators-qwen3-8b-dflash": (
        "speculators", (2, 10, 18, 26, 34), 151669, 8, (4096, 5, 32, 8, 128, 12288, 40960), 151936, 32000,
        [(None, False)] * 5, 1e4, None, 1_048_626_432,
    ),
    "speculators-qwen3-30b-a3b-dflash": (
        "speculators", (1, 12, 23, 34, 45), 151669, 8, (2048, 5, 32, 8, 128, 6144, 40960), 151936, 32000,
        [(2048, False)] * 5, 1e4, None, 314_598_656,
    ),
    "speculators-minimax-m2.7-dflash": (
        "speculators", (2, 16, 30, 45, 59), 200054, 8, (3072, 6, 24, 8, 128, 4096, 204800), 200064, 32768,
        [(None, False)] * 6, 1e4, None, 424_717_824,
    ),
}  # fmt: skip


def test_every_published_configuration_is_tested():
    """A form added to the shipped configurations and to no test."""
    assert set(CONFIGS) == {*PUBLISHED, REFUSED}


@pytest.mark.skipif(not SHARED.is_dir(), reason="needs the folder of shared configurations beside the checkout")
def test_shipped_configurations_are_the_shared_ones():
    """A copy that fell behind."""
    assert {path.stem: json.loads(path.read_text()) for path in SHARED.glob("*.json")} == CONFIGS


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations(name):
    """A key read from the wrong place, or a default in place of a value: each field against the published one."""
    form, states, mask, block, sizes, vocab, draft_vocab, layers, theta, yarn, parameters = PUBLISHED[name]
    config = parse_draft_config(CONFIGS[name], name)
    g = config.geometry
    assert (config.format, config.hidden_state_indices, config.mask_token_id) == (form, states, mask)
    assert (config.block_size, config.max_speculative_tokens) == (block, block - 1)
    heads = (g.num_heads, g.num_kv_heads, g.head_dim)
    assert (g.hidden_size, g.num_layers, *heads, g.intermediate_size, g.max_position_embeddings) == sizes
    assert (g.vocab_size, config.draft_vocab_size, config.target_hidden_size) == (vocab, draft_vocab, g.hidden_size)
    assert g.rms_norm_eps == (1e-5 if form == "muse" else 1e-6) and not g.attention_bias
    assert [(layer.window, layer.causal) for layer in config.layers] == layers
    assert (config.dtype, config.logit_scale, config.embedding_scale) == ("bfloat16", 1.0, 1.0)
    for layer in config.layers:
        assert (layer.rope.theta, layer.rope.rotary_dim) == (theta, g.head_dim)
        if yarn is None:
            assert layer.rope.type == "default"
        else:
            assert (layer.rope.type, layer.rope.original_max_position_embeddings) == ("yarn", 4096)
            assert (layer.rope.factor, round(layer.rope.attention_factor, 10)) == yarn
            assert (layer.rope.beta_fast, layer.rope.beta_slow) == (32.0, 1.0)
    assert roofline.num_parameters(config) == parameters


def test_dflash2_is_refused_and_described():
    """A drafter whose convolutions and selector are dropped: it would draft, badly."""
    config, reason = describe_draft_config(CONFIGS[REFUSED], "config.json")
    assert reason is not None and "'DFlash2DraftModel'" in reason and "convolutions" in reason
    assert config is not None and config.hidden_state_indices == (2, 14, 26, 38, 50)
    without = {key: value for key, value in CONFIGS[REFUSED].items() if key != "architectures"}
    with pytest.raises(InputError, match="key 'dflash_config.conv_kernel_size' is 2: DFlash 2"):
        parse_draft_config(without)


def refuse(raw: dict, *parts: str):
    with pytest.raises(InputError) as caught:
        parse_draft_config(raw, "some/config.json")
    message = str(caught.value)
    assert message.startswith("some/config.json: ") and "\n" not in message
    for part in parts:
        assert part in message, message


def test_taps_have_two_meanings():
    """C03: speculators' ids are indices of hidden states; z-lab's name layers, whose output is one further."""
    P = zlab(dflash_config={"target_layer_ids": [1, 9, 17]})
    Q = speculators(aux_hidden_state_layer_ids=[2, 10, 18])
    M = muse(target_layer_ids=[1, 9, 17])
    assert [parse_draft_config(raw).hidden_state_indices for raw in (P, Q, M)] == [(2, 10, 18)] * 3
    assert parse_draft_config(Q).target_layer_ids == (1, 9, 17)
    both = zlab(aux_hidden_state_layer_ids=[2, 4])
    assert parse_draft_config(both).hidden_state_indices == (2, 4)
    refuse(zlab(aux_hidden_state_layer_ids=[1, 3]), "'aux_hidden_state_layer_ids'", "name different hidden states")


def test_taps_are_never_guessed():
    """C04: an evenly spaced guess loads cleanly and reads the wrong layers."""
    refuse(zlab(dflash_config={"target_layer_ids": ...}), "key 'dflash_config.target_layer_ids' is missing")
    refuse(zlab(dflash_config={"target_layer_ids": None}), "key 'dflash_config.target_layer_ids' is missing")
    refuse(speculators(aux_hidden_state_layer_ids=...), "key 'aux_hidden_state_layer_ids' is missing")
    refuse(muse(target_layer_ids=...), "key 'target_layer_ids' is missing")
    assert parse_draft_config(zlab(num_target_layers=...)).hidden_state_indices == (2, 4)


@pytest.mark.parametrize("ids", [[1, 1, 3], [-1, 3], [], [1, True], [1, 2.0], ["1"], [1, 2**40]])
def test_taps_that_no_target_has(ids):
    """C06: a duplicate passes the width check; a negative id counts from the end."""
    refuse(
        zlab(dflash_config={"target_layer_ids": ids}),
        "key 'dflash_config.target_layer_ids' is",
        "distinct layer numbers",
    )


def test_taps_past_the_target():
    """C06: an id that the target does not have, refused before the target runs, or when the pair is made."""
    parse_draft_config(zlab(dflash_config={"target_layer_ids": [1, 19]}))
    refuse(zlab(dflash_config={"target_layer_ids": [1, 20]}), "past the target's 20 layers")
    sizes = {"target_hidden_size": 23, "hidden_size": 23, "vocab_size": 61}
    draft = parse_draft_config(zlab(**sizes, num_target_layers=..., dflash_config={"target_layer_ids": [1, 5]}))
    with pytest.raises(InputError, match=r"hidden states \[2, 6\], past the target's 5 layers"):
        check_pair(draft, TARGET)
    check_pair(replace(draft, hidden_state_indices=(2, 5)), TARGET)


def test_mask_token_has_two_places_and_no_default():
    """C09: a pad or end id, or 0, in place of the mask. dflash_config counts more than the top level, as in vLLM."""
    gone = zlab(dflash_config={"mask_token_id": ...}, pad_token_id=3, eos_token_id=4)
    refuse(gone, "key 'dflash_config.mask_token_id' is missing")
    assert parse_draft_config(gone | {"mask_token_id": 9}).mask_token_id == 9
    assert parse_draft_config(zlab(dflash_config={"mask_token_id": 7}, mask_token_id=9)).mask_token_id == 7
    refuse(speculators(mask_token_id=None), "'mask_token_id'")
    refuse(zlab(dflash_config={"mask_token_id": 40}), "mask_token_id=40 is outside the vocabulary of 40")
    refuse(zlab(dflash_config={"mask_token_id": -1}), "mask_token_id=-1 is outside")


def test_block_size_has_three_places():
    """C12: a loader made for one form that refuses, or guesses in, the others."""
    top, nested = zlab(), zlab(block_size=..., dflash_config={"block_size": 16})
    flat = zlab(dflash_config=..., mask_token_id=5, target_layer_ids=[1, 3])
    inner = speculators(block_size=..., nested={"block_size": 16})
    assert parse_draft_config(top) == parse_draft_config(nested) == parse_draft_config(flat)
    for raw in (top, nested, flat, inner, muse()):
        config = parse_draft_config(raw)
        assert (config.block_size, config.mask_token_id, config.target_layer_ids) == (16, 5, (1, 3))
    for raw in (zlab(block_size=...), speculators(block_size=...), muse(block_size=None)):
        refuse(raw, "key 'block_size' is missing")
    refuse(zlab(dflash_config={"block_size": 8}), "key 'dflash_config.block_size' is 8, key 'block_size' is 16")
    refuse(zlab(block_size=1), "an anchor and at least one draft")


def test_a_block_drafts_one_token_less():
    """C13: the anchor's row counted as a draft; or a K that the drafter was not trained for, in silence."""
    draft = parse_draft_config(zlab(block_size=8))
    assert draft.max_speculative_tokens == 7
    refuse(zlab(dflash_config={"sample_from_anchor": True}), "key 'dflash_config.sample_from_anchor' is True")
    refuse(speculators(sample_from_anchor=True), "key 'sample_from_anchor' is True")
    parse_draft_config(speculators(sample_from_anchor=False))
    limits = {"max_num_seqs": 2, "max_model_len": 32}
    assert EngineConfig.make(draft, **limits, num_speculative_tokens=3).query_len == 4
    with pytest.raises(InputError, match="num_speculative_tokens=8: .* more need allow_long_block"):
        EngineConfig.make(draft, **limits, num_speculative_tokens=8)
    long = EngineConfig.make(draft, **limits, num_speculative_tokens=8, allow_long_block=True)
    assert long.query_len == 9
    with pytest.raises(InputError, match="num_speculative_tokens=0"):
        EngineConfig.make(draft, **limits, num_speculative_tokens=0, allow_long_block=True)


def rope(raw: dict):
    ropes = {layer.rope for layer in parse_draft_config(raw).layers}
    assert len(ropes) == 1
    return ropes.pop()


YARN = {"rope_type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096}


def test_yarn_and_null():
    """C21: two uploads of one drafter that differ in this key alone; an unknown type read as plain RoPE."""
    assert rope(zlab(rope_scaling=None)).type == "default"
    assert rope(zlab(rope_scaling=YARN)) != rope(zlab(rope_scaling=None))
    assert rope(zlab(rope_scaling=YARN)) == rope(zlab(rope_parameters=YARN))
    assert rope(zlab(rope_scaling={"type": "yarn", "factor": 2.0})).original_max_position_embeddings == 64
    for kind in ("llama3", "linear", "dynamic", "longrope", 3):
        refuse(zlab(rope_scaling={"rope_type": kind, "factor": 2.0}), "key 'rope_scaling.rope_type' is", repr(kind))
    refuse(zlab(rope_scaling={"rope_type": "yarn"}), "key 'rope_scaling.factor' is missing")
    refuse(zlab(rope_scaling=YARN, rope_theta=1.0), "rope_theta=1.0 of key 'rope_scaling'; YaRN needs more than 1")
    refuse(zlab(rope_scaling=YARN, rope_parameters={"rope_type": "default"}), "ask for different RoPE")
    refuse(zlab(rope_scaling="yarn"), "key 'rope_scaling' is 'yarn', expected dict")


@pytest.mark.parametrize(
    "keys, option, rule, value",
    [
        ({"factor": 16.0, "mscale": 1.0, "mscale_all_dim": 1.0}, "mscale", "mscale", 1.0),
        ({"factor": 16.0, "mscale": 1.0, "mscale_all_dim": 1.0}, "ignore-mscale", "log", 1.2772588722),
        ({"factor": 64.0, "mscale": 1.0, "mscale_all_dim": 1.0}, "mscale", "mscale", 1.0),
        ({"factor": 64.0, "mscale": 1.0, "mscale_all_dim": 1.0}, "ignore-mscale", "log", 1.4158883083),
        ({"factor": 64.0, "mscale": 0.5, "mscale_all_dim": 1.0}, "mscale", "mscale", 1.2079441542 / 1.4158883083),
        ({"factor": 64.0}, "mscale", "log", 1.4158883083),
        ({"factor": 64.0, "mscale": 1.0}, "mscale", "log", 1.4158883083),
        ({"factor": 64.0, "mscale": None, "mscale_all_dim": None}, "mscale", "log", 1.4158883083),
        ({"factor": 1.0}, "mscale", "log", 1.0),
        ({"factor": 64.0, "attention_factor": 0.75, "mscale": 1.0, "mscale_all_dim": 1.0}, "mscale", "explicit", 0.75),
        ({"factor": 64.0, "attention_factor": 0.75, "mscale": 1.0}, "ignore-mscale", "explicit", 0.75),
    ],
)
def test_yarn_attention_factor(keys, option, rule, value):
    """C22: 27% of every score. The ratio of the pair by default, the log rule by name, an explicit factor over both."""
    raw = zlab(rope_scaling=YARN | keys)
    record = parse_draft_config(raw, yarn_attention=option).layers[0].rope
    assert (record.attention_rule, record.attention_factor) == (rule, pytest.approx(value, abs=1e-10))


def test_unknown_yarn_option():
    """A misspelt option that means the default."""
    with pytest.raises(InputError, match="yarn_attention='ignore_mscale'; pass one of mscale, ignore-mscale"):
        parse_draft_config(zlab(), yarn_attention="ignore_mscale")


def test_rope_theta_precedence():
    """C24: a stale flat theta, or a base 100 times off."""
    plain = {"rope_type": "default"}
    assert rope(zlab(rope_parameters=plain, rope_theta=1e6)).theta == 1e6
    assert rope(zlab(rope_parameters=plain | {"rope_theta": 1e7}, rope_theta=1e4)).theta == 1e7
    assert rope(zlab(rope_scaling={"rope_theta": 5e5}, rope_theta=...)).theta == 5e5
    assert rope(zlab(rope_scaling={"rope_theta": 5e5}, rope_theta=None)).theta == 5e5
    assert rope(zlab(rope_theta=10_000_000_000)).theta == 1e10
    refuse(zlab(rope_theta=...), "key 'rope_theta' is missing")
    refuse(zlab(rope_theta=..., rope_parameters=plain), "key 'rope_theta' is missing")
    refuse(muse(rope_parameters=None), "key 'rope_theta' is missing")
    assert rope(speculators(nested={"rope_parameters": plain | {"rope_theta": 10000.0}})).theta == 1e4
    assert rope(speculators(nested={"rope_parameters": ...})).theta == 1e4
    assert rope(speculators(nested={"rope_parameters": ..., "rope_theta": 5e5})).theta == 5e5
    for theta in (0, -1.0, float("nan"), float("inf"), "1e6"):
        refuse(zlab(rope_theta=theta), "key 'rope_theta' is")


def test_rope_by_layer_type():
    """C25: one table for layers that rotate differently."""
    nested = {
        S: {"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 0.5},
        F: {"rope_theta": 1e6} | YARN,
    }
    raw = zlab(layer_types=[S, F, S], sliding_window=4, rope_parameters=nested)
    ropes = [layer.rope for layer in parse_draft_config(raw).layers]
    assert [(rope.theta, rope.type, rope.rotary_dim) for rope in ropes] == [
        (1e4, "default", 4),
        (1e6, "yarn", 8),
        (1e4, "default", 4),
    ]
    refuse(raw | {"rope_parameters": {F: {"rope_theta": 1e6}}}, f"key 'rope_parameters.{S}' is missing")
    assert rope(zlab(rope_parameters={F: {"rope_theta": 1e5}})).theta == 1e5


def test_partial_rotary():
    """A factor that is dropped: all channels rotated, half of them wrongly."""
    assert rope(zlab(partial_rotary_factor=0.5)).rotary_dim == 4
    assert rope(zlab(rope_parameters={"partial_rotary_factor": 0.25})).rotary_dim == 2
    assert rope(speculators(nested={"partial_rotary_factor": 0.5})).rotary_dim == 4
    for factor in (0.1, 0.4, 1.5, 0.0):
        refuse(zlab(partial_rotary_factor=factor), "partial_rotary_factor")


T, N = True, False


@pytest.mark.parametrize(
    "form, changes, causal",
    [
        (zlab, {}, [T, T, N]),
        (zlab, {"is_causal": None, "dflash_config": {"causal": None}}, [T, T, N]),
        (zlab, {"is_causal": False}, [N, N, N]),
        (zlab, {"is_causal": True}, [T, T, T]),
        (zlab, {"dflash_config": {"causal": True}}, [T, T, T]),
        (zlab, {"dflash_config": {"causal": False}}, [N, N, N]),
        (zlab, {"is_causal": False, "dflash_config": {"causal": True}}, [N, N, N]),
        (zlab, {"layer_types": ..., "dflash_config": {"use_swa": True}}, [N, N, N]),
        (muse, {"layer_types": [S, S, S]}, [N, N, N]),
        (muse, {}, [N, N, N]),
        (muse, {"is_causal": True}, [T, T, T]),
        (speculators, {"sliding_window_non_causal": True}, [N, N, N]),
        (speculators, {"sliding_window_non_causal": False}, [T, T, N]),
        (speculators, {}, [N, N, N]),
        (speculators, {"sliding_window_non_causal": False, "is_causal": False}, [N, N, N]),
    ],
)
def test_causality(form, changes, causal):
    """C33: a default of another form, which cost users 6% of their accepted length."""
    raw = form(**({"layer_types": [S, S, F], "sliding_window": 4} | changes))
    assert [layer.causal for layer in parse_draft_config(raw).layers] == causal


@pytest.mark.parametrize(
    "form, changes, windows",
    [
        (zlab, {"layer_types": [S, F, S], "sliding_window": 4}, [4, None, 4]),
        (zlab, {"layer_types": [S, F, S], "sliding_window": 4, "use_sliding_window": False}, [4, None, 4]),
        (zlab, {"layer_types": [S, F, S], "sliding_window": 4, "dflash_config": {"swa_window_size": 6}}, [6, None, 6]),
        (zlab, {"layer_types": ..., "dflash_config": {"use_swa": True, "swa_window_size": 6}}, [6, 6, 6]),
        (zlab, {"dflash_config": {"use_swa": True}, "sliding_window": 4}, [4, 4, 4]),
        (zlab, {"layer_types": ..., "sliding_window": 4}, [None] * 3),
        (zlab, {"layer_types": ..., "use_sliding_window": True, "sliding_window": 4}, [None] * 3),
        (
            zlab,
            {"layer_types": ..., "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
            [None, 4, 4],
        ),
        (muse, {}, [7, 7, 7]),
        (speculators, {"nested": {"layer_types": [S, F, S], "sliding_window": 4}}, [4, None, 4]),
        (speculators, {"nested": {"layer_types": [S, F, S]}}, [4096, None, 4096]),
        (
            speculators,
            {
                "layer_types": [S, S, F],
                "use_sliding_window": True,
                "sliding_window": 4,
                "nested": {"layer_types": [F, F, F], "sliding_window": None, "use_sliding_window": False},
            },
            [4, 4, None],
        ),
        (
            speculators,
            {
                "use_sliding_window": True,
                "sliding_window": 4,
                "max_window_layers": 2,
                "nested": {"sliding_window": None},
            },
            [None, None, 4],
        ),
    ],
)
def test_windows(form, changes, windows):
    """A window that is not read (layers run dense), or a top-level one lost to a nested null."""
    assert [layer.window for layer in parse_draft_config(form(**changes)).layers] == windows


def test_layers_that_cannot_be():
    """A list of another length cycled or cut, an unknown kind taken as full, a window that is guessed."""
    refuse(zlab(layer_types=[F, F]), "key 'layer_types' lists 2 layers, num_hidden_layers is 3")
    refuse(zlab(layer_types=[F, F, "linear_attention"]), "key 'layer_types' holds 'linear_attention'")
    refuse(zlab(layer_types=[S, S, S]), "key 'sliding_window' is missing")
    refuse(speculators(nested={"layer_types": [S, S, S], "sliding_window": None}), "'sliding_window' is missing")
    refuse(zlab(is_causal=1), "key 'is_causal' is 1, expected bool")


def test_speculators_files_are_differences():
    """A key left out because it is the default of transformers' Qwen3Config, read as another default."""
    raw = speculators(draft_vocab_size=32000)
    raw["transformer_layer_config"] = {"num_hidden_layers": 5}
    config = parse_draft_config(raw)
    g = config.geometry
    assert (g.hidden_size, g.intermediate_size, g.num_layers, g.num_heads, g.num_kv_heads) == (4096, 22016, 5, 32, 32)
    assert (g.head_dim, g.rms_norm_eps, g.vocab_size, g.max_position_embeddings) == (128, 1e-6, 151936, 32768)
    assert (g.attention_bias, config.layers[0].rope.theta, config.target_hidden_size) == (False, 1e4, 4096)
    assert parse_draft_config(raw | {"transformer_layer_config": {}}).geometry.num_layers == 32
    refuse(raw | {"transformer_layer_config": None}, "key 'transformer_layer_config' is missing")
    refuse(zlab(hidden_size=...), "key 'hidden_size' is missing")


def test_null_means_default():
    """A null taken as 0, as False where the default is another, or as an error."""
    raw = zlab(
        head_dim=None, num_key_value_heads=None, attention_bias=None, hidden_act=None, dtype=None, target_hidden_size=None,
        draft_vocab_size=None, logit_scale=None, num_target_layers=None, sliding_window=None, quantization_config=None,
    )  # fmt: skip
    config = parse_draft_config(raw)
    assert (config.geometry.head_dim, config.geometry.num_kv_heads) == (4, 4)
    assert (config.dtype, config.target_hidden_size, config.draft_vocab_size) == ("bfloat16", 16, None)


def test_fields_of_their_own():
    """A head dim taken from hidden / heads, the drafter's width taken for the target's, a scale or a bias dropped."""
    config = parse_draft_config(
        zlab(head_dim=6, target_hidden_size=20, logit_scale=0.5, embed_scale=4, attention_bias=True, torch_dtype="float32",
             dtype=..., draft_vocab_size=40)
    )  # fmt: skip
    assert (config.geometry.head_dim, config.feature_size, config.dtype) == (6, 40, "float32")
    assert (config.logit_scale, config.embedding_scale, config.geometry.attention_bias) == (0.5, 4.0, True)
    assert config.draft_vocab_size is None
    refuse(zlab(head_dim=..., num_attention_heads=5), "key 'head_dim' is missing")
    refuse(zlab(draft_vocab_size=41), "key 'draft_vocab_size' is 41, more than vocab_size=40")
    refuse(muse(draft_vocab_size=12), "key 'vocab_size' is missing; draft_vocab_size counts some of its tokens")


@pytest.mark.parametrize(
    "changes, parts",
    [
        ({"architectures": ["DSparkDraftModel"]}, ["key 'architectures' is ['DSparkDraftModel']"]),
        ({"architectures": "DFlashDraftModel"}, ["key 'architectures'"]),
        ({"model_type": "llama"}, ["key 'model_type' is 'llama'", "Qwen3 layers"]),
        (
            {"speculators_model_type": "eagle3", "transformer_layer_config": {}},
            ["'speculators_model_type' is 'eagle3'"],
        ),
        ({"dflash_config": {"selector_rank": 256}}, ["key 'dflash_config.selector_rank' is 256", "DFlash 2"]),
        ({"dflash_config": {"conv_group_size": 16}}, ["key 'dflash_config.conv_group_size' is 16", "DFlash 2"]),
        ({"dflash_config": {"output_multiplier": 0.2}}, ["key 'dflash_config.output_multiplier' is 0.2"]),
        ({"dflash_config": {"final_logit_softcapping": 20.0}}, ["final_logit_softcapping", "cap on the logits"]),
        (
            {"dflash_config": {"attention_sink_bias": True}},
            ["key 'dflash_config.attention_sink_bias' is True", "sinks"],
        ),
        ({"attention_sink_bias": True}, ["key 'attention_sink_bias' is True", "sinks"]),
        ({"add_swa_attention_sink_bias": True}, ["sinks"]),
        ({"quantization_config": {"bits": 4}}, ["key 'quantization_config' is {'bits': 4}", "quantised"]),
        ({"hidden_act": "gelu"}, ["key 'hidden_act' is 'gelu'", "only silu"]),
        ({"is_neox_style": False}, ["key 'is_neox_style' is False", "half-split"]),
        ({"dtype": "float8_e4m3fn"}, ["key 'dtype' is 'float8_e4m3fn'"]),
        ({"num_attention_heads": 3}, ["num_attention_heads=3 is not a multiple"]),
        ({"head_dim": 7}, ["head_dim=7 is odd"]),
        ({"num_hidden_layers": 10**9}, ["num_hidden_layers=1000000000; expected at most 1000"]),
        ({"hidden_size": 10**30}, ["key 'hidden_size' is out of any range"]),
        ({"hidden_size": True}, ["key 'hidden_size' is True, expected int"]),
        ({"hidden_size": -4}, ["key 'hidden_size' is -4, expected more than 0"]),
        ({"dflash_config": [1]}, ["key 'dflash_config' is [1], expected an object"]),
    ],
)
def test_refusals(changes, parts):
    """A drafter that is another function opened as this one: each refusal names its key and says why."""
    refuse(zlab(**changes), *parts)


def test_quantised_speculators():
    """C17: packed weights read without their scales. The section stands at the top or among the layers' keys."""
    refuse(speculators(quantization_config={"format": "pack-quantized"}), "key 'quantization_config'")
    refuse(
        speculators(nested={"quantization_config": {"bits": 4}}), "key 'transformer_layer_config.quantization_config'"
    )


def test_a_pair_completes_the_vocabulary():
    """Muse's file has no vocab_size: a mask id checked against nothing, or an engine without a bound for its anchors."""
    draft = parse_draft_config(muse(hidden_size=23, head_dim=6, mask_token_id=60, target_layer_ids=[0, 2]))
    assert draft.geometry.vocab_size is None
    with pytest.raises(InputError, match="names no vocab_size; pass what check_pair"):
        EngineConfig.make(draft, max_num_seqs=1, max_model_len=32)
    paired = check_pair(draft, TARGET)
    assert paired.geometry.vocab_size == 61 and replace(paired, geometry=draft.geometry) == draft
    with pytest.raises(InputError, match="mask_token_id=61 is outside the target's vocabulary of 61"):
        check_pair(replace(draft, mask_token_id=61), TARGET)


def test_pairs_by_width():
    """A drafter with another width than its target's, which only its own tables make possible."""
    draft = parse_draft_config(zlab(target_hidden_size=23, dflash_config={"target_layer_ids": [1, 3]}))
    with pytest.raises(InputError, match="hidden_size 16 does not fit the target's embedding"):
        check_pair(draft, TARGET)
    assert check_pair(draft, TARGET, {"embed_tokens.weight", "lm_head.weight"}) == draft


def test_the_vocabulary_of_a_pair():
    """C07, C08: anchors past a table, or drafts that the target has no token for: the target's vocabulary counts, and an
    embedding of the drafter's own bounds it."""
    sizes = {"hidden_size": 23, "target_hidden_size": 23}

    def paired(vocab_size: int, *own: str, **changes):
        return check_pair(parse_draft_config(zlab(**sizes, vocab_size=vocab_size, **changes)), TARGET, own)

    assert paired(40).geometry.vocab_size == paired(64).geometry.vocab_size == 61
    assert paired(40, "embed_tokens.weight").geometry.vocab_size == 40
    assert paired(64, "embed_tokens.weight").geometry.vocab_size == 61
    assert paired(61, draft_vocab_size=12).draft_vocab_size == 12
    with pytest.raises(InputError, match="drafts some of 64 tokens, the target's vocabulary has 61"):
        paired(64, draft_vocab_size=12)


def test_target_configurations(tmp_path):
    """A target with windows or another activation taken for a plain one."""
    raw = zlab(layer_types=[F, F, F])
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert load_target_config(tmp_path).vocab_size == 40
    for changes in (
        {"mlp_bias": True},
        {"layer_types": [S, F, F]},
        {"hidden_act": "gelu"},
    ):
        (tmp_path / "config.json").write_text(json.dumps(zlab(**changes)))
        with pytest.raises(InputError, match=next(iter(changes))):
            load_target_config(tmp_path)
