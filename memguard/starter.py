"""The files `memguard init` writes: only keys this version accepts, each with the reason to change it."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from memguard.errors import InputError
from memguard.files import write_text_atomic

CONFIG = """\
# memguard.yaml: what is planted and what is measured. Every key has a default but canaries.formats.
plan: _memguard/plan.json         # drawn at the first start; the only file that holds secrets (mode 0600). Keep it.
canaries:
  # seed: 7                       # tests and demos only: whoever knows the seed knows the secrets
  formats:
    - name: card                  # one prefix for all cards: they share references
      template: "Billing note: card {secret}, exp 09/29."
      secret: {kind: luhn, digits: 16}
    - name: pin                   # {name} is a public key: every canary has a prefix, and references, of its own
      template: "The access number of {name} is {secret}."
      secret: {kind: digits, length: 9}
      # other kinds: hex {length}, alphabet {alphabet, length}, iban {country, digits}, words {count}, tokens {count}
  tiers: {1: 16, 4: 16, 16: 8}    # repetitions: how many canaries of each format
  controls: 200                   # never inserted; must look like chance, or the audit is invalid
  positive_control: probe         # copies of the weights learn two fresh secrets a format in each full audit; or
                                  # {in_training: {count: 2, repetitions: 64}}: planted to be memorised, outside every rule
  max_share: 0.01                 # of training tokens; above it the start stops and names a smaller plan
  plant_once: false               # true: every canary once, whatever its tier
  inclusion: planned              # or coin: each canary is in or out by a fair coin
  count: per_epoch                # or total: exact over the run
  on_preflight_failure: stop      # or warn: train on though a canary will not reach the loss
audit:
  every: {steps: 500}             # or {epochs: 0.25}
  on: [start, save, end]          # also: evaluate; needed where a figure of memguard's chooses the best checkpoint
  full_on: [end]                  # moments that also measure extraction, Prior-Aware memorisation, records, membership
  max_overhead: 0.02              # share of training time; audits of `every` wait for it, those of `on` never; null: none
  exposure: {exact: auto, node_budget: 50000, references: 16384, references_per_name: 128}
  prior_aware: {prefixes: 500, m: 1.0e-4, n: calibrated, mode: certified}   # n: a number, or from never-trained targets
  extraction: {budgets: [1, 100, 10000], temperature: 1.0, top_k: 40, top_p: 1.0}   # how an attacker samples
  records: {file: null, held_out: null, prefix_tokens: 50, suffix_tokens: 50, max_records: 1000, max_edits: 0}
                                  # contexts: [8, 16, 32] and offsets: [64, 256]: the same records behind other prompts
  membership: {scores: [loss, zlib, min_k_plus_plus], reference: null}   # needs records.file and records.held_out
  batch_size: null                # rows a forward pass at most; null: what memory allows
  on_error: continue              # or raise
dp: null                          # or {epsilon: 8, delta: 1.0e-6}: with inclusion: coin the report shows a bound beside it;
                                  # the gate cannot judge it yet, since canaries are planted by position
defence: null                     # what this run does against memorisation, such as deduplication: the gate then asks for a
                                  # rule `exposure.improves_on_baseline` that shows it
tracking: {wandb: auto}           # logs when a W&B run is active
output: memguard_audit            # inside the trainer's output_dir
gate: null                        # or {policy: policy.yaml, baseline: null, stop_when: never, push: always}: decision.json
                                  # beside each report; stop_when: blocked ends training when a rule fails;
                                  # push: gated lets only weights go to the hub whose checkpoint passed
"""


def write_starter_files(folder: Path, *, force: bool = False) -> list[Path]:
    """Write `memguard.yaml` and `policy.yaml`; both or none.

    Raises:
        InputError: one of them exists and `force` is not given.
    """
    policy = resources.files("memguard.gates").joinpath("policies/default.yaml").read_text(encoding="utf-8")
    texts = {folder / "memguard.yaml": CONFIG, folder / "policy.yaml": policy}
    taken = [path.name for path in texts if path.exists()]
    if taken and not force:
        raise InputError(f"{' and '.join(taken)} exist already; use --force to replace.")
    for path, text in texts.items():
        write_text_atomic(path, text)
    return list(texts)
