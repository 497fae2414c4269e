"""A mask row of its own: a vector beside the weights that stands for the embedding's row in a block's mask rows."""

import json
import os
import pickle
import subprocess
import sys
import zipfile
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from jax_dflash import drafter as drafters
from jax_dflash import hub, train
from jax_dflash.config import InputError, parse_draft_config
from jax_dflash.convert import convert
from jax_dflash.inspect import InspectJob, inspect
from parity_tests.forms import tensors, write, zlab
from parity_tests.harness import case as cases
from parity_tests.harness import null, oracle64, runners, shrink
from parity_tests.test_forms_forward import IDS, KINDS, apart, packed, step, values_of
from parity_tests.test_hostile_files import Bomb
from parity_tests.test_tier1_forms import case_of
from parity_tests.test_tier1_semantics import worst
from parity_tests.tiny import FRAMEWORKS, numpy

MASK = zlab()["dflash_config"]["mask_token_id"]
VECTOR = np.random.default_rng(5).standard_normal(16).astype(np.float32)
SHORT = VECTOR.astype(ml_dtypes.bfloat16)


@pytest.fixture
def folder(tmp_path):
    return write(tmp_path / "drafter", zlab(), tensors(zlab()))


def put_safetensors(folder, values, metadata=None):
    save_file(values, folder / "mask_embedding.safetensors", metadata=metadata)


def put_pt(folder, value):
    torch.save(value, folder / "mask_embedding.pt")


def load(f, folder, dtype=None):
    return f.weights.load_draft_tensors(folder, parse_draft_config(zlab()), dtype)


GOOD = {
    "tensor of safetensors": lambda d: put_safetensors(d, {"embedding": VECTOR}),
    "id in the metadata": lambda d: put_safetensors(d, {"embedding": VECTOR}, {"mask_token_id": str(MASK)}),
    "id as a tensor": lambda d: put_safetensors(d, {"embedding": VECTOR[None], "mask_token_id": np.array(MASK)}),
    "dict": lambda d: put_pt(d, {"embedding": torch.from_numpy(VECTOR), "mask_token_id": MASK}),
    "dict without an id": lambda d: put_pt(d, {"embedding": torch.from_numpy(VECTOR), "mask_token_id": None}),
    "id as a tensor of a dict": lambda d: put_pt(
        d, {"embedding": torch.from_numpy(VECTOR), "mask_token_id": torch.tensor(5)}
    ),
    "tensor": lambda d: put_pt(d, torch.from_numpy(VECTOR)),
    "parameter of one row": lambda d: put_pt(d, torch.nn.Parameter(torch.from_numpy(VECTOR)[None])),
    "the older format": lambda d: torch.save(
        torch.from_numpy(VECTOR), d / "mask_embedding.pt", _use_new_zipfile_serialization=False
    ),
    "every other element": lambda d: put_pt(d, torch.from_numpy(np.repeat(VECTOR, 2))[::2]),
}


@pytest.mark.parametrize("name", GOOD)
def test_published_files(f, name, folder):
    """A file in one of its spellings overlooked, or read by the wrong stride: the bits of all 16 elements, in the file's own
    dtype beside weights of another, and in the asked one."""
    GOOD[name](folder)
    values = load(f, folder)
    assert str(values["mask_embedding"].dtype).removeprefix("torch.") == "float32"
    np.testing.assert_array_equal(numpy(values["mask_embedding"]), VECTOR.astype(np.float64))
    assert set(values) == set(tensors(zlab())) | {"mask_embedding"}
    short = load(f, folder, f.numerics.as_dtype("bfloat16"))["mask_embedding"]
    np.testing.assert_array_equal(numpy(short), SHORT.astype(np.float64))


def zip_bomb(folder):
    put_pt(folder, torch.from_numpy(VECTOR))
    with zipfile.ZipFile(folder / "mask_embedding.pt", "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data/1", bytes(17 << 20))


def linked(folder):
    put_safetensors(folder, {"embedding": VECTOR})
    (folder / "mask_embedding.safetensors").rename(folder.parent / "elsewhere")
    (folder / "mask_embedding.safetensors").symlink_to(folder.parent / "elsewhere")


def both(folder):
    put_pt(folder, torch.from_numpy(VECTOR))
    put_safetensors(folder, {"embedding": VECTOR})


def huge(folder):
    with (folder / "mask_embedding.safetensors").open("wb") as handle:
        handle.truncate(1 << 40)


E, T = "mask_embedding.safetensors: ", "mask_embedding.pt: "
BAD = [
    (lambda d: put_safetensors(d, {"embedding": VECTOR}, {"mask_token_id": "6"}), E + "mask_token_id is 6, the config"),
    (lambda d: put_safetensors(d, {"embedding": VECTOR}, {"mask_token_id": "5.0"}), E + "mask_token_id is '5.0'"),
    (
        lambda d: put_safetensors(d, {"embedding": VECTOR, "mask_token_id": np.array([6], np.int32)}),
        E + "mask_token_id is 6, the configuration's is 5",
    ),
    (
        lambda d: put_safetensors(d, {"embedding": VECTOR, "mask_token_id": np.array([5, 5])}),
        E + "tensor mask_token_id is I64 of shape [2]",
    ),
    (lambda d: put_safetensors(d, {"mask_embedding": VECTOR}), E + "no tensor embedding"),
    (lambda d: put_safetensors(d, {"embedding": VECTOR, "gate": VECTOR}), E + "unclaimed gate"),
    (lambda d: put_safetensors(d, {"embedding": VECTOR[:15]}), E + "tensor embedding has shape [15], expected 16 elements"),
    (lambda d: put_safetensors(d, {"embedding": VECTOR.astype(np.int8)}), E + "tensor embedding is stored as I8"),
    (lambda d: put_pt(d, {"embedding": torch.ones(16), "mask_token_id": 6}), T + "mask_token_id is 6, the config"),
    (lambda d: put_pt(d, {"embedding": torch.ones(16), "mask_token_id": "5"}), T + "mask_token_id is '5'"),
    (lambda d: put_pt(d, {"weight": torch.ones(16)}), T + "no tensor embedding"),
    (lambda d: put_pt(d, {"embedding": torch.ones(16), 3: 4}), T + "unclaimed 3"),
    (lambda d: put_pt(d, {"embedding": [1.0] * 16}), T + "embedding is a list, expected a dense tensor"),
    (lambda d: put_pt(d, {"embedding": torch.ones(16).to_sparse()}), T + "embedding is a Tensor, expected a dense tensor"),
    (lambda d: put_pt(d, torch.ones(16, device="meta")), T + "embedding is a Tensor, expected a dense tensor"),
    (lambda d: put_pt(d, torch.ones(16, dtype=torch.int16)), T + "tensor embedding is stored as int16"),
    (lambda d: put_pt(d, torch.ones(1).expand(1 << 40)), T + "tensor embedding has shape [1099511627776]"),
    (lambda d: put_pt(d, [torch.ones(16)]), T + "holds a list"),
    (zip_bomb, T + "not to be read by torch.load(weights_only=True)"),
    (lambda d: (d / "mask_embedding.pt").write_bytes(b"cos\nsystem\n(S'false'\ntR."), T + "not to be read by torch.load("),
    (lambda d: (d / "mask_embedding.pt").symlink_to("nowhere"), T + "not a file"),
    (lambda d: (d / "mask_embedding.pt").mkdir(), T + "not a file"),
    (linked, E + "a link out of its folder"),
    (huge, E + "1099511627776 bytes, expected one vector"),
    (both, T + "mask_embedding.safetensors holds a mask row too; keep one of them"),
]  # fmt: skip


@pytest.mark.parametrize("spoil, message", BAD)
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_files_that_cannot_be_used(f, spoil, message, folder):
    """A vector of another mask token, a part of a file dropped in silence, gigabytes allocated, a traceback."""
    spoil(folder)
    with pytest.raises(InputError) as caught:
        load(f, folder)
    assert f"{folder}/{message}" in str(caught.value) and "\n" not in str(caught.value)


def pickled_in_a_zip(file, value):
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(value, protocol=2))
        archive.writestr("archive/version", "3\n")


@pytest.mark.parametrize(
    "form", ["plain pickle", "pickle in a zip", "torch.save", "inside a dict", "legacy torch.save"]
)
def test_nothing_in_a_pickle_runs(f, form, folder):
    """Code that runs because a checkpoint was loaded: each of these makes a folder when it is unpickled, and does so here at
    the end, so that a bomb that could not go off shows."""
    trap, file = folder / "executed", folder / "mask_embedding.pt"
    bomb = Bomb(trap)
    if form == "plain pickle":
        file.write_bytes(pickle.dumps(bomb))
    elif form == "pickle in a zip":
        pickled_in_a_zip(file, bomb)
    else:
        value = {"embedding": torch.from_numpy(VECTOR), "mask_token_id": bomb} if form == "inside a dict" else bomb
        torch.save(value, file, _use_new_zipfile_serialization=form != "legacy torch.save")
    with pytest.raises(InputError, match="not to be read by torch.load") as caught:
        load(f, folder)
    assert str(file) in str(caught.value) and "\n" not in str(caught.value) and not trap.exists()
    if form == "plain pickle":
        pickle.loads(file.read_bytes())
    elif form != "pickle in a zip":
        torch.load(file, weights_only=False)
    assert trap.exists() or form == "pickle in a zip"


def test_the_row_decides_and_not_the_id(f):
    """C11: an anchor that is the mask token given the masks' vector, which an id cannot tell from a mask; or the vector left
    out of a mask row. Scaled as an embedding's row is, and stored in the activation dtype before that."""
    config = parse_draft_config(zlab(embed_scale=2.0))
    table = np.arange(40, dtype=np.float32)[:, None] * np.ones(16, np.float32)
    weights = packed(f, config, values_of(config), "bfloat16")._replace(
        embed_tokens=f.floats(table, "bfloat16"), mask_embedding=f.floats(np.full(16, 1 + 2**-9))
    )
    found = f.drafter.embed(weights, config, f.ints([[7, MASK, MASK], [MASK, MASK, MASK]]))
    assert str(found.dtype).removeprefix("torch.") == "bfloat16"
    assert numpy(found)[..., 0].tolist() == [[14, 2, 2], [2 * MASK, 2, 2]]


@pytest.mark.parametrize("name, options", KINDS, ids=IDS)
def test_a_step_with_a_mask_row(name, options):
    """A vector that is loaded and not computed with: the same as an embedding whose row of the mask token it is, as long as
    no anchor is that token."""
    f, config = FRAMEWORKS[name], parse_draft_config(zlab())
    values = values_of(config)
    weights = packed(f, config, values)._replace(mask_embedding=f.floats(VECTOR))
    replaced = values["embed_tokens.weight"].copy()
    replaced[MASK] = VECTOR
    found = step(f, options, config, weights)
    assert apart(found, config, values | {"embed_tokens.weight": replaced}) <= 1e-5
    assert apart(found, config, values) > 1e-2


def masked_case() -> cases.Case:
    """A step with a mask row of its own, whose first request's anchor is the mask token."""
    case = case_of(zlab())
    anchors = {name: np.where(np.arange(case.live_reqs) == 0, MASK, case.columns[name]) for name in ("last_sampled",)}
    row = {"mask_embedding": cases.exact(VECTOR)}
    return replace(case, tensors=case.tensors | row, columns=case.columns | anchors)


@pytest.mark.parametrize("sut", ["torch.eager", "jax"])
def test_both_frameworks_are_the_oracle(sut):
    """A mask row at the wrong rows of the block in one implementation; an anchor that is the mask token."""
    assert worst(masked_case(), sut) < 1e-12


def test_a_case_carries_the_vector(tmp_path):
    """A failing step saved without its vector, or reordered and cut without it, would be another step."""
    case = masked_case()
    read = cases.load(cases.save(case, tmp_path / "case.safetensors"))
    np.testing.assert_array_equal(read.tensors["mask_embedding"], case.tensors["mask_embedding"])
    exact = runners.oracle(read)
    anchors = exact["embeds"][:2, 0]
    np.testing.assert_array_equal(anchors, case.tensors["embed_tokens.weight"][case.columns["last_sampled"]])
    assert (exact["embeds"][:2, 1:] == cases.exact(VECTOR)).all()
    plain = {name: value for name, value in case.tensors.items() if name != "mask_embedding"}
    assert np.abs(runners.oracle(replace(case, tensors=plain))["hidden"] - exact["hidden"])[:2].max() > 1e-2
    moved = runners.oracle(null.Symmetry(case, 3).apply(case))
    np.testing.assert_allclose(moved["logits"][:2], exact["logits"][:2], rtol=0, atol=1e-12)
    runners.oracle(shrink.narrower_model(case))
    with pytest.raises(ValueError, match="mask_embedding has 15 elements, embed_tokens has rows of 16"):
        runners.oracle(replace(case, tensors=case.tensors | {"mask_embedding": VECTOR[:15]}))


def test_the_oracle_reads_the_file(folder):
    """An oracle that reads a folder without its vector judges everybody wrong; a pickle is not for it."""
    put_safetensors(folder, {"embedding": SHORT[None], "mask_token_id": np.array(5)})
    np.testing.assert_array_equal(oracle64.load(folder)[1]["mask_embedding"].reshape(-1), SHORT.astype(np.float64))
    put_pt(folder, torch.ones(16))
    with pytest.raises(ValueError, match="mask_embedding.pt: a pickle is not opened here"):
        oracle64.load(folder)


def test_training_uses_the_vector():
    """A drafter trained with the embedding's row and served with another; a vector without a gradient; an anchor in the
    training text that is the mask token."""
    config = parse_draft_config(zlab(block_size=3, num_hidden_layers=1, layer_types=None))
    values = {name: jnp.asarray(value) for name, value in values_of(config).items()}
    tokens = jnp.asarray(np.random.default_rng(0).integers(6, 40, (1, 12)), jnp.int32).at[0, 7].set(MASK)
    features = jnp.asarray(np.random.default_rng(1).standard_normal((1, 12, config.feature_size)), jnp.float32)
    row = jnp.asarray(VECTOR)
    inside = values | {"embed_tokens.weight": values["embed_tokens.weight"].at[MASK].set(row)}

    @partial(jax.value_and_grad, has_aux=True)
    def loss(values):
        logits = train.draft_logits(drafters.pack(values, config), config, tokens, features, anchors)
        return train.draft_loss(logits, tokens, anchors, 4.0)[0], logits

    anchors = jnp.array([[4, 7]], jnp.int32)
    ((_, own), gradient), ((_, same), _) = (jax.jit(loss)(v) for v in (values | {"mask_embedding": row}, inside))
    np.testing.assert_allclose(own[0, 0], same[0, 0], atol=1e-5)
    assert np.abs(own[0, 1] - same[0, 1]).max() > 1e-2
    assert np.abs(gradient["mask_embedding"]).min() > 0


@pytest.mark.parametrize("name", ["dict", "tensor of safetensors"])
def test_conversion_keeps_the_bits(name, folder, tmp_path):
    """A converter that drops the vector, rounds it to the weights' dtype, or writes a file that names no token."""
    GOOD[name](folder)
    result = convert(folder, tmp_path / "target", "speculators")
    assert result["num_tensors"] == len(tensors(zlab())) + 1
    file = tmp_path / "target" / "mask_embedding.safetensors"
    written = load_file(file)
    assert list(written) == ["embedding"] and written["embedding"].dtype == np.float32
    np.testing.assert_array_equal(written["embedding"], VECTOR)
    with safe_open(file, framework="numpy") as handle:
        assert handle.metadata()["mask_token_id"] == str(MASK)
    assert "mask_embedding" not in load_file(tmp_path / "target" / "model.safetensors")
    assert not (tmp_path / "target" / "mask_embedding.pt").exists()


def test_save_and_load(f, folder, tmp_path):
    """A module that has no place for the vector, packing that loses it, a save that leaves another drafter's beside it."""
    GOOD["dict"](folder)
    config, drafter = f.drafter.load_drafter(folder)
    table = f.floats(np.zeros((40, 16)), "bfloat16")
    back = f.drafter.unpack(f.drafter.pack_drafter(drafter, config, table, table), config)
    (target := tmp_path / "target").mkdir()
    f.weights.save_tensors(target, back)
    assert sorted(path.name for path in target.iterdir()) == ["mask_embedding.safetensors", "model.safetensors"]
    again = load(f, target)
    assert set(again) == set(tensors(zlab())) | {"mask_embedding"}
    np.testing.assert_array_equal(numpy(again["mask_embedding"]), VECTOR.astype(np.float64))
    f.weights.save_tensors(target, back)  # as a training run does
    before = (target / "model.safetensors").read_bytes()
    with pytest.raises(InputError, match="mask_embedding.safetensors: the mask row of another checkpoint"):
        f.weights.save_tensors(target, {"norm.weight": back["norm.weight"]})
    assert (target / "model.safetensors").read_bytes() == before
    with pytest.raises(InputError, match="mask_embedding.pt: the mask row of another checkpoint"):
        f.weights.save_tensors(folder, back)


def test_inspect_names_it(folder):
    """A vector that inspect does not tell of, or does not look into; a fault of it that hides the others."""
    put_safetensors(folder, {"embedding": VECTOR})
    found = inspect(InspectJob(path=folder))
    assert found["refused"] is None and found["weights"]["own_tables"] == ["mask_embedding"]
    assert found["weights"]["num_tensors"] == len(tensors(zlab())) + 1
    put_safetensors(folder, {"embedding": np.where(np.arange(16) == 3, np.inf, VECTOR).astype(np.float32)})
    assert inspect(InspectJob(path=folder))["weights"]["not_finite"] == ["mask_embedding"]
    (folder / "mask_embedding.safetensors").unlink()
    put_pt(folder, torch.full((16,), torch.nan))
    assert inspect(InspectJob(path=folder))["weights"]["not_finite"] == ["mask_embedding"]
    put_pt(folder, {"embedding": torch.ones(16), "mask_token_id": 6})
    write(folder, zlab(), {n: v for n, v in tensors(zlab()).items() if n != "norm.weight"})
    found = inspect(InspectJob(path=folder))
    assert "mask_token_id is 6" in found["refused"] and found["weights"]["missing"] == ["norm.weight"]


@pytest.mark.parametrize("suffix", ["safetensors", "pt"])
def test_pytorch_is_loaded_for_a_pickle_only(suffix, folder):
    """PyTorch in every JAX process because a file of that kind exists somewhere; or JAX's loader unable to read it."""
    GOOD["dict" if suffix == "pt" else "tensor of safetensors"](folder)
    code = (
        "import sys; from jax_dflash.drafter import load_drafter; "
        f"d = load_drafter({str(folder)!r})[1]; print('torch' in sys.modules, float(d.mask_embedding[...].sum()))"
    )
    root = Path(__file__).parents[1]
    environ = os.environ | {"JAX_PLATFORMS": "cpu"}
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, env=environ)
    assert out.returncode == 0, out.stderr[-800:]
    loaded, total = out.stdout.split()
    assert loaded == str(suffix == "pt") and float(total) == pytest.approx(VECTOR.sum(), abs=1e-5)


def test_the_hub_is_asked_for_it(monkeypatch, tmp_path):
    """A drafter fetched without its vector: another function, and nothing says so."""
    asked = {}
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *a, **kw: asked.update(kw) or str(tmp_path))
    hub.resolve("org/drafter")
    wanted = [name for name in asked["allow_patterns"] if name.endswith(".pt")]
    assert wanted == ["mask_embedding.pt"] and "*.safetensors" in asked["allow_patterns"]
    assert not json.dumps(asked).count(".bin")
