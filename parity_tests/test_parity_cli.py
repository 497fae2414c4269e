"""The harness's command line: verbs, exit codes, one line for what cannot be used, and git bisect over a broken model."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.numpy import save_file

from parity_tests.harness import case as cases
from parity_tests.harness import results, shrink, standard, verdict
from parity_tests.harness.mutations import planted

ROOT = Path(__file__).parents[1]


def parity(*args, code=0, root=ROOT, prefix=""):
    """Run a verb in a process of its own; its JSON line (None if it ended in an error) and its stderr."""
    start = f"import sys; {prefix}sys.argv[0] = 'parity_tests'; from parity_tests.harness.cli import main; main()"
    environ = os.environ | {"JAX_PLATFORMS": "cpu", "COLUMNS": "100"}
    done = subprocess.run(
        [sys.executable, "-c", start, *map(str, args)],
        cwd=root,
        env=environ,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == code, (done.returncode, done.stdout[-500:], done.stderr[-2000:])
    lines = done.stdout.strip().splitlines()
    return (json.loads(lines[-1]) if lines else None), done.stderr


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """A small passing case, to be judged by PyTorch's two kernels: nothing is compiled."""
    case = cases.with_meta(
        cases.mixed(num_layers=1, hidden_size=128), ref="torch.sdpa", sut="torch.eager", dtype="bfloat16"
    )
    return cases.save(case, tmp_path_factory.mktemp("cases") / "mixed.safetensors")


def test_a_broken_model_is_told_and_replayed(tmp_path):
    """A failure that nobody can come back to: the tap, where the error is, what it usually is, and a line that finds it
    again from the saved file; without the bug the same file passes."""
    found, said = parity(
        "run",
        "--plant",
        "gqa-tile",
        "--sut",
        "torch.eager",
        "--ref",
        "torch.sdpa",
        "--case",
        "mixed",
        "--save",
        tmp_path,
        code=1,
    )
    assert (found["ok"], found["verdict"], found["first_divergence"]) == (False, "wrong maths", "layers.0.attn")
    assert "none in query head 0, 5" in said and "GQA" in said
    (saved,) = tmp_path.glob("layers.0.attn-*.safetensors")
    assert saved.stat().st_size < 2**20
    line = next(line for line in said.splitlines() if line.startswith("replay: "))
    assert line == f"replay: python -m parity_tests replay {saved} --plant gqa-tile"
    again, _ = parity(*line.split()[4:], code=1)
    assert again["first_divergence"] == "layers.0.attn" and again["was"] == {
        "verdict": "wrong maths",
        "tap": "layers.0.attn",
    }
    without, _ = parity("replay", saved)
    assert without["ok"] and without["first_divergence"] is None


def test_another_rounding_policy_has_a_code_of_its_own(file):
    """A policy taken for a bug by a script: 4, and 0 where it is allowed."""
    found, _ = parity("replay", file, "--plant", "norm-rounds-first", code=4)
    assert found["verdict"] == "rounding policy differs" and found["first_divergence"] == "context_norm"
    parity("replay", file, "--plant", "norm-rounds-first", "--allow-rounding")


@pytest.mark.parametrize(
    "args, expected",
    [
        (["replay", "missing.safetensors"], "error: missing.safetensors: no such file and no standard case"),
        (["run", "--case", "nothing"], "error: nothing: no such file and no standard case (mixed, long"),
        (["run", "--dtype", "float16"], "error: --dtype 'float16': pass bfloat16 or float32"),
        (["run", "--sut", "tensorflow"], "error: implementation 'tensorflow' is unknown; pass one of jax, "),
        (["run", "--results", "nowhere/r.jsonl"], "error: nowhere/r.jsonl: expected a file in a folder that exists"),
        (["run", "--nonsense"], "error: No such option: --nonsense"),
        (["run", "--plant", "nothing"], "error: no bug 'nothing' to plant; did you mean "),
        (["mutate", "--only", "nothing"], "error: --only nothing: no such bug; pass one of epsilon"),
        (["report", "missing.jsonl"], "error: missing.jsonl: no such results file"),
    ],
)
def test_bad_input_is_one_line(args, expected):
    """A traceback, or a box of ten lines, for a misspelt word."""
    _, said = parity(*args, code=2)
    assert said.startswith(expected) and said.count("\n") == 1, said


def test_an_unknown_tap_is_one_line(file):
    """A tap that is not there and is silently skipped."""
    _, said = parity("replay", file, "--tap", "layers.7.q", code=2)
    names = "features, context_positions, context_slots, input_ids, ..., pool"
    assert said == f"error: --tap layers.7.q: no such tap; the case has {names}\n"


def test_broken_case_files_are_one_line(file, tmp_path):
    """A truncated or foreign file taken for a failing comparison."""
    data = file.read_bytes()
    (tmp_path / "cut.safetensors").write_bytes(data[: len(data) // 2])
    (tmp_path / "text.safetensors").write_text("not a tensor")
    save_file({"a": standard.mixed().pool}, tmp_path / "other.safetensors")
    for name, words in (
        ("cut", "not a readable safetensors file"),
        ("text", "not a readable"),
        ("other", "not a parity case"),
    ):
        _, said = parity("replay", tmp_path / f"{name}.safetensors", code=2)
        assert words in said and said.count("\n") == 1 and name in said, said


def test_what_cannot_run_is_skipped(file):
    """A missing framework or GPU called a failure: git bisect would blame the commit."""
    _, said = parity("replay", file, prefix="sys.modules['torch'] = None; ", code=125)
    assert said.startswith("cannot run: ") and "torch" in said and said.count("\n") == 1
    _, said = parity("replay", file, "--sut", "torch.graph", code=125)
    assert said.startswith("cannot run: CannotRun: torch.graph needs an NVIDIA GPU") and said.count("\n") == 1
    broken = "from torch_ref import layers; layers.swiglu = lambda x: x.reshape(-1); "
    _, said = parity("replay", file, prefix=broken, code=125)
    assert said.startswith("cannot run: CannotRun: torch.") and "RuntimeError" in said and said.count("\n") == 1


def test_shrinking_keeps_the_failure(tmp_path):
    """A smaller case that fails for another reason, or that does not fail."""
    case = cases.with_meta(cases.mixed(), ref="torch.sdpa", sut="torch.eager", dtype="bfloat16")
    with planted("gqa-tile", "torch"):
        judge = lambda c: verdict.compare(c, "torch.sdpa", "torch.eager", stop_early=True)  # noqa: E731
        best, passing = shrink.shrink(case, judge, lambda *_: None)
    small = best.case
    assert (best.verdict, best.first_divergence) == (verdict.WRONG, "layers.0.attn")
    assert shrink.size(small) < 0.1 * shrink.size(case)
    assert small.live_reqs == 1 and small.num_layers == 1
    # Tiling is repeating for one KV head, or for one query head each.
    assert small.config["num_key_value_heads"] == 2 and small.config["num_attention_heads"] == 4
    assert passing is not None and passing.case.config["num_key_value_heads"] == 1
    path = results.keep(best, tmp_path)
    assert path.stat().st_size < 32_000 and verdict.compare(cases.load(path), "torch.sdpa", "torch.eager").ok


def test_shrinking_what_passes_is_refused(file):
    """An endless search for a failure that is not there."""
    _, said = parity("shrink", file, code=2)
    assert said.splitlines()[-1] == "error: case mixed passes; there is nothing to shrink"


CUTS = [shrink.drop_layers, shrink.fewer_heads, shrink.narrower_units, shrink.narrower_model, shrink.narrower_target]


@pytest.mark.parametrize("cut", [*CUTS, shrink.smaller_vocabulary], ids=lambda cut: cut.__name__)
def test_smaller_cases_are_cases(cut):
    """A cut that leaves tensors, configuration and pool of different sizes: such a case fails in its own way."""
    small = cut(cases.mixed(), *([1] if cut in (shrink.drop_layers, shrink.fewer_heads) else []))
    assert shrink.size(small) < shrink.size(cases.mixed())
    assert verdict.compare(small, "torch.sdpa", "torch.eager", "float64").verdict == verdict.OK


def test_bisect_goes_from_block_to_value(file):
    """A block named where a value inside it is known: RoPE of the block shows first in q, between blocks in attention."""
    found, _ = parity("bisect", file, "--plant", "block-positions", code=1)
    assert (found["block"], found["first_divergence"]) == ("layers.0.attn", "layers.0.q")
    assert found["hypothesis"].startswith("RoPE")


def test_null_bands_are_printed(file):
    """A band that is not of this case: copies are exact, and no tap of a CPU run scatters by half."""
    found, said = parity("null", file)
    assert found["symmetries"] == 16 and set(found["bands"]["features"]["local"]) == {1.0, 1.15}
    assert all(b["local"][1] < 1.5 for b in found["bands"].values()) and "null bands of torch.eager" in said


def test_results_become_reports(file, tmp_path):
    """Rows that the report cannot read: a page, a picture and Markdown of a real failing run."""
    out = tmp_path / "r.jsonl"
    parity("replay", file, "--plant", "causal-block", "--results", out, code=1)
    found, said = parity(
        "report", out, "--html", tmp_path / "r.html", "--png", tmp_path / "r.png", "--markdown", tmp_path / "r.md"
    )
    assert set(found["written"]) == {"html", "png", "markdown"} and found["rows"] == 30
    page = (tmp_path / "r.html").read_text()
    assert (
        "layers.0.attn" in page
        and "none in row of the block 4" in page
        and "http" not in page.replace("http-equiv", "")
    )
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG") and "layers.0.attn" in (
        tmp_path / "r.md"
    ).read_text()
    assert "a mask inside the block" in said


@pytest.mark.parametrize("path", sorted((ROOT / "parity_tests" / "cases").glob("*.safetensors")), ids=lambda p: p.stem)
def test_saved_cases_pass(path):
    """A failure of the past that came back: any case file dropped into parity_tests/cases is judged here."""
    case = cases.load(path)
    result = verdict.compare(
        case, case.meta.get("ref", "torch.eager"), case.meta.get("sut", "jax"), case.meta.get("dtype", "bfloat16")
    )
    assert (result.verdict, result.first_divergence) == (verdict.OK, None)


def test_git_bisect_finds_the_commit(file, tmp_path):
    """Exit codes that git reads otherwise: a history in which one commit breaks PyTorch's RoPE, and one cannot run."""
    root = tmp_path / "repo"
    for package in ("jax_dflash", "torch_ref", "parity_tests"):
        shutil.copytree(
            ROOT / package, root / package, ignore=shutil.ignore_patterns("__pycache__", "cases", "*.safetensors")
        )

    def git(*args):
        identity = "-c user.name=t -c user.email=t@t -c commit.gpgsign=false".split()
        return subprocess.run(["git", *identity, *args], cwd=root, capture_output=True, text=True, check=True).stdout

    def commit(name, path=None, old="", new=""):
        if path:
            text = (root / path).read_text()
            assert old in text
            (root / path).write_text(text.replace(old, new))
        git("add", "-A")
        git("commit", "-q", "--allow-empty", "-m", name)

    git("init", "-q", "-b", "main")
    layers = "torch_ref/layers.py"
    commit("good")
    commit("does not import", layers, "import functools", "import functools_that_is_not_there")
    commit("wrong rotation", layers, "import functools_that_is_not_there", "import functools")
    text = "a * cos - b * sin, b * cos + a * sin"
    (root / layers).write_text((root / layers).read_text().replace(text, "a * cos + b * sin, b * cos - a * sin"))
    git("add", "-A")
    git("commit", "-q", "--amend", "--no-edit")
    commit("later")
    git("bisect", "start", "HEAD", "HEAD~3")
    start = "from parity_tests.harness.cli import main; main()"
    done = subprocess.run(
        ["git", "bisect", "run", sys.executable, "-c", start, "replay", str(file)],
        cwd=root, capture_output=True, text=True, timeout=300,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(root)},
    )  # fmt: skip
    # The commit that does not import is skipped, so two candidates are left: it and the wrong one. A later one would be
    # among them if nothing could be judged.
    said = done.stdout + done.stderr
    assert "only 'skip'ped commits left to test" in said, said[-1500:]
    listed = said[said.index("The first bad commit could be any of") :]
    commits = dict(
        zip(("broken", "wrong", "later"), (git("rev-parse", f"main~{n}").strip() for n in (2, 1, 0)), strict=True)
    )
    assert [name for name, commit in commits.items() if commit in listed] == ["broken", "wrong"]
