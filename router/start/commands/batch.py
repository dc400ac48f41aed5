"""The command `pointsman batch` and its commands."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from router.start.arguments import USUAL_AT, At, Ca, Cert, CertKey
from tls.settings import TlsSettings

if TYPE_CHECKING:
    from router.client.batches import BatchClient

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Submit batches of requests to a router, show how far they are, and fetch results. Reads an API key from "
    "POINTSMAN_KEY.\n\n\b\nExample:\n  pointsman batch submit requests.jsonl --out results.jsonl",
)

Id = Annotated[str, typer.Argument(metavar="BATCH", help="The id of the batch.")]
Out = Annotated[Path | None, typer.Option(metavar="FILE", help="Write results to FILE.")]


def _client(at: str, ca: str | None, cert: str | None, key: str | None) -> BatchClient:
    from router.client.batches import BatchClient

    return BatchClient.from_environment(at, TlsSettings(cert, key, ca))


@app.command(short_help="Upload FILE and begin a batch.")
def submit(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Requests, one JSON object in each line.")],
    at: At = USUAL_AT,
    ca: Ca = None,
    cert: Cert = None,
    key: CertKey = None,
    endpoint: Annotated[str, typer.Option(help="Where all requests go.")] = "/v1/chat/completions",
    window: Annotated[str, typer.Option(help="The batch expires after this time: 24h, 2h.")] = "24h",
    wait: Annotated[bool, typer.Option("--wait", help="Wait for its end, with a progress bar.")] = False,
    out: Out = None,
) -> None:
    """Upload FILE and begin a batch of its requests; prints the id of the batch.

    \b
    Examples:
      pointsman batch submit requests.jsonl
      pointsman batch submit requests.jsonl --out results.jsonl
    """
    from router.client import batches

    if not batches.submit(_client(at, ca, cert, key), batches.BatchFile(file, endpoint, window, wait, out)):
        raise typer.Exit(1)


@app.command(short_help="Wait until a batch has ended.")
def wait(batch: Id, at: At = USUAL_AT, ca: Ca = None, cert: Cert = None, key: CertKey = None, out: Out = None) -> None:
    """Wait until BATCH has ended, with a progress bar. Exits with 1 if it is not completed.

    \b
    Example:
      pointsman batch wait batch_6924f0 --out results.jsonl
    """
    from router.client import batches

    if not batches.wait(_client(at, ca, cert, key), batch, out):
        raise typer.Exit(1)


@app.command("list", short_help="The newest batches.")
def show_all(
    at: At = USUAL_AT,
    ca: Ca = None,
    cert: Cert = None,
    key: CertKey = None,
    most: Annotated[int, typer.Option(help="So many at most.", min=1, max=10_000)] = 20,
) -> None:
    """List the newest batches and how far they are.

    \b
    Example:
      pointsman batch list
    """
    from router.client import batches

    batches.show_all(_client(at, ca, cert, key), most)


@app.command(short_help="One batch.")
def show(batch: Id, at: At = USUAL_AT, ca: Ca = None, cert: Cert = None, key: CertKey = None) -> None:
    """Show how far BATCH is.

    \b
    Example:
      pointsman batch show batch_6924f0
    """
    from router.client import batches

    batches.show(_client(at, ca, cert, key), batch)


@app.command(short_help="End a batch early.")
def cancel(batch: Id, at: At = USUAL_AT, ca: Ca = None, cert: Cert = None, key: CertKey = None) -> None:
    """Cancel BATCH: requests that were answered stay answered.

    \b
    Example:
      pointsman batch cancel batch_6924f0
    """
    from router.client import batches

    batches.cancel(_client(at, ca, cert, key), batch)


@app.command(short_help="The results of a batch that has ended.")
def results(
    batch: Id,
    at: At = USUAL_AT,
    ca: Ca = None,
    cert: Cert = None,
    key: CertKey = None,
    out: Out = None,
    errors: Annotated[bool, typer.Option("--errors", help="The requests that failed instead.")] = False,
) -> None:
    """Write the results of BATCH to stdout or to FILE, one JSON object in each line.

    \b
    Example:
      pointsman batch results batch_6924f0 > results.jsonl
    """
    from router.client import batches

    batches.results(_client(at, ca, cert, key), batch, out, errors=errors)
