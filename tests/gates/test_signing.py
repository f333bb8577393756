"""Who signed a file: keys, rotation, and every way a signature fails to speak for what lies beside it."""

from __future__ import annotations

import base64
import hashlib
import json
import stat
import sys

import pytest
import typer
from typer.testing import CliRunner

from memguard import cli_keys
from memguard.errors import EvidenceError, InputError, MissingExtraError
from memguard.gates.signing import DOMAIN, needs_passphrase, new_key, require_signature, sign_file

ed25519 = pytest.importorskip("cryptography.hazmat.primitives.asymmetric.ed25519")
from cryptography.hazmat.primitives import serialization  # noqa: E402


@pytest.fixture
def private(tmp_path):
    """A key pair in a folder of its own: the private key."""
    new_key(tmp_path / "safe" / "release.pem")
    return tmp_path / "safe" / "release.pem"


@pytest.fixture
def keys(tmp_path, private):
    """A folder of trusted keys that holds the public half."""
    folder = tmp_path / "trusted"
    folder.mkdir()
    trust(folder, private)
    return folder


@pytest.fixture
def signed(report, tmp_path, private):
    """A report with its signature."""
    report.save(tmp_path / "report.json")
    sign_file(tmp_path / "report.json", private)
    return tmp_path / "report.json"


def trust(folder, private):
    public = private.with_suffix(".pub.pem")
    (folder / public.name).write_bytes(public.read_bytes())


def edit(path, **changes):
    """Change fields of a `.sig`."""
    beside = path.with_name(f"{path.name}.sig")
    beside.write_text(json.dumps({**json.loads(beside.read_text()), **changes}))


# -- signing


def test_a_signed_file_names_the_key_that_signed_it(signed, private, keys):
    public = serialization.load_pem_public_key(private.with_suffix(".pub.pem").read_bytes())
    key_id = hashlib.sha256(public.public_bytes_raw()).hexdigest()[:16]
    assert require_signature(signed, keys) == key_id
    assert require_signature(signed, keys / "release.pub.pem") == key_id
    document = json.loads(signed.with_name("report.json.sig").read_text())
    assert {key: document[key] for key in ("kind", "key_id", "algorithm")} == {
        "kind": "memguard signature",
        "key_id": key_id,
        "algorithm": "ed25519",
    }
    # What is signed, by hand: another program can check it, and it is no signature of the bare bytes or of their digest.
    message = b"memguard signature of a file, version 1\n" + hashlib.sha256(signed.read_bytes()).digest()
    public.verify(base64.b64decode(document["signature"]), message)


def test_an_older_signature_is_replaced(signed, private, keys, make_report):
    make_report(2).save(signed)
    with pytest.raises(EvidenceError, match="was changed after it was signed"):
        require_signature(signed, keys)
    sign_file(signed, private)
    require_signature(signed, keys)


def test_any_file_can_be_signed_and_one_that_is_not_there_cannot(tmp_path, private, keys):
    policy = tmp_path / "policy.yaml"
    policy.write_bytes(b"\xff\x00" * 2**20)
    sign_file(policy, private)
    require_signature(policy, keys)
    with pytest.raises(InputError, match=r"none\.json' does not exist"):
        sign_file(tmp_path / "none.json", private)
    with pytest.raises(InputError, match="cannot be read: Is a directory"):
        require_signature(tmp_path, keys)


# -- what is no signature of the file


def test_one_changed_byte_is_noticed(signed, keys):
    data = bytearray(signed.read_bytes())
    data[len(data) // 2] ^= 1
    signed.write_bytes(data)
    with pytest.raises(EvidenceError, match=r"'report\.json' was changed after it was signed"):
        require_signature(signed, keys)


def test_an_editor_who_renews_the_seal_is_noticed(signed, keys, report):
    """The seal alone is computed by anyone; that is what a signature is for."""
    from memguard.audit.report import load_report

    report.model_copy(update={"duration_s": report.duration_s + 1.0}).save(signed)
    load_report(signed)
    with pytest.raises(EvidenceError, match="was changed after it was signed"):
        require_signature(signed, keys)


def test_an_unsigned_file_is_refused(report, tmp_path, keys):
    report.save(tmp_path / "report.json")
    with pytest.raises(EvidenceError, match=r"'report\.json' is not signed: there is no 'report\.json\.sig' beside it"):
        require_signature(tmp_path / "report.json", keys)
    (tmp_path / "report.json.sig").mkdir()
    with pytest.raises(EvidenceError, match="is not signed"):
        require_signature(tmp_path / "report.json", keys)


def test_a_signature_of_another_file_is_refused(signed, private, keys, make_report, tmp_path):
    other = tmp_path / "other.json"
    make_report(2).save(other)
    sign_file(other, private)
    (tmp_path / "other.json.sig").replace(tmp_path / "report.json.sig")
    with pytest.raises(EvidenceError, match="its signature is that of another file"):
        require_signature(signed, keys)


def test_a_key_that_is_not_trusted_is_refused_whatever_id_it_claims(signed, keys, tmp_path):
    trusted_id = require_signature(signed, keys)
    _, other_id = new_key(tmp_path / "other.pem")
    sign_file(signed, tmp_path / "other.pem")
    with pytest.raises(EvidenceError, match=f"is signed by key {other_id}, which is not trusted"):
        require_signature(signed, keys)
    edit(signed, key_id=trusted_id)
    with pytest.raises(EvidenceError, match="was changed after it was signed"):
        require_signature(signed, keys)


def test_a_signature_without_the_domain_is_none(signed, private, keys):
    """So that nothing this key signs elsewhere can be passed off as a signature of a report."""
    key = serialization.load_pem_private_key(private.read_bytes(), None)
    for message in (signed.read_bytes(), hashlib.sha256(signed.read_bytes()).digest(), DOMAIN):
        edit(signed, signature=base64.b64encode(key.sign(message)).decode())
        with pytest.raises(EvidenceError, match="was changed after it was signed"):
            require_signature(signed, keys)


MALFORMED = {
    "empty": ("", "is not valid JSON"),
    "cut short": ('{"kind": "memguard signature", "schema_ver', "is not valid JSON"),
    "a list": ("[]", "must be a JSON object"),
    "no fields": ("{}", "key_id: Field required"),
    "huge": (" " * 5000, r"is larger than 4096 bytes"),
    "nested": ("[" * 4000, "is not valid JSON"),
    "nested, whole": ('{"a":' * 650 + "1" + "}" * 650, "signature 'report.json.sig'"),
    "a report": ('{"kind": "memguard audit report"}', "is a memguard audit report, not a memguard signature"),
    "newer": ('{"schema_version": 2}', "schema version 2"),
    "binary": ("\udcff", "is not UTF-8 text"),
}


@pytest.mark.parametrize(("text", "match"), MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_signature_is_no_evidence(signed, keys, text, match):
    signed.with_name("report.json.sig").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(EvidenceError, match=match):
        require_signature(signed, keys)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"algorithm": "none"}, "algorithm: Input should be 'ed25519'"),
        ({"signature": "not base64!"}, "is not base64"),
        ({"signature": "ä"}, "is not base64"),
        ({"signature": ""}, "was changed after it was signed"),
        ({"signature": base64.b64encode(bytes(63)).decode()}, "was changed after it was signed"),
        ({"signature": base64.b64encode(bytes(64)).decode()}, "was changed after it was signed"),
        ({"key_id": "\x1b[2J"}, r"is signed by key \(no id\), which is not trusted"),
        ({"extra": 1}, "a key that is not known"),
    ],
)
def test_a_changed_signature_is_no_evidence(signed, keys, changes, match):
    edit(signed, **changes)
    with pytest.raises(EvidenceError, match=match):
        require_signature(signed, keys)


def test_a_signature_has_one_spelling(signed, keys):
    text = json.loads(signed.with_name("report.json.sig").read_text())["signature"]
    edit(signed, signature=text[:40] + "\n" + text[40:])
    with pytest.raises(EvidenceError, match="is not base64"):
        require_signature(signed, keys)


# -- keys


def test_a_key_is_rotated_without_a_moment_in_which_nothing_passes(signed, private, keys, tmp_path):
    old_id = require_signature(signed, keys)
    _, new_id = new_key(tmp_path / "safe" / "next.pem")
    trust(keys, tmp_path / "safe" / "next.pem")
    assert require_signature(signed, keys) == old_id
    sign_file(signed, tmp_path / "safe" / "next.pem")
    assert require_signature(signed, keys) == new_id
    (keys / "release.pub.pem").unlink()
    assert require_signature(signed, keys) == new_id
    sign_file(signed, private)
    with pytest.raises(EvidenceError, match=f"is signed by key {old_id}, which is not trusted"):
        require_signature(signed, keys)


def test_several_public_keys_may_stand_in_one_file(signed, private, keys, tmp_path):
    new_key(tmp_path / "next.pem")
    both = tmp_path / "both.pem"
    both.write_bytes((tmp_path / "next.pub.pem").read_bytes() + b"\n# the old one\n" + (keys / "release.pub.pem").read_bytes())
    first = require_signature(signed, both)
    sign_file(signed, tmp_path / "next.pem")
    assert require_signature(signed, both) != first


def test_a_private_key_is_readable_by_its_owner_alone_and_never_replaced(private):
    assert stat.S_IMODE(private.stat().st_mode) == 0o600
    before = private.read_bytes(), private.with_suffix(".pub.pem").read_bytes()
    with pytest.raises(InputError, match=r"key '.*release\.pem' exists already"):
        new_key(private)
    assert (private.read_bytes(), private.with_suffix(".pub.pem").read_bytes()) == before


def test_a_pair_is_made_whole_or_not_at_all(tmp_path, monkeypatch):
    (tmp_path / "k.pub.pem").write_text("another's")
    with pytest.raises(InputError, match=r"k\.pub\.pem' exists already"):
        new_key(tmp_path / "k.pem")
    assert [path.name for path in tmp_path.iterdir()] == ["k.pub.pem"]

    def fail(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("memguard.gates.signing.write_text_atomic", fail)
    with pytest.raises(OSError, match="No space left"):
        new_key(tmp_path / "full.pem")
    assert [path.name for path in tmp_path.iterdir()] == ["k.pub.pem"]


def test_a_link_is_not_written_through(tmp_path):
    (tmp_path / "k.pem").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InputError, match=r"k\.pem' exists already"):
        new_key(tmp_path / "k.pem")
    assert not (tmp_path / "elsewhere").exists()


def test_a_place_that_cannot_be_written_to_is_named(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(InputError, match=r"k\.pem' cannot be written"):
        new_key(tmp_path / "file" / "k.pem")


def test_a_passphrase_keeps_the_key(tmp_path, signed, private):
    new_key(tmp_path / "locked.pem", passphrase=b"correct horse")
    assert (needs_passphrase(tmp_path / "locked.pem"), needs_passphrase(private)) == (True, False)
    for wrong, match in (
        (None, "is encrypted and needs its passphrase"),
        (b"", "needs its"),
        (b"x", "the passphrase is wrong"),
    ):
        with pytest.raises(InputError, match=match):
            sign_file(signed, tmp_path / "locked.pem", passphrase=wrong)
    sign_file(signed, tmp_path / "locked.pem", passphrase=b"correct horse")
    require_signature(signed, tmp_path / "locked.pub.pem")
    with pytest.raises(InputError, match="the passphrase must not be empty"):
        new_key(tmp_path / "none.pem", passphrase=b"")


def pem(key, *, public=True):
    encoding = serialization.Encoding.PEM
    if public:
        return key.public_key().public_bytes(encoding, serialization.PublicFormat.SubjectPublicKeyInfo)
    return key.private_bytes(encoding, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())


def test_keys_that_are_none_are_refused(signed, keys, tmp_path):
    from cryptography.hazmat.primitives.asymmetric import ec

    other_kind = ec.generate_private_key(ec.SECP256R1())
    with pytest.raises(InputError, match=r"none\.pem' cannot be read: No such file"):
        require_signature(signed, tmp_path / "none.pem")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"holds no '\*\.pem' file"):
        require_signature(signed, tmp_path / "empty")
    cases = [
        (b"", r"'x\.pem' holds no key in PEM"),
        (b"-----BEGIN PUBLIC KEY-----\nMCow\n", "holds no key in PEM"),
        (b"-----BEGIN PUBLIC KEY-----\nMCow\n-----END PUBLIC KEY-----", "must hold Ed25519 public keys alone"),
        (pem(other_kind), "must hold Ed25519 public keys alone"),
        (b"#" * 70_000 + pem(ed25519.Ed25519PrivateKey.generate()), "holds no key in PEM"),
        (pem(ed25519.Ed25519PrivateKey.generate(), public=False), r"'x\.pem' holds a private key\. Only public keys"),
    ]
    for data, match in cases:
        (keys / "x.pem").write_bytes(data)
        with pytest.raises(InputError, match=match):
            require_signature(signed, keys)


def test_private_keys_that_are_none_are_refused(signed, tmp_path):
    from cryptography.hazmat.primitives.asymmetric import ec

    whole = pem(ed25519.Ed25519PrivateKey.generate(), public=False)
    cases = [
        (pem(ec.generate_private_key(ec.SECP256R1()), public=False), "must be an Ed25519 key"),
        (whole.replace(b"MC4", b"MC5"), "it holds no private key that is whole"),
        (pem(ed25519.Ed25519PrivateKey.generate()), "it holds no private key that is whole"),
        (b"secret", "holds no key in PEM"),
    ]
    for data, match in cases:
        (tmp_path / "x.pem").write_bytes(data)
        with pytest.raises(InputError, match=match) as refused:
            sign_file(signed, tmp_path / "x.pem")
        assert data.splitlines()[-1 if len(data.splitlines()) == 1 else 1].decode() not in str(refused.value)


# -- the base install, and the commands


def test_without_the_extra_one_sentence_names_it(signed, private, keys, monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "cryptography"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "cryptography", None)
    for call in (
        lambda: require_signature(signed, keys),
        lambda: sign_file(signed, private),
        lambda: new_key(private.with_name("other.pem")),
    ):
        with pytest.raises(MissingExtraError, match=r"needs the extra 'signing': pip install 'memguard-audit\[signing\]'"):
            call()


@pytest.fixture
def run():
    """Run a command; its output, or the error that `main` would print."""
    app = typer.Typer()
    app.add_typer(cli_keys.app, name="keys")
    app.command("sign")(cli_keys.sign_command)

    def call(*arguments, **environment):
        result = CliRunner().invoke(app, [str(part) for part in arguments], env=environment)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert result.exit_code == 0, result.output
        return result.output

    return call


def test_keys_are_made_and_used_by_commands(run, report, tmp_path):
    report.save(tmp_path / "a.json")
    report.save(tmp_path / "b.json")
    made = run("keys", "new", tmp_path / "k.pem")
    assert "in the clear" in made
    assert "wrote" in run("sign", tmp_path / "a.json", tmp_path / "b.json", "--key", tmp_path / "k.pem")
    for name in ("a.json", "b.json"):
        assert require_signature(tmp_path / name, tmp_path / "k.pub.pem") in made


def test_a_passphrase_comes_from_the_environment(run, report, tmp_path):
    report.save(tmp_path / "a.json")
    made = run("keys", "new", tmp_path / "k.pem", "--passphrase-env", "KEYPASS", KEYPASS="correct horse")
    assert needs_passphrase(tmp_path / "k.pem")
    shown = made + run(
        "sign", tmp_path / "a.json", "--key", tmp_path / "k.pem", "--passphrase-env", "KEYPASS", KEYPASS="correct horse"
    )
    require_signature(tmp_path / "a.json", tmp_path / "k.pub.pem")
    assert "correct horse" not in shown
    with pytest.raises(InputError, match="'KEYPASS' of --passphrase-env is not set, or empty") as refused:
        run("sign", tmp_path / "a.json", "--key", tmp_path / "k.pem", "--passphrase-env", "KEYPASS", KEYPASS="")
    assert "horse" not in str(refused.value)
    with pytest.raises(InputError, match="asked for on a terminal only"):
        run("sign", tmp_path / "a.json", "--key", tmp_path / "k.pem")
    with pytest.raises(InputError, match="not both"):
        run("keys", "new", tmp_path / "z.pem", "--passphrase", "--passphrase-env", "KEYPASS", KEYPASS="x")


def test_a_passphrase_is_asked_for_on_a_terminal(report, tmp_path, monkeypatch):
    report.save(tmp_path / "a.json")
    asked = []

    def prompt(question, *, hide_input, confirmation_prompt):
        asked.append((question, hide_input, confirmation_prompt))
        return "correct horse"

    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(typer, "prompt", prompt)
    cli_keys.new(tmp_path / "k.pem", passphrase=True)
    cli_keys.sign_command([tmp_path / "a.json"], tmp_path / "k.pem")
    assert asked == [("Passphrase of k.pem", True, True), ("Passphrase of k.pem", True, False)]
    require_signature(tmp_path / "a.json", tmp_path / "k.pub.pem")

    def leave(*_, **__):
        raise typer.Abort

    monkeypatch.setattr(typer, "prompt", leave)
    with pytest.raises(InputError, match="no passphrase was given; nothing was done"):
        cli_keys.sign_command([tmp_path / "a.json"], tmp_path / "k.pem")
