"""What deploy/ says is what the program has: flags, settings, variables, ports, paths of HTTP, files, times to end."""

import configparser
import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

import kvdb.config as configuration
from kvdb.__main__ import _parser
from kvdb.commands.settings import loaded
from kvdb.server.http.health import health_routes

DEPLOY = Path(__file__).parents[3] / "deploy"
END_SECONDS = 5
"""How long after server.drain_seconds the process ends whatever it still computes."""
EXPOSURE_TENTHS_MAX = 25
"""The exposure of the unit, in tenths of what `systemd-analyze security` counts from 0 to 10; systemd 252 counts 1.8."""
HEALTH = {route.path for route in health_routes(lambda: True)}


def settings_of(monkeypatch, environment, arguments=("serve",)):
    """The configuration of `kvdb serve` with these variables and arguments; raises for what does not exist."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    unknown = (
        set(environment) - {configuration.variable(name) for name in configuration.settings()} - {"KVDB_TOKEN", "XDG_CACHE_HOME"}
    )
    assert not unknown
    return loaded(_parser().parse_args(list(arguments))).config


def instructions():
    """The instructions of the Dockerfile: their names and the rest of their lines."""
    text = re.sub(r"^#.*\n", "", (DEPLOY / "Dockerfile").read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [(line.split(None, 1)[0], line.split(None, 1)[1].strip()) for line in text.splitlines() if line.strip()]


def of_image(monkeypatch, more=()):
    variables = shlex.split(next(rest for name, rest in instructions() if name == "ENV"))
    own = dict(pair.split("=", 1) for pair in variables if not pair.startswith("PATH="))
    arguments = [json.loads(rest)[0] for name, rest in instructions() if name == "CMD"]
    return settings_of(monkeypatch, own | dict(more), arguments)


def compose():
    return yaml.safe_load((DEPLOY / "compose.yaml").read_text())


def test_the_image_serves_on_the_ports_that_it_exposes_and_is_no_root(monkeypatch):
    config = of_image(monkeypatch)
    found = dict(instructions())
    assert found["EXPOSE"].split() == [str(config.server.port), str(config.metrics.port)]
    assert found["USER"] == re.search(r"--uid (\d+)", " ".join(rest for _, rest in instructions())).group(1)
    assert json.loads(found["ENTRYPOINT"]) == ["kvdb"]
    assert config.storage.path.startswith(found["VOLUME"] + "/")
    host, port, path = re.search(r"http://([\d.]+):(\d+)(/\w+)", found["HEALTHCHECK"]).groups()
    assert (host, int(port)) == ("127.0.0.1", config.metrics.port)
    assert path in HEALTH
    assert [name for name, _ in instructions()].count("FROM") == 2


def test_what_the_image_copies_and_installs_is_there():
    text = (DEPLOY / "Dockerfile").read_text()
    assert (DEPLOY.parent / re.search(r"--constraint (\S+)", text).group(1)).is_file()
    assert (DEPLOY / "Dockerfile.dockerignore").is_file()


def test_an_image_that_nobody_gave_a_token_refuses_to_be_reached(monkeypatch):
    from kvdb.errors import ConfigError
    from kvdb.server.access.exposure import check_exposure

    config = of_image(monkeypatch)
    with pytest.raises(ConfigError, match="asks nobody"):
        check_exposure(config)
    assert "can be read on the way" in check_exposure(of_image(monkeypatch, {"KVDB_TOKEN": "geheim"}))


def test_compose_names_settings_files_and_ports_that_exist(monkeypatch):
    services = compose()["services"]
    own = services["kvdb"]["environment"] | {"KVDB_TOKEN": "geheim"}
    own = {name: re.sub(r"^\$\{\w+:-(.*)\}$", r"\1", value) for name, value in own.items()}
    config = of_image(monkeypatch, own)
    assert config.storage.cpu_bytes_max == 4 << 30
    ports = {int(port.rpartition(":")[2]) for port in services["kvdb"]["ports"]}
    assert ports == {config.server.port, config.metrics.port}
    assert int(services["kvdb"]["stop_grace_period"].rstrip("s")) > config.server.drain_seconds + END_SECONDS
    assert (DEPLOY / services["kvdb"]["build"]["context"] / services["kvdb"]["build"]["dockerfile"]).is_file()
    for service in services.values():
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            assert (DEPLOY / source).exists() if source.startswith(".") else source in compose()["volumes"]


def test_prometheus_and_grafana_find_the_server_the_rules_and_the_dashboard(monkeypatch):
    services = compose()["services"]
    mounted = {target: source for name in ("prometheus", "grafana") for source, target, _ in
               (volume.split(":") for volume in services[name]["volumes"] if volume.count(":") == 2)}  # fmt: skip
    scraped = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())
    (job,) = scraped["scrape_configs"]
    assert job["static_configs"][0]["targets"] == [f"kvdb:{of_image(monkeypatch).metrics.port}"]
    assert f'job="{job["job_name"]}"' in (DEPLOY / "prometheus/alerts.yml").read_text()
    assert job["authorization"]["credentials_file"] == f"/run/secrets/{services['prometheus']['secrets'][0]}"
    assert set(services["prometheus"]["secrets"]) <= compose()["secrets"].keys()
    assert set(scraped["rule_files"]) <= mounted.keys()
    (provider,) = yaml.safe_load((DEPLOY / "grafana/provisioning/dashboards/kvdb.yml").read_text())["providers"]
    assert f"{provider['options']['path']}/kvdb.json" in mounted
    (source,) = yaml.safe_load((DEPLOY / "grafana/provisioning/datasources/prometheus.yml").read_text())["datasources"]
    assert source["url"] == f"http://prometheus:{services['prometheus']['ports'][0].rpartition(':')[2]}"


def test_the_unit_starts_a_server_with_flags_that_exist(monkeypatch, tmp_path):
    unit = configparser.ConfigParser(strict=False, interpolation=None, delimiters=("=",))
    unit.optionxform = str
    unit.read(DEPLOY / "systemd" / "kvdb.service")
    service = unit["Service"]
    program, *arguments = shlex.split(service["ExecStart"])
    assert program.endswith("/kvdb")
    file = tmp_path / "kvdb.toml"
    file.write_text("")
    arguments = [str(file) if word == "/etc/kvdb/kvdb.toml" else word for word in arguments]
    config = settings_of(monkeypatch, dict(word.split("=", 1) for word in service["Environment"].split()), arguments)
    assert config.storage.path == f"/var/lib/{service['StateDirectory']}/store"
    assert int(service["TimeoutStopSec"]) > config.server.drain_seconds + END_SECONDS
    for name in ("DynamicUser", "NoNewPrivileges", "ProtectSystem", "MemoryMax"):
        assert service[name] not in {"no", "infinity"}


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd-analyze")
def test_systemd_takes_the_unit(tmp_path):
    copy = tmp_path / "kvdb.service"
    copy.write_text((DEPLOY / "systemd" / "kvdb.service").read_text().replace("/opt/kvdb/bin/kvdb", shutil.which("true")))
    done = subprocess.run(["systemd-analyze", "verify", copy], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd-analyze")
def test_systemd_finds_little_exposed(tmp_path):
    copy = tmp_path / "kvdb.service"
    copy.write_text((DEPLOY / "systemd" / "kvdb.service").read_text())
    command = ["systemd-analyze", "security", "--offline=true", "--no-pager", "--threshold", str(EXPOSURE_TENTHS_MAX), copy]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout[-200:] + done.stderr


def test_the_manifests_name_settings_ports_and_each_other(monkeypatch, tmp_path):
    found = {one["kind"]: one for one in yaml.safe_load_all((DEPLOY / "kubernetes" / "kvdb.yaml").read_text())}
    assert found.keys() == {"Secret", "ConfigMap", "Service", "StatefulSet", "PodDisruptionBudget"}
    pod = found["StatefulSet"]["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    file = tmp_path / "kvdb.toml"
    file.write_text(found["ConfigMap"]["data"]["kvdb.toml"])
    arguments = [str(file) if word == "/etc/kvdb/kvdb.toml" else word for word in container["args"]]
    (token,) = container["env"]
    config = settings_of(monkeypatch, {token["name"]: "geheim"}, arguments)
    assert config.server.token == "geheim"
    assert token["valueFrom"]["secretKeyRef"]["key"] in found["Secret"]["stringData"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {"grpc": config.server.port, "metrics": config.metrics.port}
    assert {port["targetPort"]: port["port"] for port in found["Service"]["spec"]["ports"]} == ports
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["path"] in HEALTH
        assert container[probe]["httpGet"]["port"] == "metrics"
    assert pod["spec"]["terminationGracePeriodSeconds"] > config.server.drain_seconds + END_SECONDS
    volumes = {volume["name"] for volume in (*pod["spec"]["volumes"], *(one["metadata"] for one in
               found["StatefulSet"]["spec"]["volumeClaimTemplates"]))}  # fmt: skip
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes
    assert any(config.storage.path.startswith(mount["mountPath"]) for mount in container["volumeMounts"])
    labels = pod["metadata"]["labels"]
    assert found["Service"]["spec"]["selector"] == labels
    for kind in ("StatefulSet", "PodDisruptionBudget"):
        assert found[kind]["spec"]["selector"]["matchLabels"] == labels
    gib = int(container["resources"]["limits"]["memory"].removesuffix("Gi"))
    assert config.storage.cpu_bytes_max < gib << 30
    disk = found["StatefulSet"]["spec"]["volumeClaimTemplates"][0]["spec"]["resources"]["requests"]["storage"]
    assert config.storage.disk_bytes_max < int(disk.removesuffix("Gi")) << 30
