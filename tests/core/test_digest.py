"""What the digest of a checkpoint binds, and the tricks that it refuses."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest

from memguard.audit import digest as digest_module
from memguard.audit.config import AuditSettings, parse_config
from memguard.audit.digest import adapter_base, base_digest, checkpoint_digest, checkpoint_manifest, unchanged
from memguard.documents import json_digest
from memguard.errors import InputError


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    """A folder with one file of weights."""
    return made(tmp_path / "plain", "model.safetensors", "config.json")


def made(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f'{{"_": "{name}"}}', encoding="utf-8")
    return folder


def sharded(folder: Path, *shards: str, also: tuple[str, ...] = ()) -> Path:
    """A folder whose index names `shards`, with those and others in it."""
    made(folder, *shards, *also)
    index = {"metadata": {}, "weight_map": {f"layer{number}": shard for number, shard in enumerate(shards)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return folder


def shard(number: int, count: int = 2) -> str:
    return f"model-{number:05d}-of-{count:05d}.safetensors"


# -- what counts


def test_the_digest_of_a_saved_model_is_that_of_its_files_by_name(tiny_model: Any, tokenizer: Any, tmp_path: Path) -> None:
    tiny_model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    by_name = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in tmp_path.iterdir()}
    assert {"model.safetensors", "config.json", "generation_config.json", "tokenizer.json"} <= set(by_name)
    assert checkpoint_manifest(tmp_path) == by_name
    text = "{" + ",".join(f'"{name}":"{by_name[name]}"' for name in sorted(by_name)) + "}"  # canonical JSON, by hand
    assert checkpoint_digest(tmp_path) == hashlib.sha256(text.encode()).hexdigest()


DECIDES = [
    *("config.json", "config.4.0.0.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "vocab.json"),
    *("vocab.txt", "merges.txt", "added_tokens.json", "special_tokens_map.json", "tokenizer.model", "qwen.tiktoken"),
    *("source.spm", "bpe.codes", "dict.txt", "tekken.json", "chat_template.jinja", "chat_template.json"),
    *("additional_chat_templates/tool.jinja", "preprocessor_config.json", "modeling_own.py", "own/deep/code.py"),
    *("custom_generate/generate.py", "tokenizer/tokenizer.json", "1_Pooling/config.json", "modules.json"),
    *("adapter_config.json", "adapter_model.safetensors", "pytorch_model.bin", "model.gguf", "quantize_config.json"),
]


@pytest.mark.parametrize("name", DECIDES)
def test_each_file_that_a_loader_reads_counts(plain: Path, name: str) -> None:
    digests = [checkpoint_digest(made(plain, name))]
    (plain / name).write_bytes((plain / name).read_bytes() + b" ")
    digests.append(checkpoint_digest(plain))
    (plain / name).unlink()
    digests.append(checkpoint_digest(plain))
    assert len(set(digests)) == 3


BESIDE = [
    *("optimizer.pt", "optimizer.bin", "optimizer_1.bin", "scheduler.pt", "scaler.pt", "rng_state.pth", "rng_state_3.pth"),
    *("random_states_0.pkl", "trainer_state.json", "training_args.bin", "all_results.json", "events.out.tfevents.1.host"),
    *("README.md", "LICENSE", "train.log", ".gitattributes", "registered_model_meta", "memguard_ledger.json"),
    *("memguard_audit/report.json", "_memguard/plan.json", "checkpoint-5/model.safetensors", ".cache/huggingface/x.metadata"),
    *("global_step5/states.pt", "runs/1/events", "wandb/run/code.py", "optimizer_0/x.distcp", "__pycache__/own.pyc"),
]


@pytest.mark.parametrize("name", BESIDE)
def test_what_training_and_registries_leave_beside_a_model_does_not_count(plain: Path, name: str) -> None:
    before = checkpoint_digest(plain)
    assert checkpoint_digest(made(plain, name)) == before


def test_names_count_and_the_order_of_the_file_system_does_not(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made(plain, "vocab.json", "tokenizer/a.json", "own/b.json")
    before = checkpoint_digest(plain)
    walk = os.walk

    def backwards(*arguments: Any, **options: Any) -> Any:
        for root, folders, names in walk(*arguments, **options):
            folders.sort(reverse=True)
            yield root, folders, sorted(names, reverse=True)

    monkeypatch.setattr(os, "walk", backwards)
    assert checkpoint_digest(plain) == before
    (plain / "vocab.json").rename(plain / "merges.txt")
    assert checkpoint_digest(plain) != before


def test_a_file_larger_than_one_read_is_hashed_whole(plain: Path) -> None:
    content = bytes(range(256)) * 4096 * 3  # 3 MiB, read by the MiB
    (plain / "model.safetensors").write_bytes(content)
    assert checkpoint_manifest(plain)["model.safetensors"] == hashlib.sha256(content).hexdigest()


def test_a_folder_without_weights_has_no_digest(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is not a folder"):
        checkpoint_digest(tmp_path / "none")
    with pytest.raises(InputError, match="holds no weights"):
        checkpoint_digest(made(tmp_path, "config.json", "optimizer.pt", "checkpoint-5/model.safetensors"))


# -- shards


def test_every_shard_of_a_real_save_counts(tiny_model: Any, tmp_path: Path) -> None:
    tiny_model.save_pretrained(tmp_path, max_shard_size="40KB")
    shards = {path.name for path in tmp_path.glob("model-*.safetensors")}
    assert len(shards) >= 2
    assert shards | {"model.safetensors.index.json"} <= set(checkpoint_manifest(tmp_path))
    before = checkpoint_digest(tmp_path)
    last = max(tmp_path.glob("model-*.safetensors"))
    content = last.read_bytes()
    last.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))  # one bit of one weight
    assert checkpoint_digest(tmp_path) != before


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = sharded(tmp_path, shard(1), shard(2))
    (folder / shard(2)).unlink()
    with pytest.raises(InputError, match=r"lacks shards that its index names: 'model-00002-of-00002\.safetensors'\.$"):
        checkpoint_digest(folder)


def test_many_missing_shards_are_counted(tmp_path: Path) -> None:
    folder = sharded(tmp_path, *(shard(number, 6) for number in range(1, 7)))
    for number in range(2, 7):
        (folder / shard(number, 6)).unlink()
    with pytest.raises(InputError, match=r"'model-00004-of-00006\.safetensors', and 2 more\.$"):
        checkpoint_digest(folder)


@pytest.mark.parametrize("extra", [shard(3, 3), "pytorch_model-00001-of-00002.bin"])
def test_a_shard_that_no_index_names_is_refused(tmp_path: Path, extra: str) -> None:
    with pytest.raises(InputError, match=f"holds shards that no index names: '{extra}'"):
        checkpoint_digest(sharded(tmp_path / "one", shard(1), shard(2), also=(extra,)))
    with pytest.raises(InputError, match="holds shards that no index names"):
        checkpoint_digest(made(tmp_path / "two", "model.safetensors", extra))


@pytest.mark.parametrize("name", ["../x.safetensors", "/x.safetensors", "a/b.safetensors", "a\\b", "..", ".x.safetensors", ""])
def test_an_index_that_leads_out_of_its_folder_is_refused(tmp_path: Path, name: str) -> None:
    made(tmp_path, "x.safetensors", "f/a/b.safetensors", "f/.x.safetensors")
    folder = sharded(tmp_path / "f", shard(1))
    index = {"weight_map": {"a": shard(1), "b": name}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    with pytest.raises(
        InputError, match=r"index of shards 'model\.safetensors\.index\.json' must name files of its own folder"
    ):
        checkpoint_digest(folder)


def test_an_index_may_not_name_a_file_that_does_not_count(tmp_path: Path) -> None:
    folder = sharded(tmp_path, shard(1), "optimizer.bin")
    with pytest.raises(InputError, match=r"lacks shards that its index names: 'optimizer\.bin'"):
        checkpoint_digest(folder)


@pytest.mark.parametrize("index", [[], {}, {"weight_map": []}, {"weight_map": {}}, {"weight_map": {"a": 1}}])
def test_an_index_that_maps_nothing_to_files_is_refused(tmp_path: Path, index: Any) -> None:
    folder = sharded(tmp_path, shard(1))
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    with pytest.raises(InputError, match="must map tensors to files under 'weight_map'"):
        checkpoint_digest(folder)


def test_whole_weights_beside_shards_are_refused(tmp_path: Path) -> None:
    folder = sharded(tmp_path, shard(1), shard(2), also=("model.safetensors",))
    with pytest.raises(InputError, match=r"holds whole weights beside 'model\.safetensors\.index\.json'"):
        checkpoint_digest(folder)


# -- links and other things that are no files


def test_links_to_files_are_read_through_as_a_loader_does(plain: Path, tmp_path: Path) -> None:
    """A snapshot in the cache of Hugging Face is links to `../../blobs`."""
    snapshot, blobs = tmp_path / "snapshots" / "abc", tmp_path / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, path in enumerate(sorted(plain.iterdir())):
        (blobs / str(number)).write_bytes(path.read_bytes())
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    assert checkpoint_digest(snapshot) == checkpoint_digest(plain)
    (tmp_path / "linked").symlink_to(snapshot)
    assert checkpoint_digest(tmp_path / "linked") == checkpoint_digest(plain)
    (blobs / "1").write_bytes(b"swapped")
    assert checkpoint_digest(snapshot) != checkpoint_digest(plain)


@pytest.mark.parametrize("target", ["nowhere", "vocab.json"])  # the second one is a loop
def test_a_link_that_leads_nowhere_is_refused(plain: Path, target: str) -> None:
    (plain / "vocab.json").symlink_to(target)
    with pytest.raises(InputError, match=r"holds a link that leads nowhere: 'vocab\.json'"):
        checkpoint_digest(plain)


def test_a_linked_sub_folder_is_refused(plain: Path, tmp_path: Path) -> None:
    made(tmp_path / "other", "tokenizer.json")
    (plain / "tokenizer").symlink_to(tmp_path / "other")
    with pytest.raises(InputError, match="must hold no link to a folder, got 'tokenizer'"):
        checkpoint_digest(plain)
    (plain / "tokenizer").unlink()
    (plain / "again").symlink_to(plain)
    with pytest.raises(InputError, match="must hold no link to a folder, got 'again'"):
        checkpoint_digest(plain)


def test_a_pipe_is_refused_and_not_waited_for(plain: Path) -> None:
    os.mkfifo(plain / "vocab.json")
    with pytest.raises(InputError, match=r"holds 'vocab\.json', which is neither a file nor a folder"):
        checkpoint_digest(plain)
    (plain / "vocab.json").unlink()
    (plain / "merges.txt").symlink_to("/dev/zero")
    with pytest.raises(InputError, match=r"holds 'merges\.txt', which is neither"):
        checkpoint_digest(plain)


def test_a_file_that_cannot_be_read_is_the_users_to_mend(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> str:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(digest_module, "_sha256", refuse)
    with pytest.raises(InputError, match="cannot be read: Permission denied"):
        checkpoint_digest(plain)


# -- code


@pytest.mark.parametrize(
    "target", ["/x/own.Model", "runs/own.Model", "../own.Model", "own", ".own.Model", 5, ["own.Model", ["x.Y"]]]
)
def test_code_that_is_named_by_a_path_is_refused(plain: Path, target: Any) -> None:
    (plain / "config.json").write_text(json.dumps({"auto_map": {"AutoModelForCausalLM": target}}), encoding="utf-8")
    with pytest.raises(InputError, match=r"auto_map in 'config\.json' .* must name code as module\.Class"):
        checkpoint_digest(plain)


@pytest.mark.parametrize(
    "text",
    [
        '{"auto_map": {"AutoModel": "own.Model", "AutoTokenizer": [null, "own.Fast"]}}',
        '{"auto_map": ["own.Slow", null]}',
        '{"auto_map": {"AutoConfig": "someone/repo--own.Config"}}',
        '{"limit": [0.0, Infinity]}',  # as some configurations of transformers have it
        "not json",
        "[]",
        "[" * 100_000,
    ],
)
def test_other_configurations_are_hashed_as_they_stand(plain: Path, text: str) -> None:
    (plain / "config.json").write_text(text, encoding="utf-8")
    assert checkpoint_manifest(plain)["config.json"] == hashlib.sha256(text.encode()).hexdigest()


# -- files that change meanwhile


def while_hashed(monkeypatch: pytest.MonkeyPatch, change: Any) -> list[str]:
    """Call `change(number of the read)` after each file is hashed."""
    hashed: list[str] = []
    sha256 = digest_module._sha256

    def hash_and_change(path: Path) -> str:
        found = sha256(path)
        hashed.append(path.name)
        change(len(hashed))
        return found

    monkeypatch.setattr(digest_module, "_sha256", hash_and_change)
    return hashed


def test_a_file_that_changes_once_is_read_again(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def swap(number: int) -> None:
        if number == 1:
            (plain / "model.safetensors").write_bytes(b"the rest arrived")

    hashed = while_hashed(monkeypatch, swap)
    found = checkpoint_manifest(plain)
    assert found["model.safetensors"] == hashlib.sha256(b"the rest arrived").hexdigest()
    assert len(hashed) == 4  # two files, twice


def test_a_file_that_is_swapped_under_its_old_time_is_noticed(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def swap(number: int) -> None:
        target, size = plain / "config.json", (plain / "config.json").stat()
        target.write_bytes(bytes([number]) * size.st_size)
        os.utime(target, ns=(size.st_atime_ns, size.st_mtime_ns))

    while_hashed(monkeypatch, swap)
    with pytest.raises(InputError, match="changes while it is read. Wait until it is written"):
        checkpoint_digest(plain)


def test_files_that_come_and_go_are_noticed(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    while_hashed(monkeypatch, lambda number: made(plain, f"{number}.json"))
    with pytest.raises(InputError, match="changes while it is read"):
        checkpoint_digest(plain)


def test_a_file_that_goes_before_it_is_hashed_is_noticed(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed = while_hashed(monkeypatch, lambda number: (plain / "model.safetensors").unlink(missing_ok=True))
    with pytest.raises(InputError, match="holds no weights"):  # at the second look
        checkpoint_digest(plain)
    assert hashed == ["config.json"]


def test_a_checkpoint_that_is_swapped_after_loading_is_not_the_one_that_was_hashed(plain: Path) -> None:
    with pytest.raises(InputError, match="changed while it was loaded. Wait until"), unchanged(plain):
        os.utime(plain / "model.safetensors", ns=(1, 1))
    with unchanged(plain):
        made(plain, "trainer_state.json")  # decides nothing


def test_an_audit_refuses_a_checkpoint_that_changes_while_it_is_loaded(
    tiny_model: Any, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from memguard.audit import checkpoints
    from memguard.canaries.drawing import draw_plan

    tiny_model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    load = checkpoints.load_checkpoint

    def load_and_touch(folder: Path) -> Any:
        os.utime(folder / "model.safetensors", ns=(1, 1))
        return load(folder)

    monkeypatch.setattr(checkpoints, "load_checkpoint", load_and_touch)
    pin = {"name": "pin", "template": "The number is {secret}.", "secret": {"kind": "digits", "length": 5}}
    plan = draw_plan(parse_config({"canaries": {"formats": [pin], "tiers": {1: 2}, "controls": 2}}).canaries, tokenizer)
    with pytest.raises(InputError, match="changed while it was loaded"):
        checkpoints.audit_checkpoints([tmp_path], plan, AuditSettings())


@pytest.mark.parametrize(
    "name", [".hidden.safetensors", "LICENSE.safetensors", "README.md.safetensors", ".hidden.safetensors.index.json"]
)
def test_what_a_loader_could_read_as_weights_counts_whatever_its_name(plain: Path, name: str) -> None:
    before = checkpoint_manifest(plain)
    (plain / name).write_text('{"weight_map": {"a": "model.safetensors"}}', encoding="utf-8")
    assert set(checkpoint_manifest(plain)) == {*before, name}


@pytest.mark.parametrize("named", ["checkpoint-1/model.safetensors", ".cache/model.safetensors", "../other.safetensors", 7])
def test_weights_that_a_configuration_names_lie_where_they_count(plain: Path, named: Any) -> None:
    (plain / "config.json").write_text(json.dumps({"transformers_weights": named}), encoding="utf-8")
    with pytest.raises(InputError, match=r"transformers_weights in 'config\.json' .* must name a file of its own folder"):
        checkpoint_manifest(plain)
    (plain / "config.json").write_text(json.dumps({"transformers_weights": "model.safetensors"}), encoding="utf-8")
    assert "model.safetensors" in checkpoint_manifest(plain)


# -- adapters


def adapter(folder: Path, base: Any) -> Path:
    made(folder, "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": base}), encoding="utf-8")
    return folder


def test_the_base_of_an_adapter_is_named_and_bound(plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    absolute = adapter(tmp_path / "absolute", str(plain))
    assert adapter_base(absolute) == str(plain)
    assert base_digest(absolute) == checkpoint_digest(plain)
    monkeypatch.chdir(tmp_path)
    assert base_digest(adapter(tmp_path / "relative", "plain")) == checkpoint_digest(plain)
    before = checkpoint_digest(absolute), base_digest(absolute)
    (plain / "model.safetensors").write_bytes(b"another base")
    assert checkpoint_digest(absolute) == before[0]
    assert base_digest(absolute) != before[1]


def test_a_whole_model_has_no_base_and_a_base_elsewhere_no_digest(plain: Path, tmp_path: Path) -> None:
    assert (adapter_base(plain), base_digest(plain)) == (None, None)
    assert base_digest(adapter(tmp_path / "hub", "someone/model")) is None
    for number, unnamed in enumerate(["", None, 5]):
        folder = adapter(tmp_path / f"unnamed{number}", unnamed)
        assert (adapter_base(folder), base_digest(folder)) == ("", None)


def test_a_base_of_the_hub_is_the_snapshot_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    constants = pytest.importorskip("huggingface_hub.constants")
    home = tmp_path / "cache" / "models--someone--model"
    for name in ("config.json", "model.safetensors"):
        blob = home / "blobs" / f"{name}-blob"
        blob.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(b"{}")
        link = home / "snapshots" / "abc" / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(blob)
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text("abc", encoding="utf-8")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    folder = adapter(tmp_path / "lora", "someone/model")
    assert base_digest(folder) == checkpoint_digest(home / "snapshots" / "abc")
    assert base_digest(adapter(tmp_path / "other", "someone/else")) is None


def test_a_broken_adapter_configuration_is_refused(tmp_path: Path) -> None:
    folder = adapter(tmp_path, "x")
    (folder / "adapter_config.json").write_text("{", encoding="utf-8")
    with pytest.raises(InputError, match=r"adapter configuration 'adapter_config\.json' is not valid JSON"):
        adapter_base(folder)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft reads a name that was renamed
def test_the_report_of_an_adapter_names_its_base(tiny_model: Any, tokenizer: Any, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    from transformers import LlamaForCausalLM

    from memguard.audit.checkpoints import audit_checkpoints
    from memguard.canaries.drawing import draw_plan

    tiny_model.save_pretrained(tmp_path / "base")
    settings = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(LlamaForCausalLM.from_pretrained(tmp_path / "base"), settings)
    adapted.save_pretrained(tmp_path / "adapter")
    tokenizer.save_pretrained(tmp_path / "adapter")
    pin = {"name": "pin", "template": "The number is {secret}.", "secret": {"kind": "digits", "length": 5}}
    config = parse_config({"canaries": {"formats": [pin], "tiers": {1: 2}, "controls": 2}})
    exposure = {"exposure": {"references": 64, "exact": "off"}}
    (report,) = audit_checkpoints([tmp_path / "adapter"], draw_plan(config.canaries, tokenizer), AuditSettings(**exposure))
    assert report.subject.digest == json_digest(checkpoint_manifest(tmp_path / "adapter"))
    assert report.subject.base_digest == checkpoint_digest(tmp_path / "base")
