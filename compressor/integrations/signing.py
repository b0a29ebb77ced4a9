"""Signatures of whole folders by OpenSSF Model Signing (extra `sign`): who vouches for these bytes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from blr.compressor.base.errors import InputError, UsageError, VerifyError
from blr.compressor.base.exhaustion import check_packages
from blr.compressor.base.quoting import first_line


@dataclass(frozen=True)
class Signer:
    """Who must have signed: the owner of a key, or an identity that an `issuer` vouched for."""

    key: Path | None = None
    identity: str | None = None
    issuer: str | None = None

    def __post_init__(self) -> None:
        if (self.key is None) == (self.identity is None) or bool(self.identity) != bool(self.issuer):
            raise UsageError(
                "--signature: expected --public-key FILE, or --identity NAME with --issuer URL, to say "
                "whose it must be"
            )


def verify_signature(folder: Path, signature: Path, signer: Signer) -> None:
    """Check the signature of all files. Raises CapabilityError without model_signing, InputError for an
    unreadable signature or key, VerifyError for another signer or other files."""
    check_packages("--signature", "model_signing", extra="sign")
    for path in filter(None, (signature, signer.key)):
        if not path.is_file():
            raise InputError(f"{path}: no such file; expected the signature and the signer's public key")
    try:
        _verify(folder, signature, signer)
    except Exception as error:  # its own, those of cryptography and of sigstore
        reason = first_line(error, 200)
        remedy = "take the folder and the signature from the same place again"
        raise VerifyError(f"{folder}: not as {signature} says ({reason}); {remedy}") from error


def _verify(folder: Path, signature: Path, signer: Signer) -> None:
    from model_signing import verifying

    config = verifying.Config()
    if signer.key is not None:
        return config.use_elliptic_key_verifier(public_key=signer.key).verify(folder, signature)
    assert signer.identity and signer.issuer  # as it makes sure without a key
    verifier = config.use_sigstore_verifier(identity=signer.identity, oidc_issuer=signer.issuer)
    verifier.verify(folder, signature)
