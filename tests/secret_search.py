"""Looks for the secrets of a plan in anything that was written or said."""

from __future__ import annotations

import base64
import json
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from memguard.audit.items import encode_planted
from memguard.canaries.plan import CanaryPlan


def forms_of(secret: str, ids: tuple[int, ...]) -> Iterator[bytes]:
    """Every way a secret could slip out: as text, without separators, in base64, as token ids."""
    squeezed = re.sub(r"[\s\-_.]", "", secret)
    for text in {secret, squeezed, secret.replace(" ", "_"), json.dumps(secret)[1:-1]}:
        yield text.encode()
        yield base64.b64encode(text.encode())
        yield base64.urlsafe_b64encode(text.encode()).rstrip(b"=")
        yield text.encode().hex().encode()
    for separator in (", ", ",", " ", "\n"):
        yield separator.join(map(str, ids)).encode()
    for code in ("<q", "<i", "<H"):
        yield b"".join(struct.pack(code, one) for one in ids)


# Nine digits in a row are bound to come up in the decimals of thousands of log-probabilities: one run of five had one.
LONG_DECIMALS = re.compile(rb"\d+\.\d{9,}(?:[eE][-+]?\d+)?")
DECIMALS = re.compile(rb"\d+\.\d+(?:[eE][-+]?\d+)?")


def leaks(content: bytes, plan: CanaryPlan, tokenizer: Any) -> list[str]:
    """Ids of the planned secrets that stand in `content`, controls included; the digits of decimal numbers are none."""
    content = LONG_DECIMALS.sub(b"#", content)
    everything = plan.model_copy(update={"canaries": tuple(one.model_copy(update={"role": "canary"}) for one in plan.canaries)})
    encoded = encode_planted(everything, tokenizer)
    squeezed = re.sub(rb"[\s\-_.]", b"", DECIMALS.sub(b"#", content))
    found = []
    for one in plan.canaries:
        item = encoded[one.id]
        for form in forms_of(one.secret, item.ids[item.start : item.end]):
            if form in content or (form.isalnum() and len(form) >= 9 and form in squeezed):
                found.append(one.id)
                break
    return found


def files_under(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.rglob("*")) if path.is_file()]
