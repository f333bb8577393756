"""The JSON Schema of a policy, for editors and other checkers. `python -m memguard.gates.policy_schema` writes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from memguard.files import write_text_atomic
from memguard.gates.policy import Policy

SCHEMA_PATH = Path(__file__).parent / "policies" / "policy.schema.json"


def policy_schema() -> dict[str, Any]:
    """The schema of `policy.yaml`; what spans several keys is checked by `load_policy` alone."""
    schema = Policy.model_json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


if __name__ == "__main__":
    write_text_atomic(SCHEMA_PATH, json.dumps(policy_schema(), indent=1, sort_keys=True) + "\n")
