"""Detached Ed25519 signatures: who may say that a report, baseline or policy is the one that was made. Extra `signing`.

`FILE.sig` lies beside FILE and speaks for its bytes. Trusted are the public keys of a file or folder, so a key is rotated by
adding the new one, signing with it, and removing the old one. A seal (`digest` in a document) catches accidents; only this
catches an editor. No message holds key material.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from memguard.documents import SCHEMA_VERSION, Document, load_document
from memguard.errors import EvidenceError, InputError, MissingExtraError
from memguard.files import write_text_atomic

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

DOMAIN = b"memguard signature of a file, version 1\n"  # what is signed can be taken for nothing else
MAX_SIGNATURE_BYTES, MAX_KEY_BYTES = 4 * 2**10, 64 * 2**10
PEM_BLOCK = re.compile(rb"-----BEGIN ([A-Z0-9 ]+)-----.*?-----END \1-----", re.DOTALL)


class Signature(Document):
    """What stands in `FILE.sig`."""

    kind: Literal["memguard signature"] = "memguard signature"
    schema_version: int = SCHEMA_VERSION
    key_id: str = Field(description="first 16 hex digits of the sha256 of the public key")
    algorithm: Literal["ed25519"] = "ed25519"
    signature: str = Field(description="base64; over a fixed line and the sha256 of the file's bytes")


def new_key(private: Path, *, passphrase: bytes | None = None) -> tuple[Path, str]:
    """Make a key pair: the private key at `private` (mode 0600), the public one beside it, as `NAME.pub.pem`.

    Args:
        private: file of the private key, in PEM; neither file may exist.
        passphrase: encrypts the private key; None: it is stored in the clear.

    Returns:
        The file of the public key, and the id of the key.

    Raises:
        InputError: a file exists already or cannot be written, or the passphrase is empty.
        MissingExtraError: the extra `signing` is not installed.
    """
    _require_extra("making a key")
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    if passphrase == b"":
        raise InputError("the passphrase must not be empty. Leave it out to store the key in the clear.")
    if not private.name or private.is_dir():
        raise InputError(f"the private key must be a file, got '{private}'.")
    key, public = Ed25519PrivateKey.generate(), private.with_suffix(".pub.pem")
    encryption = serialization.BestAvailableEncryption(passphrase) if passphrase else serialization.NoEncryption()
    secret = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption)
    shown = key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    claimed: list[Path] = []
    try:
        for path in (private, public):
            _claim(path)
            claimed.append(path)
        write_text_atomic(private, secret.decode("ascii"), mode=0o600)
        write_text_atomic(public, shown.decode("ascii"))
    except BaseException:
        for path in claimed:
            path.unlink(missing_ok=True)
        raise
    return public, _key_id(key.public_key())


def needs_passphrase(private: Path) -> bool:
    """Whether a private key is encrypted. Raises `InputError` when the file cannot be read."""
    return b"ENCRYPTED" in _labels(_read_key(private))[0]


def sign_file(path: Path, private: Path, *, passphrase: bytes | None = None) -> Path:
    """Write `FILE.sig` beside a file; an older signature is replaced.

    Args:
        path: any file, such as a report, a baseline or a policy.
        private: the private key, in PEM.
        passphrase: of the private key, where it is encrypted.

    Returns:
        The file of the signature.

    Raises:
        InputError: the file or the key cannot be read, the passphrase is missing or wrong, or the place cannot be written to.
        MissingExtraError: the extra `signing` is not installed.
    """
    _require_extra("signing a file")
    key = _private_key(private, passphrase)
    signature = base64.b64encode(key.sign(_message(path))).decode("ascii")
    document = Signature(key_id=_key_id(key.public_key()), signature=signature)
    target = _beside(path)
    write_text_atomic(target, document.model_dump_json(indent=1) + "\n")
    return target


def require_signature(path: Path, keys: Path) -> str:
    """The id of the trusted key that signed a file.

    Args:
        path: the file; its signature is `FILE.sig` beside it.
        keys: trusted public keys in PEM: one file with one or more, or a folder of `*.pem` files.

    Raises:
        InputError: the file or the keys cannot be read, or what should be public keys is something else.
        EvidenceError: the file is not signed, by another key, or was changed after it was signed.
        MissingExtraError: the extra `signing` is not installed.
    """
    _require_extra("checking a signature")
    from cryptography.exceptions import InvalidSignature

    trusted, message = _trusted(keys), _message(path)
    found, signature = _read_signature(path)
    if found.key_id not in trusted:
        known = re.fullmatch(r"[0-9a-f]{16}", found.key_id)
        raise EvidenceError(f"'{path.name}' is signed by key {found.key_id if known else '(no id)'}, which is not trusted.")
    try:
        trusted[found.key_id].verify(signature, message)
    except InvalidSignature:
        raise EvidenceError(
            f"'{path.name}' was changed after it was signed, or its signature is that of another file."
        ) from None
    return found.key_id


def _require_extra(feature: str) -> None:
    try:
        import cryptography  # noqa: F401
    except ImportError:
        raise MissingExtraError(feature, "signing") from None


def _beside(path: Path) -> Path:
    return path.with_name(f"{path.name}.sig")


def _message(path: Path) -> bytes:
    """What is signed for a file."""
    digest = hashlib.sha256()
    try:
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):  # a pipe or device has no end to wait for
            raise InputError(f"'{path}' must be a regular file.")
        with path.open("rb") as stream:
            while chunk := stream.read(1 << 20):
                digest.update(chunk)
    except FileNotFoundError:
        raise InputError(f"'{path}' does not exist.") from None
    except OSError as error:
        raise InputError(f"'{path}' cannot be read: {error.strerror}.") from None
    return DOMAIN + digest.digest()


def _read_signature(path: Path) -> tuple[Signature, bytes]:
    beside = _beside(path)
    if not beside.is_file():
        raise EvidenceError(f"'{path.name}' is not signed: there is no '{beside.name}' beside it.")
    if beside.stat().st_size > MAX_SIGNATURE_BYTES:
        raise EvidenceError(f"signature '{beside.name}' is larger than {MAX_SIGNATURE_BYTES} bytes: it is none.")
    try:
        found = load_document(beside, Signature, what="signature")
        raw = base64.b64decode(found.signature, validate=True)
    except InputError as error:
        raise EvidenceError(str(error)) from None
    except ValueError:
        raise EvidenceError(f"signature '{beside.name}' is not base64.") from None
    return found, raw


def _claim(path: Path) -> None:
    """Take a name that nobody has: an older key is never replaced, whoever writes at the same time."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except OSError as error:
        if isinstance(error, FileExistsError) and os.path.lexists(path):
            raise InputError(f"key '{path}' exists already, and a key cannot be made again. Give another name.") from None
        raise InputError(f"'{path}' cannot be written: {error.strerror}.") from None


def _key_id(key: Ed25519PublicKey) -> str:
    return hashlib.sha256(key.public_bytes_raw()).hexdigest()[:16]


def _read_key(path: Path) -> bytes:
    try:
        with path.open("rb") as stream:
            data = stream.read(MAX_KEY_BYTES + 1)
    except OSError as error:
        raise InputError(f"key '{path}' cannot be read: {error.strerror}.") from None
    if len(data) > MAX_KEY_BYTES or not PEM_BLOCK.search(data):
        raise InputError(f"key '{path.name}' holds no key in PEM.")
    return data


def _labels(data: bytes) -> list[bytes]:
    return [block[1] for block in PEM_BLOCK.finditer(data)]


def _private_key(path: Path, passphrase: bytes | None) -> Ed25519PrivateKey:
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    data = _read_key(path)
    is_encrypted = needs_passphrase(path)
    if is_encrypted and not passphrase:
        raise InputError(f"key '{path.name}' is encrypted and needs its passphrase.")
    try:
        key = load_pem_private_key(data, passphrase if is_encrypted else None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        cure = "the passphrase is wrong, or the file is damaged" if is_encrypted else "it holds no private key that is whole"
        raise InputError(f"key '{path.name}' does not open: {cure}.") from None
    if not isinstance(key, Ed25519PrivateKey):
        raise InputError(f"key '{path.name}' must be an Ed25519 key, got another kind.")
    return key


def _trusted(keys: Path) -> dict[str, Ed25519PublicKey]:
    """Id -> public key."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    files = sorted(keys.glob("*.pem")) if keys.is_dir() else [keys]
    if not files:
        raise InputError(f"folder of keys '{keys}' holds no '*.pem' file.")
    trusted = {}
    for path in files:
        data = _read_key(path)
        if any(b"PRIVATE" in label for label in _labels(data)):
            raise InputError(
                f"'{path.name}' holds a private key. Only public keys ('*.pub.pem') belong where they are trusted."
            )
        for block in PEM_BLOCK.finditer(data):
            try:
                key = load_pem_public_key(block[0])
            except (ValueError, UnsupportedAlgorithm):
                key = None
            if not isinstance(key, Ed25519PublicKey):
                raise InputError(f"key '{path.name}' must hold Ed25519 public keys alone, got something else.")
            trusted[_key_id(key)] = key
    return trusted
