"""`blr verify`: an output against its manifest, and against a signature."""

from pathlib import Path

from blr.compressor.cli.from_fields import Format, FormatOption, Output, print_result, taking


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
    from blr.compressor.base.errors import UsageError
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
