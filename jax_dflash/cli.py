"""The command line: one verb per job. Bad input is one line on stderr and exit code 2."""

import json
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from jax_dflash.config import InputError

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)
ASSETS = Path(__file__).parent / "assets"
YarnAttention = Annotated[str, typer.Option(help="mscale, or ignore-mscale: leave YaRN's mscale keys unread.")]


@app.callback()
def verbs() -> None:
    """DFlash speculative drafting in JAX, and its PyTorch reference."""


@app.command()
def compare(
    checkpoint: Annotated[str, typer.Option(help="Drafter: a folder, org/name on the hub, or 'builtin'.")] = "builtin",
    target: Annotated[
        str | None, typer.Option(help="Target: a folder or org/name; needed unless the pair is builtin.")
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a drafter from the hub.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or gpu; default gpu where there is one.")] = None,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    yarn_attention: YarnAttention = "mscale",
    num_speculative_tokens: Annotated[
        int | None, typer.Option(help="Drafts per request; default all of a block.")
    ] = None,
    allow_long_block: Annotated[
        bool, typer.Option("--allow-long-block", help="Let drafts exceed the drafter's block.")
    ] = False,
    max_num_seqs: Annotated[int, typer.Option(help="Requests in one step at most.")] = 8,
    max_model_len: Annotated[int, typer.Option(help="Positions of a request at most.")] = 1024,
    compile_cache: Annotated[Path | None, typer.Option(help="Keep compiled programs here for later runs.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the JSON line only.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write the JSON document to this file too.")] = None,
) -> None:
    """Draft in JAX and PyTorch in lockstep on real text: the same tokens? how fast is each?"""
    _check_dtype(dtype)
    _check_pair(checkpoint, target)
    if out is not None:
        _check_out(out)
    drafter, whole = _pair(checkpoint, target, revision)
    device = select_device(device)
    from jax_dflash import compare as job_module

    job = job_module.CompareJob(
        checkpoint=drafter,
        target=whole,
        pair=checkpoint if checkpoint == "builtin" else Path(checkpoint).name,
        device=device,
        dtype=dtype,
        yarn_attention=yarn_attention,
        num_speculative_tokens=num_speculative_tokens,
        allow_long_block=allow_long_block,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        compile_cache=None if compile_cache is None else str(compile_cache),
    )
    result = job_module.compare(job)
    if not as_json:
        from rich.console import Console

        from jax_dflash import report

        console = Console()
        console.print(report.table(result))
        for line in report.summary(result):
            console.print(line, highlight=False)
    if out is not None:
        out.write_text(json.dumps(result) + "\n")
    print(json.dumps(result))
    if not result["ok"]:
        raise typer.Exit(1)


@app.command()
def generate(
    prompt: Annotated[str | None, typer.Argument(help="Text to continue.")] = None,
    prompts: Annotated[Path | None, typer.Option(help="A file of prompts, one a line, instead of PROMPT.")] = None,
    checkpoint: Annotated[str, typer.Option(help="Drafter: a folder, org/name on the hub, or 'builtin'.")] = "builtin",
    target: Annotated[
        str | None, typer.Option(help="Target: a folder or org/name; needed unless the pair is builtin.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to generate at most.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Sample among so many likeliest tokens; 0: all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Sample among the likeliest tokens of so much probability.")] = 1.0,
    repetition_penalty: Annotated[float, typer.Option(help="Above 1: tokens seen before become less likely.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of the sampling noise.")] = 0,
    loop: Annotated[str, typer.Option(help="host: one step at a time; device: many rounds in one program.")] = "host",
    framework: Annotated[str, typer.Option(help="jax or torch.")] = "jax",
    device: Annotated[str | None, typer.Option(help="cpu or gpu; default gpu where there is one.")] = None,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    num_speculative_tokens: Annotated[int | None, typer.Option(help="Drafts; default all of a block.")] = None,
    max_num_seqs: Annotated[
        int | None, typer.Option(help="Requests at a time; default all prompts, 8 at most.")
    ] = None,
    max_model_len: Annotated[int, typer.Option(help="Positions of a request at most.")] = 1024,
    check: Annotated[
        bool | None,
        typer.Option(help="Exit 1 unless the text is plain greedy decoding's; default for the builtin pair."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the JSON line only.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write the JSON document to this file too.")] = None,
) -> None:
    """Continue text speculatively; drafts that were accepted are shown in colour. How much faster is it, and the same?"""
    _check_dtype(dtype)
    if framework not in ("jax", "torch"):
        raise InputError(f"--framework {framework!r}: pass jax or torch")
    if loop not in ("host", "device") or (framework == "torch" and loop == "device"):
        raise InputError(f"--loop {loop!r}: pass host or device; PyTorch has the host loop only")
    _check_pair(checkpoint, target)
    if out is not None:
        _check_out(out)
    texts = _prompts(prompt, prompts)
    from jax_dflash.sampling_params import SamplingParams

    params = SamplingParams(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
    )
    drafter, whole = _pair(checkpoint, target)
    device = select_device(device)
    from rich.console import Console

    from jax_dflash import excerpts
    from jax_dflash import generate as verb

    job = verb.GenerateJob(
        checkpoint=drafter,
        target=whole,
        pair=checkpoint if checkpoint == "builtin" else Path(checkpoint).name,
        prompts=texts,
        params=params,
        loop=loop,
        framework=framework,
        device=device,
        dtype=dtype,
        num_speculative_tokens=num_speculative_tokens,
        max_num_seqs=max_num_seqs or min(8, len(texts)),
        max_model_len=max_model_len,
        check=checkpoint == "builtin" if check is None else check,
    )
    console = Console()
    stream = None if as_json else verb.TextStream(excerpts.tokenizer(whole), console, several=len(texts) > 1)
    result = verb.generate(job, stream, capture_progress=not as_json)
    if not as_json:
        console.print()
        for line in verb.summary(result):
            console.print(line, highlight=False, soft_wrap=True)
    if out is not None:
        out.write_text(json.dumps(result) + "\n")
    print(json.dumps(result))
    if result["interrupted"]:
        raise typer.Exit(130)
    if not result["ok"]:
        raise typer.Exit(1)


def _prompts(prompt: str | None, path: Path | None) -> list[str]:
    if (prompt is None) == (path is None):
        raise InputError("pass a PROMPT or --prompts FILE, one of them")
    return [prompt or ""] if path is None else _prompts_of(path)


def _prompts_of(path: Path) -> list[str]:
    if not path.is_file():
        raise InputError(f"--prompts {path}: no such file")
    try:
        lines = [line for line in path.read_text().splitlines() if line.strip()]
    except UnicodeDecodeError:
        raise InputError(f"--prompts {path}: not UTF-8 text") from None
    if not lines:
        raise InputError(f"--prompts {path}: no prompt in it; write one a line")
    return lines


@app.command()
def record(
    out: Annotated[Path, typer.Option(help="The trace, a safetensors file.")],
    checkpoint: Annotated[
        str, typer.Option(help="Drafter that says which hidden states: a folder, org/name on the hub, or 'builtin'.")
    ] = "builtin",
    target: Annotated[
        str | None, typer.Option(help="Target: a folder or org/name; needed unless the pair is builtin.")
    ] = None,
    prompts: Annotated[Path | None, typer.Option(help="A file of prompts, one a line.")] = None,
    num_prompts: Annotated[int, typer.Option(help="Of the shipped held-out excerpts, without --prompts.")] = 16,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to generate at most.")] = 128,
    max_num_seqs: Annotated[int, typer.Option(help="Requests at a time.")] = 8,
    max_model_len: Annotated[int, typer.Option(help="Positions of a request at most.")] = 1024,
    device: Annotated[str | None, typer.Option(help="cpu or gpu; default gpu where there is one.")] = None,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    as_json: Annotated[bool, typer.Option("--json", help="Print the JSON line only.")] = False,
) -> None:
    """Write a target's hidden states and tokens of real text, and of its own greedy continuation, to one file."""
    _check_dtype(dtype)
    _check_pair(checkpoint, target)
    _check_out(out)
    texts = None if prompts is None else _prompts_of(prompts)
    drafter, whole = _pair(checkpoint, target)
    device = select_device(device)
    from jax_dflash import record as verb

    job = verb.RecordJob(
        out=out,
        name="builtin" if target in (None, "builtin") else target,
        target=whole,
        checkpoint=drafter,
        prompts=texts,
        num_prompts=num_prompts,
        max_new_tokens=max_new_tokens,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        device=device,
        dtype=dtype,
    )
    result = verb.record(job, progress=not as_json)
    if not as_json:
        print(
            f"{result['documents']} documents, {result['tokens']} tokens, {result['generated']} of them the target's own, "
            f"{result['bytes']:,} bytes: {out}"
        )
    print(json.dumps(result))


@app.command()
def judge(
    trace: Annotated[Path, typer.Argument(help="What `record` wrote.")],
    checkpoint: Annotated[str, typer.Option(help="Drafter: a folder, org/name on the hub, or 'builtin'.")] = "builtin",
    target: Annotated[
        str | None, typer.Option(help="Target of the trace, for the embedding and LM head that a drafter shares.")
    ] = None,
    stride: Annotated[int, typer.Option(help="Draft at every so manieth token of the continuations.")] = 1,
    framework: Annotated[str, typer.Option(help="jax or torch.")] = "jax",
    device: Annotated[str | None, typer.Option(help="cpu or gpu; default gpu where there is one.")] = None,
    num_speculative_tokens: Annotated[int | None, typer.Option(help="Drafts; default all of a block.")] = None,
    max_num_seqs: Annotated[int, typer.Option(help="Documents at a time.")] = 8,
    as_json: Annotated[bool, typer.Option("--json", help="Print the JSON line only.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write the JSON document to this file too.")] = None,
) -> None:
    """Say how many of a drafter's tokens are the ones that the target wrote in a trace, without running the target."""
    if framework not in ("jax", "torch"):
        raise InputError(f"--framework {framework!r}: pass jax or torch")
    if out is not None:
        _check_out(out)
    from jax_dflash import hub

    shipped = checkpoint == "builtin"
    drafter = ASSETS / "builtin" / "drafter" if shipped else hub.resolve(checkpoint)
    whole = hub.resolve(target) if target not in (None, "builtin") else None
    if target == "builtin" or (shipped and target is None):
        whole = ASSETS / "builtin" / "target"
    device = select_device(device)
    from jax_dflash import judge as verb

    job = verb.JudgeJob(
        trace=trace,
        checkpoint=drafter,
        target=whole,
        pair=checkpoint if shipped else Path(checkpoint).name,
        stride=stride,
        framework=framework,
        device=device,
        num_speculative_tokens=num_speculative_tokens,
        max_num_seqs=max_num_seqs,
    )
    result = verb.run(job, progress=not as_json)
    if not as_json:
        for line in verb.summary(result):
            print(line)
    if out is not None:
        out.write_text(json.dumps(result) + "\n")
    print(json.dumps(result))


def _check_dtype(dtype: str) -> None:
    if dtype not in ("float32", "bfloat16"):
        raise InputError(f"--dtype {dtype!r}: pass float32 or bfloat16")


def _check_pair(checkpoint: str, target: str | None) -> None:
    if checkpoint != "builtin" and target is None:
        raise InputError("--checkpoint needs the drafter's own target too; pass --target DIR")


def _pair(checkpoint: str, target: str | None, revision: str | None = None) -> tuple[Path, Path]:
    """The folders of a drafter and its target, from the hub where they have names."""
    from jax_dflash import hub

    drafter = ASSETS / "builtin" / "drafter" if checkpoint == "builtin" else hub.resolve(checkpoint, revision)
    return drafter, ASSETS / "builtin" / "target" if target in (None, "builtin") else hub.resolve(target)


def _check_out(out: Path) -> None:
    if out.is_dir() or not out.parent.is_dir():
        raise InputError(f"--out {out}: expected a file in a directory that exists")


@app.command()
def inspect(
    path: Annotated[str, typer.Argument(help="A drafter's folder, org/name on the hub, or a config.json alone.")],
    target: Annotated[str | None, typer.Option(help="Check that it belongs to this target.")] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a drafter from the hub.")] = None,
    yarn_attention: YarnAttention = "mscale",
    num_speculative_tokens: Annotated[
        int | None, typer.Option(help="Drafts per request; default all of a block.")
    ] = None,
    max_num_seqs: Annotated[int, typer.Option(help="Requests in one step at most.")] = 32,
    length: Annotated[int, typer.Option(help="Context tokens of a request, for the floors.")] = 1024,
    bandwidth: Annotated[float, typer.Option(help="Memory bandwidth in TB/s; default an H200's datasheet.")] = 4.8,
    peak: Annotated[
        float, typer.Option(help="Matrix rate in Tflop/s; default an H200's in bfloat16, measured.")
    ] = 790.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the JSON line only.")] = False,
) -> None:
    """Say what a drafter is, how big, how fast at best, and what does not fit. Neither JAX nor PyTorch is loaded."""
    from jax_dflash import hub
    from jax_dflash import inspect as verb

    job = verb.InspectJob(
        path=hub.resolve(path, revision),
        target=None if target is None else hub.resolve(target),
        yarn_attention=yarn_attention,
        num_speculative_tokens=num_speculative_tokens,
        max_num_seqs=max_num_seqs,
        length=length,
        bandwidth=bandwidth * 1e12,
        peak=peak * 1e12,
    )
    result = verb.inspect(job)
    if as_json:
        print(json.dumps(result))
    else:
        from rich.console import Console

        Console().print(verb.report(result), highlight=False)
    if result["refused"]:
        raise InputError(result["refused"])


@app.command()
def convert(
    source: Annotated[str, typer.Argument(help="A drafter's folder, or org/name on the hub.")],
    target: Annotated[Path, typer.Argument(help="A new folder.")],
    form: Annotated[str, typer.Option("--format", help="z-lab or speculators.")],
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a drafter from the hub.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the JSON line only.")] = False,
) -> None:
    """Write a drafter in another published form: the same record, the same bits."""
    from jax_dflash import convert as verb
    from jax_dflash import hub

    result = verb.convert(hub.resolve(source, revision), target, form)
    if not as_json:
        print(
            f"{result['num_tensors']} tensors, {result['num_bytes']:,} bytes, {result['from']} form to {form} form: {target}"
        )
    print(json.dumps(result))


def select_device(device: str | None) -> str:
    """cpu or gpu, told to JAX before its first array. Raises InputError for a GPU that is not there."""
    if device not in (None, "cpu", "gpu"):
        raise InputError(f"--device {device!r}: pass cpu or gpu")
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # PyTorch is in this process too
    import jax
    import torch

    if device is None:
        device = "gpu" if torch.cuda.is_available() and jax.default_backend() == "gpu" else "cpu"
    if device == "gpu" and not torch.cuda.is_available():
        raise InputError("--device gpu: PyTorch sees no CUDA device here; pass --device cpu")
    jax.config.update("jax_platforms", {"cpu": "cpu", "gpu": "cuda"}[device])
    try:
        jax.devices()
    except RuntimeError:
        raise InputError(
            "--device gpu: JAX sees no CUDA device here; install jax[cuda13] or pass --device cpu"
        ) from None
    return device


def run_app(app: typer.Typer) -> int:
    """Run a verb and return its exit code. Bad usage is an InputError, not typer's box of several lines."""
    try:
        return app(standalone_mode=False) or 0
    except Exception as error:
        # Newer typers carry their own copy of click, so usage errors have no class in common.
        format_message = getattr(error, "format_message", None)
        if format_message is None:
            raise
        if message := format_message():
            raise InputError(message) from None
        return 2  # no verb was given: the help has been printed


def main() -> None:
    """Run a verb; bad usage and an InputError end in one line and exit code 2, Ctrl-C in 130."""
    try:
        sys.exit(run_app(app))
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
