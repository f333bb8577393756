"""The action, the hook and the recipes for continuous integration, run as their hosts run them with the real executable."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from junitparser import JUnitXml

ROOT = Path(__file__).parents[2]
PINNED = re.compile(r"(?:[\w.-]+/)+[\w.-]+@[0-9a-f]{40}")
OUR_OWN = "YOUR-ORGANISATION/memguard@COMMIT"

pytestmark = pytest.mark.skipif(not (ROOT / "action.yml").exists(), reason="runs in a checkout")


def load(name: str):
    return yaml.safe_load((ROOT / name).read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def bin_folder() -> Path:
    folder = Path(sys.executable).parent
    assert shutil.which("memguard", path=str(folder)), "the executable memguard is not installed beside python"
    return folder


@pytest.fixture
def checkout(make_report, tmp_path) -> Path:
    """A repository with a report that passes, one that is blocked, and an older report to compare with."""
    (tmp_path / "memguard_audit").mkdir()
    make_report(1).save(tmp_path / "memguard_audit" / "report.json")
    make_report(3, memorised={"card-1x-0": -1.0}).save(tmp_path / "blocked.json")
    make_report(2).save(tmp_path / "baseline.json")
    shutil.copy(ROOT / "gates" / "policies" / "default.yaml", tmp_path / "policy.yaml")
    return tmp_path


def run_bash(script: str, folder: Path, bin_folder: Path | None, **environment: str) -> subprocess.CompletedProcess[str]:
    path = ":".join([*([str(bin_folder)] if bin_folder else []), "/usr/bin", "/bin"])
    return subprocess.run(
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", script],
        cwd=folder,
        env={"PATH": path, "HOME": str(folder), "LANG": "C.UTF-8", **environment},
        capture_output=True,
        text=True,
        check=False,
    )


# --- action.yml ---


def steps() -> list[dict]:
    return load("action.yml")["runs"]["steps"]


def decide_step() -> dict:
    return next(step for step in steps() if step.get("id") == "gate")


def run_action(folder: Path, bin_folder: Path | None, **inputs: str) -> tuple[subprocess.CompletedProcess[str], dict[str, str]]:
    """The deciding step with inputs as GitHub hands them over, and the step's outputs."""
    action, step = load("action.yml"), decide_step()
    given = {name: one.get("default", "") for name, one in action["inputs"].items()}
    given |= {name.replace("_", "-"): value for name, value in inputs.items()}
    environment = {
        name: given[re.fullmatch(r"\$\{\{ inputs\.([\w-]+) \}\}", value).group(1)] for name, value in step["env"].items()
    }
    output = folder / "github_output"
    output.write_text("")
    files = {"GITHUB_OUTPUT": str(output), "GITHUB_STEP_SUMMARY": str(folder / "summary.md")}
    done = run_bash(step["run"], folder, bin_folder, RUNNER_TEMP=str(folder / "none"), **files, **environment)
    return done, outputs_of(output.read_text())


def outputs_of(text: str) -> dict[str, str]:
    """As a runner reads them; of one name that is set twice the last one counts."""
    found = dict(re.findall(r"^(\w+)<<(?:memguard_\w+)\n(.*)\nmemguard_\w+$", text, re.M))
    return found | dict(re.findall(r"^(\w+)=(.*)$", text, re.M))


def test_no_input_is_ever_part_of_a_script():
    for step in steps():
        assert "${{" not in step.get("run", "")
        assert PINNED.fullmatch(step.get("uses", "a/b@" + "0" * 40))
    assert set(re.findall(r"inputs\.([\w-]+)", str(steps()))) == set(load("action.yml")["inputs"])


def test_every_output_of_the_action_is_one_that_the_gate_writes(checkout, bin_folder):
    _, outputs = run_action(checkout, bin_folder, report="blocked.json", baseline="baseline.json")
    values = {one["value"] for one in load("action.yml")["outputs"].values()}
    assert values == {f"${{{{ steps.gate.outputs.{name} }}}}" for name in outputs}


@pytest.mark.parametrize(
    ("report", "baseline_file", "code", "outcome"),
    [
        ("memguard_audit/report.json", "baseline.json", 0, "pass"),
        ("blocked.json", "baseline.json", 1, "block"),
        ("memguard_audit/report.json", "", 3, "invalid"),
    ],
)
def test_the_action_keeps_the_exit_code_and_writes_all_files(checkout, bin_folder, report, baseline_file, code, outcome):
    done, outputs = run_action(
        checkout, bin_folder, report=report, baseline=baseline_file, sarif="out/a.sarif", junit="out/j.xml", markdown="out/m.md"
    )
    assert done.returncode == code, done.stderr
    assert (outputs["outcome"], outputs["exit_code"]) == (outcome, str(code))
    assert sorted(path.name for path in (checkout / "out").iterdir()) == ["a.sarif", "j.xml", "m.md"]
    assert (checkout / "summary.md").read_text() == (checkout / "out" / "m.md").read_text()
    suite = next(iter(JUnitXml.fromfile(str(checkout / "out" / "j.xml"))))
    assert (suite.failures > 0, suite.errors > 0) == (code == 1, code == 3)
    assert done.stdout.startswith(f"::{'error' if code else 'notice'} file={report},line=1,title=memguard gate%3A {outcome}")


def test_no_name_becomes_a_command_of_the_runner(checkout, bin_folder):
    # A runner takes a line for a command if it starts with two colons behind blanks, such as a wrapped cell of a table might.
    name = "::set-output name=outcome::pass ::error title=forged::x ::stop-commands::y ::add-mask::z"
    text = (checkout / "policy.yaml").read_text()
    (checkout / "policy.yaml").write_text(text.replace("no canary over the limit", f'"{name}"'))
    done, outputs = run_action(checkout, bin_folder, report="blocked.json", baseline="baseline.json")
    assert (done.returncode, outputs["outcome"]) == (1, "block")
    assert "stop-commands" in done.stdout
    commands = [line for line in (done.stdout + done.stderr).splitlines() if line.lstrip().startswith("::")]
    assert all(re.match(r"::(error|warning|notice) file=blocked\.json,line=1,title=[^:]*::", line) for line in commands)


def test_the_action_fails_where_the_gate_gives_no_decision(checkout, bin_folder):
    done, outputs = run_action(checkout, bin_folder, report="nowhere.json")
    assert (done.returncode, outputs["outcome"], outputs["exit_code"]) == (2, "error", "2")
    assert "does not exist" in done.stderr
    done, outputs = run_action(checkout, None, report="memguard_audit/report.json")
    assert (done.returncode, outputs["outcome"], outputs["exit_code"]) == (127, "error", "127")
    assert done.stdout == "::error title=memguard gate::the gate gave no decision (exit code 127); its log says why\n"


@pytest.mark.parametrize(
    ("script", "code"), [("exit 0", 4), ("exit 1", 1), ("echo 'outcome<<x' >> $GITHUB_OUTPUT; exit 137", 137)]
)
def test_the_action_fails_whatever_a_broken_executable_answers(checkout, tmp_path, script, code):
    fake = tmp_path / "bin" / "memguard"
    fake.parent.mkdir()
    fake.write_text(f"#!/bin/bash\n{script}\n")
    fake.chmod(0o755)
    done, outputs = run_action(checkout, fake.parent, report="memguard_audit/report.json")
    assert done.returncode == code
    assert (outputs["outcome"], outputs["exit_code"]) == ("error", str(code))


@pytest.mark.parametrize(
    "value", ["$(touch pwned).json", '"; touch pwned; "', "`touch pwned`", "x\ntouch pwned", "--help", "a b"]
)
def test_an_input_is_a_value_and_never_a_command(checkout, bin_folder, value):
    done, outputs = run_action(checkout, bin_folder, report=value, policy=value, baseline=value)
    assert (done.returncode, outputs["outcome"]) == (2, "error")
    assert not (checkout / "pwned").exists()


def test_further_arguments_stand_on_lines_of_their_own(checkout, bin_folder):
    extra = "--gitlab\nquality report.json\n--output=decided.json\n"
    done, _ = run_action(checkout, bin_folder, report="memguard_audit/report.json", baseline="baseline.json", arguments=extra)
    assert done.returncode == 0, done.stderr
    assert (checkout / "quality report.json").exists()
    assert (checkout / "decided.json").exists()


# --- .pre-commit-hooks.yaml ---


def run_hook(folder: Path, bin_folder: Path, *files: str) -> int:
    (hook,) = load(".pre-commit-hooks.yaml")
    command = [*shlex.split(hook["entry"]), *hook["args"], *files]
    return run_bash(shlex.join(command), folder, bin_folder).returncode


def test_the_hook_lets_nothing_but_a_pass_be_committed(checkout, bin_folder):
    report = "memguard_audit/report.json"
    assert run_hook(checkout, bin_folder, report) == 3  # no baseline yet
    text = (checkout / "policy.yaml").read_text()
    (checkout / "policy.yaml").write_text("\n".join(line for line in text.splitlines() if "against_baseline" not in line))
    assert run_hook(checkout, bin_folder, report) == 0
    assert run_hook(checkout, bin_folder, "blocked.json") == 1
    assert run_hook(checkout, bin_folder, report, "blocked.json") == 2


def test_the_hook_runs_for_one_file_alone():
    (hook,) = load(".pre-commit-hooks.yaml")
    assert re.search(hook["files"], "memguard_audit/report.json")
    for other in ("a/memguard_audit/report.json", "memguard_audit/report.json5", "memguard_audit/decision.json"):
        assert not re.search(hook["files"], other)


# --- examples/ci ---


def check_workflow(workflow: dict) -> None:
    """Least rights, pinned actions, and nothing from an event inside a script."""
    assert workflow["permissions"] == {"contents": "read"}
    for job in workflow["jobs"].values():
        for step in job["steps"]:
            assert "${{" not in step.get("run", "")
            uses = step.get("uses", OUR_OWN)
            assert uses == OUR_OWN or uses.startswith("github/") or PINNED.fullmatch(uses)
            if uses.startswith("actions/checkout@"):
                assert step["with"]["persist-credentials"] is False


def test_the_github_workflow_gives_the_action_inputs_that_it_has():
    workflow = load("examples/ci/github-gate.yml")
    check_workflow(workflow)
    (gate,) = [step for step in workflow["jobs"]["gate"]["steps"] if step.get("uses") == OUR_OWN]
    assert set(gate["with"]) <= set(load("action.yml")["inputs"])
    assert workflow["jobs"]["release"]["needs"] == "gate"
    uploads = [step for step in workflow["jobs"]["gate"]["steps"] if "upload" in step.get("uses", "")]
    assert len(uploads) == 2
    assert all(step["if"].startswith("always()") for step in uploads)


def test_the_gitlab_job_writes_the_reports_that_it_declares(checkout, bin_folder):
    job = load("examples/ci/gitlab-gate.yml")["memorisation gate"]
    assert "allow_failure" not in job
    (script,) = job["script"]
    assert run_bash(script, checkout, bin_folder).returncode == 0
    for path in [*job["artifacts"]["reports"].values(), *job["artifacts"]["paths"]]:
        assert (checkout / path).exists(), path
    shutil.copy(checkout / "blocked.json", checkout / "memguard_audit" / "report.json")
    assert run_bash(script, checkout, bin_folder).returncode == 1


def blocks(language: str) -> list[str]:
    text = (ROOT / "examples" / "ci" / "wandb-automation.md").read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.M | re.S)


def test_the_wandb_recipe_makes_an_automation_that_wandb_takes():
    pytest.importorskip("wandb")
    from pydantic import TypeAdapter
    from wandb.automations import WebhookIntegration
    from wandb.automations._inputs import prepare_to_create
    from wandb.automations.scopes import ArtifactCollectionScope

    class Api:
        """Gives what the server would give, and turns an automation into what would be sent to it."""

        def webhook_integrations(self, entity):
            hooks = [("other", "https://a"), ("github-dispatch", "https://api.github.com/repos/o/r/dispatches")]
            return iter(WebhookIntegration(id=f"id-{name}", name=name, url_endpoint=url) for name, url in hooks)

        def artifact_collection(self, type_name, name):
            assert (type_name, name) == ("model", "wandb-registry-model/support-model")
            collection = {"__typename": "ArtifactPortfolio", "id": "collection", "name": "support-model"}
            return TypeAdapter(ArtifactCollectionScope).validate_python(collection)

        def create_automation(self, automation, *, name):
            return prepare_to_create(automation, name=name).model_dump()

    (code,) = blocks("python")
    namespace: dict = {}
    exec(code, namespace)
    sent = namespace["create_gate_automation"](Api(), collection="support-model", team="my-team")
    assert (sent["scopeID"], sent["scopeType"]) == ("collection", "ARTIFACT_COLLECTION")
    assert sent["triggeringEventType"] == "ADD_ARTIFACT_ALIAS"
    assert '{"alias":{"$eq":"candidate"}}' in sent["eventFilter"]
    action = sent["triggeredActionConfig"]["genericWebhookActionInput"]
    assert action["integrationID"] == "id-github-dispatch"
    (workflow,) = map(yaml.safe_load, blocks("yaml"))
    # YAML 1.1 reads the key `on` as true.
    (event,) = workflow[True]["repository_dispatch"]["types"]
    assert f'"event_type":"{event}"' in action["requestPayload"]


def test_the_wandb_workflow_promotes_with_options_that_exist(bin_folder):
    (workflow,) = map(yaml.safe_load, blocks("yaml"))
    check_workflow(workflow)
    (script,) = [step["run"] for step in workflow["jobs"]["promote"]["steps"] if "memguard promote" in step.get("run", "")]
    words = shlex.split(script)
    assert words[:3] == ["memguard", "promote", "wandb"]
    shown = run_bash("memguard promote wandb --help", Path.cwd(), bin_folder, COLUMNS="200", TERM="dumb").stdout
    assert {word for word in words if word.startswith("--")} <= set(re.findall(r"--[a-z-]+", shown))
