"""A drafter written in another form is the same record and the same bits."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from jax_dflash.config import load_draft_config
from jax_dflash.convert import FORMATS, convert
from jax_dflash.keys import InputError
from jax_dflash.names import match_draft
from jax_dflash.stored import read_tensors
from parity_tests import forms

RAW = {name: forms.shrunk(raw) for name, raw in forms.CONFIGS.items() if name != forms.REFUSED}
ODD = {
    "causal windows": forms.zlab(layer_types=["sliding_attention"] * 2 + ["full_attention"], sliding_window=5),
    "half rotary": forms.zlab(partial_rotary_factor=0.5, attention_bias=True),
    "scales": forms.speculators(logit_scale=0.25, input_embedding_scale=3.0),
    "two thetas": forms.zlab(
        layer_types=["sliding_attention", "full_attention", "full_attention"], sliding_window=5, rope_theta=...,
        rope_parameters={"sliding_attention": {"rope_theta": 1e4}, "full_attention": {"rope_theta": 1e6}},
    ),
}  # fmt: skip


def stored(folder):
    """The record and every tensor's bytes by canonical name."""
    config = load_draft_config(folder)
    return config, read_tensors(
        match_draft(folder, config).checked(), lambda data, kind, shape: (data.tobytes(), kind, shape)
    )


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("name", [*RAW, *ODD])
def test_there_and_back(name, form, tmp_path):
    """A key that a form spells otherwise and the converter forgets, taps off by one, bfloat16 that went through float32."""
    source = forms.write(tmp_path / "source", raw := (RAW | ODD)[name], forms.tensors(raw, seed=3))
    if form == "speculators" and load_draft_config(source).geometry.vocab_size is None:
        with pytest.raises(
            InputError, match="the speculators form cannot hold this drafter: its geometry would read as"
        ):
            convert(source, tmp_path / "target", form)
        assert not (tmp_path / "target").exists()
        return
    result = convert(source, tmp_path / "target", form)
    (config, values), (other, others) = stored(source), stored(tmp_path / "target")
    assert other.format == form and replace(other, format=config.format) == config
    assert others == values and result["num_tensors"] == len(values)
    back = convert(tmp_path / "target", tmp_path / "back", "z-lab")
    assert back["from"] == form and stored(tmp_path / "back")[1] == values


def test_taps_keep_their_meaning(tmp_path):
    """z-lab's ids name layers, speculators' hidden states: one more."""
    source = forms.write(tmp_path / "source", forms.zlab(), forms.tensors(forms.zlab()))
    convert(source, tmp_path / "target", "speculators")
    raw = json.loads((tmp_path / "target" / "config.json").read_text())
    assert raw["aux_hidden_state_layer_ids"] == [2, 4] and "dflash_config" not in raw


def test_nothing_is_overwritten(tmp_path):
    """A folder that was there, or half of one, after a conversion that failed."""
    raw = forms.zlab()
    source = forms.write(tmp_path / "source", raw, forms.tensors(raw))
    with pytest.raises(InputError, match="there is something already"):
        convert(source, source, "z-lab")
    with pytest.raises(InputError, match="pass one of z-lab, speculators"):
        convert(source, tmp_path / "target", "muse")
    values = forms.tensors(raw)
    values.pop("norm.weight")
    broken = forms.write(tmp_path / "broken", raw, values)
    with pytest.raises(InputError, match=r"norm\.weight"):
        convert(broken, tmp_path / "target", "z-lab")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broken", "source"]


def test_the_verb_ends_in_one_json_line(tmp_path):
    """A verb that no machine can read, or that loads a framework to copy bytes."""
    raw = forms.zlab()
    source = forms.write(tmp_path / "source", raw, forms.tensors(raw))
    arguments = ["convert", str(source), str(tmp_path / "target"), "--format", "speculators"]
    code = (
        f"import sys; from jax_dflash.cli import app; app({arguments}, standalone_mode=False); "
        "assert not {'jax', 'torch'} & sys.modules.keys()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | {"HF_HUB_OFFLINE": "1"}
    )
    assert done.returncode == 0, done.stderr[-800:]
    found = json.loads(done.stdout.splitlines()[-1])
    said = [found[key] for key in ("job", "from", "format", "num_tensors")]
    assert said == ["convert", "z-lab", "speculators", 36]
    assert found["num_bytes"] == sum(np.prod(v.shape) * 2 for v in forms.tensors(raw).values())
