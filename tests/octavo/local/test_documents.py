"""The YAML of a cluster, read on a laptop."""

from __future__ import annotations

import pytest

from octavo.local.documents import deployment_of_model, list_files, read_documents
from octavo.local.watch import DocumentWatch
from octavo.models.library import StoredModel
from octavo_engine.errors import ConfigError

HEAD = "apiVersion: octavo.dev/v1alpha1\nkind: LLMDeployment\n"
ONE = HEAD + "metadata: {name: one}\nspec: {model: {uri: 'demo://smollm2'}}\n"
TWO = HEAD + "metadata: {name: two, namespace: team}\nspec: {model: {uri: 'demo://smollm2'}}\n"


def test_several_documents_in_several_files():
    documents = read_documents({"a.yaml": f"{ONE}---\n# nothing\n---\n{TWO}", "b.yaml": ""})
    assert [deployment.pool for deployment in documents.deployments] == ["default/one", "team/two"]


def test_what_only_a_cluster_has_is_passed_over():
    text = f"apiVersion: v1\nkind: Namespace\nmetadata: {{name: team}}\n---\n{ONE}"
    assert read_documents({"a.yaml": text}).skipped == ("Namespace",)


def test_secrets_and_config_maps_are_kept_for_references():
    text = f"""
{ONE}
---
apiVersion: v1
kind: Secret
metadata: {{name: hub}}
data: {{HF_TOKEN: c2VjcmV0}}
stringData: {{more: plain}}
---
apiVersion: v1
kind: ConfigMap
metadata: {{name: settings, namespace: team}}
data: {{level: debug}}
"""
    assert read_documents({"a.yaml": text}).references == {
        ("Secret", "default", "hub"): {"HF_TOKEN": "secret", "more": "plain"},
        ("ConfigMap", "team", "settings"): {"level": "debug"},
    }


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "a.yaml: no LLMDeployment is in it"),
        ("a: [", "a.yaml, line 1: is not valid YAML"),
        ("!!python/object/apply:os.system ['true']", "is not valid YAML"),
        ("[" * 1200, "a.yaml"),
        ("just text", "a.yaml, document 1: "),
        (f"{ONE}---\n{ONE}", "a.yaml, document 2: LLMDeployment default/one is there twice"),
        (ONE.replace("demo://smollm2", "pvc://claim/x"), "document 1: spec.model.uri"),
        (ONE.replace("smollm2", "smol"), "spec.model.uri demo://smol is unknown; there is demo://"),
        (
            ONE.replace("}}", "}, prefill: {secretRef: {name: kv}}}"),
            "spec.prefill has no use on one machine",
        ),
        (ONE.replace("v1alpha1", "v9"), "document 1: apiVersion must be octavo.dev/v1alpha1"),
        (ONE + "  replicas: 2\n", "a.yaml, line"),
        ("kind: Secret\nmetadata: {name: x}\ndata: {a: '%%'}", "not base64"),
        ("kind: Secret\ndata: {a: aa}", "needs metadata.name"),
        ("kind: Secret\nmetadata: 3\n", "needs metadata.name"),
    ],
)
def test_what_cannot_be_read_names_the_place(text, says):
    with pytest.raises(ConfigError) as caught:
        read_documents({"a.yaml": text})
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("model", "uri", "name"),
    [
        ("demo://smollm2", "demo://smollm2", "smollm2"),
        ("HuggingFaceTB/SmolLM2-135M", "hf://HuggingFaceTB/SmolLM2-135M", "smollm2-135m"),
        ("hf://a/b/M.gguf@v1", "hf://a/b@v1/M.gguf", "m"),
        ("smollm2", "demo://smollm2", "smollm2"),
        ("Qwen3:0.6b", "hf://Qwen/Qwen3-0.6B-GGUF/Qwen3-0.6B-Q8_0.gguf", "qwen3-0.6b"),
        ("s3://bucket/models/Tiny_1/", "s3://bucket/models/Tiny_1/", "tiny-1"),
    ],
)
def test_a_model_by_name(model, uri, name):
    deployment = deployment_of_model(model, replicas=3, device="cpu")
    assert (deployment.model.uri, deployment.name) == (uri, name)
    assert (deployment.replicas, deployment.model.names) == (3, (name,))


def test_a_model_by_path(tmp_path):
    deployment = deployment_of_model(str(tmp_path), replicas=1, device="auto")
    assert deployment.model.uri == f"file://{tmp_path}"


def test_a_pulled_model_is_served_from_its_folder(tmp_path, monkeypatch):
    stored = StoredModel("a/b", "hf://a/b", tmp_path, 1, 0.0)
    monkeypatch.setattr("octavo.models.library.ModelLibrary.find", lambda self, name: stored)
    deployment = deployment_of_model("a/b", replicas=1, device="cpu")
    assert (deployment.model.uri, deployment.name) == (f"file://{tmp_path}", "b")


def test_a_model_that_is_neither():
    with pytest.raises(
        ConfigError,
        match=r"octavo list --all shows what is.*nor ORG/NAME",
    ):
        deployment_of_model("nothing", replicas=1, device="auto")


def test_a_folder_stands_for_its_yaml_files(tmp_path):
    (tmp_path / "b.yaml").write_text(ONE)
    (tmp_path / "a.yml").write_text(TWO)
    (tmp_path / "README.md").write_text("#")
    assert [path.name for path in list_files([str(tmp_path)])] == ["a.yml", "b.yaml"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="has no file"):
        list_files([str(tmp_path / "empty")])


def test_a_watch_tells_only_what_is_new(tmp_path):
    file = tmp_path / "a.yaml"
    watch = DocumentWatch([str(file)])
    with pytest.raises(ConfigError, match="No such file"):
        watch.read()
    file.write_text(ONE)
    assert watch.read() == {str(file): ONE}
    assert watch.read() is None
    replacement = tmp_path / "new"
    replacement.write_text(TWO)
    replacement.replace(file)
    assert watch.read() is None  # it may be half written
    assert watch.read() == {str(file): TWO}
    file.write_bytes(b"\xff")
    assert watch.read() is None
    with pytest.raises(ConfigError, match="not UTF-8"):
        watch.read()


def test_all_faults_of_a_document_are_reported_at_once():
    text = f"""{HEAD}metadata: {{name: one}}
spec:
  model: {{uri: "demo://smollm2"}}
  replicas: -2
  engine: {{device: foo, args: []}}
  bogus: 1
"""
    with pytest.raises(ConfigError) as caught:
        read_documents({"a.yaml": text})
    says = str(caught.value)
    assert says.startswith("a.yaml, document 1: 4 settings cannot be used: (1) spec.")
    for part in ("engine.device must be one of", "engine.args must be an object",
                 "replicas must be from 0", "bogus is not a field"):  # fmt: skip
        assert f") spec.{part}" in says


@pytest.mark.parametrize(
    ("model", "fault"),
    [
        ('{ur: "demo://smollm2", digest: x}', "uri is required"),
        ("{uri: smollm2, digest: x}", "uri must start with one of"),
        ("{uri: 3, digest: x}", "uri must be a string"),
    ],
)
def test_a_model_that_is_missing_or_wrong_hides_no_other_fault(model: str, fault: str):
    text = f"{HEAD}metadata: {{name: one}}\nspec: {{model: {model}, replicas: many}}\n"
    with pytest.raises(ConfigError) as caught:
        read_documents({"a.yaml": text})
    says = str(caught.value)
    for part in (f"model.{fault}", "model.digest must be", "replicas must be a whole number"):
        assert f") spec.{part}" in says, says
    assert ("spec.model.ur is not a field" in says) == ("ur:" in model)
    assert "did you mean uri?" in says or "ur:" not in model


def test_a_document_without_a_model_hides_no_other_fault():
    text = f"{HEAD}metadata: {{name: one}}\nspec: {{replicas: many}}\n"
    with pytest.raises(ConfigError, match=r"spec.model is required.*spec.replicas must be a whole"):
        read_documents({"a.yaml": text})


def test_a_fault_that_leaving_one_out_would_cause_is_not_reported():
    with pytest.raises(ConfigError, match=r"^a.yaml, document 1: spec.model.uri [^(]*$"):
        read_documents({"a.yaml": ONE.replace("demo://smollm2", "pvc://claim/x")})
