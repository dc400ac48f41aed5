"""`python -m shards.quant`, or `pointsman quantize`: a checkpoint in fewer bits."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from shards.bundled import weights
from shards.threads import default_threads, use_threads

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)

FormName = Literal["fp8", "fp8-block", "int8", "int4"]


def _report(sentence: str, *, end: str = "\n") -> None:
    print(sentence, file=sys.stderr, end=end, flush=True)  # noqa: T201 - the output of a command


def _progress(done: int, total: int) -> None:
    if sys.stderr.isatty():
        _report(f"\rquantising ... {done / max(1, total):4.0%}", end="\n" if done >= total else "")


@app.command(context_settings={"help_option_names": ["-h", "--help"]})
def quantize(
    model: Annotated[str, typer.Argument(help="A directory in Hugging Face format, in floating point, or `bundled`.")],
    target: Annotated[Path, typer.Argument(help="The directory to write, which must be new or empty.")],
    to: Annotated[FormName, typer.Option(help="Form of the matrices; see below.")] = "fp8",
    compare: Annotated[bool, typer.Option(help="Compare logits of both on a text.")] = True,
    text: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Text for this comparison; default: one of ours.")
    ] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads; default: from the usable cores.", min=1)] = None,
) -> None:
    """Write a model's checkpoint with its matrices in fewer bits, in a form that shards, vLLM and transformers read.

    \b
    fp8        e4m3 with a scale for each row (compressed-tensors)
    fp8-block  e4m3 with a scale for each block of 128 x 128, as DeepSeek and Qwen publish
    int8       int8 with a scale for each row, activations in int8 (compressed-tensors, W8A8)
    int4       four bits with a scale for each group of 128 inputs (compressed-tensors, W4A16)

    Embeddings, norms and the head stay as they are. Numbers are rounded without calibration data.

    \b
    Example:
      pointsman quantize ./Qwen3-0.6B ./Qwen3-0.6B-int8 --to int8
    """
    from shards.quant.write.checkpoint import write_quantised
    from shards.quant.write.compare import compare as compare_logits

    use_threads(threads or default_threads())
    source = weights() if model == "bundled" else Path(model)
    try:
        words = None if text is None else text.read_text()
        written = write_quantised(source, target, to, on_progress=_progress)
        before, after = (count / 2**20 for count in (written.bytes_before, written.bytes_after))
        _report(f"{written.matrices} matrices in {to}: {before:,.1f} MiB became {after:,.1f} MiB in {target}")
        _report(
            f"error of a matrix: {written.mean_error:.2%} in the mean, {written.largest_error:.2%} at most "
            f"({written.largest_in})"
        )
        if compare:
            difference = compare_logits(source, target, words)
            _report(
                f"over {difference.tokens} tokens: the most probable token is the same at {difference.agreement:.1%}, "
                f"KL divergence {difference.divergence:.4f} nats"
            )
    except (ValueError, OSError) as error:
        _report(f"cannot quantise {model}: {error}")
        raise typer.Exit(1) from error


if __name__ == "__main__":
    app()
