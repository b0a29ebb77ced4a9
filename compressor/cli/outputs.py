"""Commands on an output: inspect, verify and push."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from blr.compressor.base.errors import UsageError
from blr.compressor.base.progress import Progress
from blr.compressor.base.quoting import printable
from blr.compressor.cli.options import Format, FormatOption, Output, Quiet, print_result, taking


@taking()
def inspect(checkpoint: Output, verify: bool = False, format: FormatOption = Format.text) -> None:
    """Show the layers of an output: structure, rank, parameters and error.

    Options:
        verify: Compare the weights, too, with the manifest.
    """
    from blr.compressor.commands.inspect import inspect_output, inspect_text

    print_result(inspect_output(Path(checkpoint), verify), inspect_text, format)


@taking()
def verify(
    output: Output,
    signature: Path | None = None,
    public_key: Path | None = None,
    identity: str | None = None,
    issuer: str | None = None,
    format: FormatOption = Format.text,
) -> None:
    """Check every file of an output against its manifest; exit code 10 on a mismatch.

    Options:
        signature: Check this signature of the folder by model_signing (extra sign).
        public_key: Public key of the signer, a PEM file.
        identity: Name of the signer for sigstore, in place of a key.
        issuer: URL of the provider that vouches for the name.
    """
    from blr.compressor.commands.verify import verify_output, verify_text
    from blr.compressor.integrations.signing import Signer, verify_signature

    signer = Signer(public_key, identity, issuer) if signature else None
    if signer is None and (public_key or identity or issuer):
        raise UsageError("--public-key, --identity and --issuer say who signed: give --signature FILE")
    result = verify_output(Path(output))
    if signature is not None and signer is not None:
        verify_signature(Path(output), signature, signer)
        result["signed"] = str(public_key or identity)
    print_result(result, verify_text, format)


@taking()
def push(
    output: Output,
    repository: Annotated[str, typer.Argument(help="owner/name on the hub; made if there is none.")],
    private: bool = False,
    dry_run: bool = False,
    metrics: Path | None = None,
    branch: str | None = None,
    message: str = "Structured weights by blr",
    quiet: Quiet = False,
    format: FormatOption = Format.text,
) -> None:
    """Verify an output, complete its card and upload it to the hub.

    Options:
        private: Make the repository visible to its owner alone.
        dry_run: Check and print what would be sent, and send nothing.
        metrics: Put the results of `blr eval --format json` in this file on the card.
        branch: Branch to commit to. [main]
        message: Message of the commit.
    """
    from blr.compressor.commands.push import prepare_push, printed, send

    prepared = prepare_push(Path(output), repository, metrics)
    Progress(quiet).notes(list(prepared.notes))
    commit = None if dry_run else send(prepared, private=private, revision=branch, message=message)
    found = printed(prepared) | ({} if commit is None else {"commit": commit})
    where = commit or f"{prepared.repository} (dry run: nothing was sent)"
    card = [f"  {key}: {value}" for key, value in prepared.front.items()]
    said = [f"{len(prepared.files)} files, {prepared.bytes:,} bytes: {where}", "card:", *card]
    print_result(found, lambda _: "\n".join(map(printable, said)), format)
