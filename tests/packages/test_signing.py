"""`blr verify --signature` on folders that model_signing signed."""

from __future__ import annotations

from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from exporting import compress_to
from model_signing import signing
from pico import save_pico
from running import Invoke


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("signing")
    return compress_to(save_pico("llama", folder / "dense"), folder / "out", method="svd", cf=1.5)


def keys(folder: Path) -> tuple[Path, Path]:
    """A private and a public key, PEM."""
    key, folder = ec.generate_private_key(ec.SECP256R1()), folder
    folder.mkdir(exist_ok=True)
    plain = serialization.NoEncryption()
    pem, pkcs8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    (folder / "private.pem").write_bytes(key.private_bytes(pem, pkcs8, plain))
    info = serialization.PublicFormat.SubjectPublicKeyInfo
    (folder / "public.pem").write_bytes(key.public_key().public_bytes(pem, info))
    return folder / "private.pem", folder / "public.pem"


def test_signed_changed_and_of_another_signer(output: Path, tmp_path: Path, invoke: Invoke) -> None:
    private, public = keys(tmp_path / "mine")
    signature = tmp_path / "out.sig"
    signing.Config().use_elliptic_key_signer(private_key=private).sign(output, signature)
    asked = ("verify", output, "--signature", signature, "--public-key")
    code, out, err = invoke(*asked, public)
    assert (code, err) == (0, "") and f"signed by {public}" in out
    code, out, err = invoke(*asked, keys(tmp_path / "other")[1])
    assert (code, out, err.count("\n")) == (10, "", 1)
    card = output / "README.md"
    kept = card.read_bytes()
    (output / "LICENSE").write_text("another one")  # neither signed nor listed
    assert invoke(*asked, public)[0] == 10
    (output / "LICENSE").unlink()
    assert invoke(*asked, public)[0] == 0 and card.read_bytes() == kept
    code, _, err = invoke("verify", output, "--signature", tmp_path / "none", "--public-key", public)
    assert code == 4 and "no such file" in err
    code, _, err = invoke("verify", output, "--signature", signature)
    assert code == 2 and "--public-key FILE" in err
