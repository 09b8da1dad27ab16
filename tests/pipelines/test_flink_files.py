"""Files for Flink in containers agree with what is run here; nobody has run the containers."""

import json
import re
from pathlib import Path

import apache_beam as beam
import pytest
import yaml
from apache_beam.options.pipeline_options import PipelineOptions

from beamjax.errors import OptionsError
from beamjax.pipelines.clusters import (
    flink_cluster,
    flink_server,
    guard,
    jars,
    job_servers,
    processes,
)
from beamjax.pipelines.clusters.flink_cluster import Cluster, Settings
from beamjax.pipelines.clusters.flink_server import connected

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker" / "flink"
RUNNERS = (ROOT / "docs" / "runners.md").read_text()
POM = (ROOT / "pipelines" / "clusters" / "java" / "flink.xml").read_text()
DOCKERFILE = (DOCKER / "Dockerfile").read_text()
JOB_PORT, ARTIFACT_PORT, EXPANSION_PORT, REST_PORT, POOL_PORT = 8099, 8098, 8097, 8081, 50001
CLUSTER = Cluster(Settings(), JOB_PORT, REST_PORT, POOL_PORT, ("localhost",))

SERVICES = yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]
KUBERNETES = {
    (one["kind"], one["metadata"]["name"]): one
    for one in yaml.safe_load_all((DOCKER / "kubernetes.yaml").read_text())
}
DEPLOYED = {name: one for (kind, name), one in KUBERNETES.items() if kind == "Deployment"}
PODS = {
    container["name"]: container
    for one in DEPLOYED.values()
    for container in one["spec"]["template"]["spec"]["containers"]
}


def settings(text):
    lines = (line for line in text.splitlines() if line and not line.startswith("#"))
    return dict(line.split(": ", 1) for line in lines)


CONFIGURATION = settings((DOCKER / "flink-conf.yaml").read_text())
NAMES = {
    "jobmanager.rpc.address", "jobmanager.rpc.port", "jobmanager.bind-host", "blob.server.port",
    "taskmanager.host", "taskmanager.bind-host", "rest.address", "rest.bind-address", "rest.port",
    "io.tmp.dirs",
}  # fmt: skip
"""Settings that say where something is, and so differ in containers."""


def test_versions_jars_and_options_of_java():
    beam_for_java = re.search(r"<artifactId>beam-runners-flink-1.16</.*\s*<version>(.*)</", POM)[1]
    assert beam_for_java.startswith("2.50.")
    told = RUNNERS[RUNNERS.index("Versions:") :].split("\n\n")[0].replace("\n", " ")
    for version in ("Flink 1.16.0", "Beam 2.50 for Java", "Java 17"):
        assert version in told
    gpu = (ROOT / "docker" / "Dockerfile.gpu").read_text()
    for name in ("PYTHON", "BEAM", "JAX"):
        line = re.compile(rf"^ARG {name}=.*$", re.M)
        assert line.findall(DOCKERFILE) == line.findall(gpu)[:1]
    for line in (
        "ARG JAVA=17", "ARG PYTHON=3.12", f"ARG BEAM={beam.__version__}",
        "COPY pipelines/clusters/java /java", "ENV CLASSPATH=/opt/beam/jars/*",
        'ENTRYPOINT ["python", "-m", "beamjax.pipelines.clusters.worker_pool"]',
    ):  # fmt: skip
        assert f"{line}\n" in DOCKERFILE
    assert "-f /java/flink.xml" in DOCKERFILE
    assert f" {jars.COPY_DEPENDENCIES} " in DOCKERFILE
    assert "sha256sum --quiet -c /java/flink.sha256" in DOCKERFILE
    # In containers, servers are for other containers too.
    assert "/java/ClasspathScanningResourcesDetector.java\n" in DOCKERFILE
    assert "ServerFactory" not in DOCKERFILE
    options = re.search(r'JAVA_TOOL_OPTIONS="(.*?)"', DOCKERFILE, re.S)[1]
    assert options.replace("\\\n", "").split() == list(jars.JAVA_OPTIONS)


def test_flink_has_the_settings_of_a_cluster_here(tmp_path):
    folder = flink_cluster._configuration(tmp_path, CLUSTER, 6123)
    expected = settings((folder / "flink-conf.yaml").read_text())
    arguments = flink_cluster._memory(CLUSTER.settings)
    expected |= dict(one.split("=", 1) for one in arguments if one != "-D")
    same = lambda found: {k: v for k, v in found.items() if k not in NAMES}
    assert same(CONFIGURATION) == same(expected)
    assert CONFIGURATION["rest.port"] == str(REST_PORT)
    copy = KUBERNETES["ConfigMap", "flink"]["data"]["flink-conf.yaml"]
    assert settings(copy) == CONFIGURATION
    page = (ROOT / "docs" / "flink.md").read_text()
    told = page[page.index("## Containers") :].split("\n## ")[0]
    for name, value in CLUSTER.flags.items():
        assert f"{json.dumps(name)}: {json.dumps(value)}" in told


def commands(host):
    """What each kind of process is started with, as `flink_cluster` does."""
    runtime, entry = "org.apache.flink.runtime", "StandaloneSessionClusterEntrypoint"
    configuration = "--configDir=/etc/flink"
    server = jars.job_server(
        "flink.FlinkJobServerDriver",
        (JOB_PORT, ARTIFACT_PORT, EXPANSION_PORT),
        Path("/tmp"),
        f"--flink-master=jobmanager:{REST_PORT}",
        "--flink-conf-dir=/etc/flink",
    )
    return {
        "jobmanager": [f"{runtime}.entrypoint.{entry}", configuration],
        "taskmanager": [f"{runtime}.taskexecutor.TaskManagerRunner", configuration],
        "jobserver": [one.replace("--job-host=localhost", f"--job-host={host}") for one in server],
    }


def test_processes_are_started_as_here():
    for name, command in commands("localhost").items():
        service = SERVICES["taskmanager-0" if name == "taskmanager" else name]
        assert service["command"] == ["-Xmx512m", *command]
    for name, command in commands("jobserver").items():
        assert PODS[name]["args"] == ["-Xmx512m", *command]
    # Only the job server has the class that sends no jars.
    path = "/opt/beam/classes:/opt/beam/jars/*"
    found = {name: one["environment"] for name, one in SERVICES.items() if "environment" in one}
    assert found == {"jobserver": {"CLASSPATH": path}}
    found = {name: one["env"] for name, one in PODS.items() if "env" in one}
    assert found == {"jobserver": [{"name": "CLASSPATH", "value": path}]}


def test_each_task_manager_has_a_pool_at_its_own_localhost():
    managers = [name for name in SERVICES if name.startswith("taskmanager")]
    pools = [SERVICES[name.replace("taskmanager", "workers")] for name in managers]
    assert len(managers) == 2
    assert [pool["network_mode"] for pool in pools] == [f"service:{name}" for name in managers]
    pod = DEPLOYED["taskmanager"]["spec"]["template"]["spec"]["containers"]
    assert [one["name"] for one in pod] == ["taskmanager", "workers"]
    arguments = [f"--host={processes.LOOPBACK}", f"--port={POOL_PORT}"]
    assert all(pool["command"] == arguments for pool in pools)
    assert pod[1]["args"] == arguments


def test_nobody_outside_reaches_the_cluster():
    published = [port for one in SERVICES.values() for port in one.get("ports", [])]
    ports = (REST_PORT, JOB_PORT, ARTIFACT_PORT)
    assert set(published) == {f"127.0.0.1:{port}:{port}" for port in ports}
    policy = KUBERNETES["NetworkPolicy", "own-pods-only"]["spec"]
    assert policy["podSelector"] == {}
    assert policy["ingress"] == [{"from": [{"podSelector": {}}]}]
    others = [one for (kind, _), one in KUBERNETES.items() if kind != "Namespace"]
    assert {one["metadata"]["namespace"] for one in others} == {"beamjax-flink"}


def test_services_select_pods_and_have_the_ports_of_the_configuration():
    asked = ("jobmanager.rpc.port", "blob.server.port", "rest.port")
    expected = {
        "jobmanager": {int(CONFIGURATION[name]) for name in asked},
        "jobserver": {JOB_PORT, ARTIFACT_PORT},
    }
    found = {}
    for (kind, name), one in KUBERNETES.items():
        if kind == "Service":
            assert one["spec"].get("type", "ClusterIP") == "ClusterIP"
            labels = DEPLOYED[name]["spec"]["template"]["metadata"]["labels"]
            assert one["spec"]["selector"].items() <= labels.items()
            found[name] = {port["port"] for port in one["spec"]["ports"]}
    assert found == expected


# --- where a FlinkRunner finds its job server

HOST = ["--flink-master=host:8081", f"--flink-conf-dir={jars.SOURCES / 'flink-remote'}"]
EMBEDDED = ["--flink-master=[local]", f"--flink-conf-dir={jars.SOURCES / 'flink-local'}"]
FOUND = [
    # What the options say, whether the default cluster runs, and where jobs go.
    ({"job_endpoint": "localhost:1"}, True, None),
    ({}, True, "default"),
    ({}, False, EMBEDDED),
    ({"flink_master": "[local]"}, True, EMBEDDED),
    ({"flink_master": "host:8081"}, True, HOST),
    ({"flink_cluster": "running"}, False, "running"),
    ({"flink_cluster": "stopped"}, True, OptionsError),
    ({"flink_cluster": "stopped", "flink_master": "host:8081"}, True, OptionsError),
]


@pytest.mark.parametrize(("given", "runs", "expected"), FOUND)
def test_where_jobs_go(given, runs, expected, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    there = {tmp_path / "running"} | ({tmp_path / "default"} if runs else set())
    started = []
    monkeypatch.setattr(flink_cluster, "default_folder", lambda: tmp_path / "default")
    monkeypatch.setattr(flink_cluster, "read", lambda folder: CLUSTER if folder in there else None)
    monkeypatch.setattr(guard, "watched", lambda address, pid: "a-name")
    monkeypatch.setattr(flink_server, "_checked", lambda rest, options, *args, **kwargs: options)
    monkeypatch.setattr(
        job_servers,
        "connected_to_java",
        lambda options, name, driver, arguments, embedded: started.append((arguments, embedded)),
    )
    options = PipelineOptions.from_dictionary(given)
    if expected is OptionsError:
        with pytest.raises(OptionsError, match=r"flink_cluster: found nothing in .*stopped, expe"):
            connected(options)
        return
    found = connected(options)
    if isinstance(expected, list):
        assert started == [(expected, expected is EMBEDDED)]
        return
    assert started == []
    if expected is None:
        assert found is options
    else:
        flags = found.get_all_options(retain_unknown_options=True)
        assert tmp_path / flags["flink_cluster"] == tmp_path / expected
        assert flags["job_endpoint"] == f"127.0.0.1:{JOB_PORT}"
