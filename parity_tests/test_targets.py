"""The forms of a target, read from published folders and computed by both frameworks."""

from dataclasses import replace

import numpy as np
import pytest

from jax_dflash.config import InputError, parse_target_config
from jax_dflash.names import target_tensors
from parity_tests import target64
from parity_tests.target64 import FORMS, LLAMA3, SIZES
from parity_tests.tiny import numpy


def close(ours, exact):
    """1e-5 at the scale of the whole array."""
    np.testing.assert_allclose(numpy(ours), exact, atol=1e-5 * np.sqrt(np.mean(exact**2)), rtol=1e-5)


@pytest.mark.parametrize("name", FORMS)
def test_each_form_is_its_reference_s(f, name, tmp_path):
    """A QK norm where there is none, a bias dropped or added twice, plain RoPE for a scaled one, the embedding in place of
    an untied head, or a shard's tensors left out. Beyond 64 positions, where llama3's ranges differ most."""
    raw = FORMS[name]
    values = target64.values_of(target64.config_of(name))
    target64.write(tmp_path, raw, values, shards=3 if name.startswith("llama") else 1)
    config, target = f.target.load_target(tmp_path)
    tokens = np.random.default_rng(1).integers(0, 61, 70)
    states, logits = target64.forward(raw, values, tokens)

    def run(weights, pool, ids, ints):
        start, num_rows, tables = ints
        pool, hidden, features = f.target_runner.target_step(
            config, weights, pool, ids, start, num_rows, tables, taps=(0, 1, 2), page_size=16, max_model_len=80
        )
        return features, f.target.compute_logits(weights, hidden)

    pool = f.pool(f.kv_cache.pool_shape(config.geometry, 6, 16))
    ints = f.ints([0]), f.ints([70]), f.ints([[4, 1, 5, 2, 3]])
    features, own = f.run(run, f.target.pack_target(target, config), pool, f.ints(tokens[None]), ints)
    close(features[0], np.concatenate(states, axis=-1))
    close(own[0], logits)


@pytest.mark.parametrize("name", FORMS)
def test_packing_keeps_every_tensor(f, name):
    """A fused bias or norm cut at another form's offsets."""
    config = target64.config_of(name)
    values = f.tree(target64.values_of(config))
    layers = f.weights.pack_layers(values, config.geometry, prefix="model.")
    unpacked = f.weights.unpack_layers(layers, config.geometry, prefix="model.")
    assert set(unpacked) == {name for name in values if ".layers." in name}
    for key, value in unpacked.items():
        np.testing.assert_array_equal(numpy(value), numpy(values[key]))


def test_llama3_frequencies(f):
    """Ranges exchanged, a ramp in the wavelength instead of the turns, or the frequency multiplied by the factor. Llama
    3.1's own numbers; float32 values of transformers 5.15's `llama3` at pairs that are kept, in the ramp, and divided."""
    raw = FORMS["llama"] | {"head_dim": 128, "rope_theta": 500000.0, "max_position_embeddings": 131072}
    raw["rope_scaling"] = LLAMA3 | {"original_max_position_embeddings": 8192}
    frequencies = f.layers.inverse_frequencies(parse_target_config(raw).rope)
    assert frequencies.shape == (64,)
    expected = {
        0: 1.0, 1: 0.8146172165870667, 28: 0.0032114461064338684, 29: 0.0021665706299245358, 31: 0.0008567514596506953,
        33: 0.0003126936499029398, 35: 9.556212171446532e-05, 36: 7.784655463183299e-05, 63: 3.068925877869333e-07,
    }  # fmt: skip
    np.testing.assert_allclose(frequencies[list(expected)], list(expected.values()), rtol=3e-6)


def parsed(**changes):
    raw = FORMS["llama"] | changes
    return parse_target_config({key: value for key, value in raw.items() if value is not ...})


def test_what_a_file_leaves_out():
    """Qwen3's defaults taken for a Llama's or the other way round: no head_dim, no KV heads, no theta (Llama 2's files have
    none), no head."""
    config = parsed(head_dim=..., num_key_value_heads=..., rope_theta=..., rope_scaling=None, hidden_size=60)
    g = config.geometry
    assert (g.head_dim, g.num_kv_heads, g.rope_theta) == (10, 6, 10000.0)
    assert (g.qk_norm, g.biased, config.tie_word_embeddings, config.scaled_rope) == (False, "", False, None)
    qwen3 = {key: value for key, value in FORMS["qwen3"].items() if key != "head_dim"}
    assert parse_target_config(qwen3).geometry.head_dim == 128
    with pytest.raises(InputError, match="key 'rope_theta' is missing"):
        parse_target_config({k: v for k, v in FORMS["qwen3"].items() if k != "rope_theta"})


def test_which_projections_have_biases():
    """Qwen2's o projection given a bias, or its q, k and v none because no key says so; llama's attention_bias without o."""
    biased = {name: target64.config_of(name).geometry.biased for name in FORMS}
    assert biased == {"qwen3": "", "qwen3 biases": "qkvo", "qwen2": "qkv", "llama": "", "llama biases": "qkvo"}
    names = target_tensors(target64.config_of("qwen2"))
    assert {name for name in names if name.endswith("bias")} == {
        f"model.layers.{i}.self_attn.{p}_proj.bias" for i in range(2) for p in "qkv"
    }
    assert not any("q_norm" in name for name in names) and "lm_head.weight" not in names


@pytest.mark.parametrize("value, ids", [(None, ()), (7, (7,)), ([5, 7, 5], (5, 7)), ([], ())])
def test_every_end_token_is_kept(value, ids):
    """Only the first of a list of end tokens (Llama 3.1 has three), or the list itself compared with a token."""
    assert parsed(eos_token_id=value).eos_token_ids == ids


def test_where_theta_stands():
    """C24: theta of rope_parameters or rope_scaling left unread, or the flat one preferred."""
    for place in ("rope_parameters", "rope_scaling"):
        at = {"rope_scaling": None} | {place: {"rope_theta": 5e5, "rope_type": "default"}}
        assert parsed(**at, rope_theta=...).geometry.rope_theta == 5e5
        assert parsed(**at, rope_theta=1e4).geometry.rope_theta == 5e5


def test_how_far_yarn_stretches():
    """C21: a Qwen3 whose file keeps max_position_embeddings beside YaRN refused past it; plain RoPE stretched."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    config = parse_target_config(FORMS["qwen3"] | {"rope_scaling": yarn})
    assert config.rope.type == "yarn" and config.max_positions == 1024
    assert target64.config_of("qwen3").max_positions == target64.config_of("llama").max_positions == 256
    assert replace(config, scaled_rope=None).max_positions == 256


def test_tensors_that_a_target_brings_for_nothing(f, tmp_path):
    """The copy of a tied head (Qwen3-0.6B) or old Llamas' stored frequencies refused as unclaimed; a bias that its
    configuration does not announce dropped like them."""
    raw = FORMS["llama"] | {"tie_word_embeddings": True}
    config = parse_target_config(raw)
    values = target64.values_of(config)
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(5, np.float32)}
    extra["lm_head.weight"] = np.ones((61, SIZES["hidden_size"]), np.float32)
    target64.write(tmp_path, raw, values | extra)
    _, target = f.target.load_target(tmp_path)
    weights = f.target.pack_target(target, config)
    np.testing.assert_array_equal(numpy(weights.lm_head), values["model.embed_tokens.weight"])
    bias = {"model.layers.1.self_attn.q_proj.bias": np.ones(60, np.float32)}
    target64.write(tmp_path, raw, values | bias)
    with pytest.raises(InputError, match="1 unclaimed tensor.*q_proj.bias"):
        f.target.load_target(tmp_path)
