"""`memguard keys` and `memguard sign`: keys that say who made a report, a baseline or a policy. Needs the extra `signing`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from memguard.errors import InputError

app = typer.Typer(help="Keys that sign what the gate reads.", no_args_is_help=True)

PassphraseVariable = Annotated[
    str | None, typer.Option("--passphrase-env", help="Environment variable that holds the key's passphrase.")
]


@app.command()
def new(
    private: Annotated[Path, typer.Argument(metavar="PRIVATE.pem", help="Where the private key goes; must not exist.")],
    passphrase: Annotated[bool, typer.Option("--passphrase", help="Ask for a passphrase that encrypts the key.")] = False,
    passphrase_env: PassphraseVariable = None,
) -> None:
    """Make a key pair: PRIVATE.pem, readable by you alone, and PRIVATE.pub.pem to hand out."""
    from memguard.gates.signing import new_key

    if passphrase and passphrase_env is not None:
        raise InputError("give --passphrase or --passphrase-env, not both.")
    secret = _from_environment(passphrase_env) if passphrase_env is not None else None
    if passphrase:
        secret = _ask(f"Passphrase of {private.name}", twice=True)
    public, key_id = new_key(private, passphrase=secret)
    stored = "encrypted" if secret is not None else "in the clear: keep it where the signing job alone can read it"
    typer.echo(f"wrote {private} (private, {stored})")
    typer.echo(f"wrote {public} (public, key {key_id}): put it where the gate looks for keys")


def sign_command(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Reports, baselines, policies.")],
    key: Annotated[Path, typer.Option("--key", help="The private key.")],
    passphrase_env: PassphraseVariable = None,
) -> None:
    """Write FILE.sig beside each file, for `gate` and `promote` with --require-signature."""
    from memguard.gates.signing import needs_passphrase, sign_file

    secret = None
    if needs_passphrase(key):
        secret = _from_environment(passphrase_env) if passphrase_env is not None else _ask(f"Passphrase of {key.name}")
    for path in files:
        typer.echo(f"wrote {sign_file(path, key, passphrase=secret)}")


def _ask(question: str, *, twice: bool = False) -> bytes:
    if not sys.stdin.isatty():
        raise InputError("a passphrase is asked for on a terminal only: name a variable that holds it with --passphrase-env.")
    try:
        answer: str = typer.prompt(question, hide_input=True, confirmation_prompt=twice)
    except typer.Abort:
        raise InputError("no passphrase was given; nothing was done.") from None
    return answer.encode()


def _from_environment(name: str) -> bytes:
    value = os.environ.get(name, "")
    if not value:
        raise InputError(f"the environment variable '{name}' of --passphrase-env is not set, or empty.")
    return value.encode()
