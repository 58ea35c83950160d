"""The compose files and the Dockerfile say what the services understand, and keep the hardening."""

import dataclasses
import importlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from services.chassis.settings import SettingsError, parse
from tests.architecture.settings_classes import SERVICES, settings_class

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text()


def load(file: str = "compose.yaml", **variables: str) -> dict[str, Any]:
    """The services of a compose file, with `${NAME:-default}` filled in."""

    def fill(match: re.Match[str]) -> str:
        return variables.get(match[1]) or match[2]

    text = re.sub(r"\$\{([A-Z_]+):-([^}]*)\}", fill, (ROOT / file).read_text())
    assert "$" not in re.sub(r"^\s*#.*", "", text, flags=re.MULTILINE)
    return yaml.safe_load(text)["services"]


COMPOSE = load()
GPU = load("compose.gpu.yaml")
OBSERVABILITY = load("compose.observability.yaml")
BESIDE = [name for name in OBSERVABILITY if name not in COMPOSE]
"""What the overlay adds; images of others."""

IMAGES = ("slim", "worker", "gateway")


@pytest.mark.parametrize("service", SERVICES)
def test_the_service_understands_its_command(service: str) -> None:
    program, *argv = COMPOSE[service]["command"]
    assert program == f"quire-{service}"
    parse(settings_class(service), prog=program, argv=argv, env={})


@pytest.mark.parametrize("service", SERVICES)
def test_a_flag_the_service_does_not_have_would_be_noticed(service: str) -> None:
    argv = [*COMPOSE[service]["command"][1:], "--no-such-flag"]
    with pytest.raises(SettingsError, match="unknown flag --no-such-flag"):
        parse(settings_class(service), prog=service, argv=argv, env={})


def test_everybody_is_told_the_same_model() -> None:
    services = load(QUIRE_MODEL="some-model")
    assert services["scheduler"]["environment"]["QUIRE_TOKENIZER"] == "some-model"
    assert services["model"]["command"] == ["quire", "model", "pull", "some-model"]
    for service in ("worker", "tokenizer"):
        argv = services[service]["command"][1:]
        settings = parse(settings_class(service), prog=service, argv=argv, env={})
        assert settings.model == "some-model"


def test_clients_of_the_scheduler_dial_the_port_it_listens_on() -> None:
    def settings(service: str) -> Any:
        argv = COMPOSE[service]["command"][1:]
        return parse(settings_class(service), prog=service, argv=argv, env={})

    (listen,) = settings("scheduler").listen
    port = listen.rpartition(":")[2]
    assert settings("worker").scheduler == f"scheduler:{port}"
    assert settings("tokenizer").scheduler == (f"scheduler:{port}",)


@pytest.mark.parametrize("service", SERVICES)
def test_health_is_asked_where_the_service_listens(service: str) -> None:
    argv = COMPOSE[service]["command"][1:]
    (listen,) = parse(settings_class(service), prog=service, argv=argv, env={}).listen
    kind, program, command, address, *_ = COMPOSE[service]["healthcheck"]["test"]
    assert (kind, program, command) == ("CMD", "quire", "health")
    assert address == f"127.0.0.1:{listen.rpartition(':')[2]}"


@pytest.mark.parametrize("service", SERVICES)
def test_a_container_is_given_longer_to_stop_than_the_service_takes_to_drain(service: str) -> None:
    argv = COMPOSE[service]["command"][1:]
    settings = parse(settings_class(service), prog=service, argv=argv, env={})
    grace = int(COMPOSE[service]["stop_grace_period"].removesuffix("s"))
    assert grace > settings.drain_timeout + 5


@pytest.mark.parametrize("service", COMPOSE)
def test_containers_are_hardened(service: str) -> None:
    described = COMPOSE[service]
    assert described["init"] is described["read_only"] is True
    assert described["cap_drop"] == ["ALL"]
    assert described["security_opt"] == ["no-new-privileges:true"]
    assert "container_name" not in described
    assert "privileged" not in described


def test_only_the_doors_are_published_and_only_to_this_host() -> None:
    services = {**OBSERVABILITY, **COMPOSE}
    published = {name: described.get("ports", []) for name, described in services.items()}
    assert {name: ports for name, ports in published.items() if ports} == {
        "tokenizer": ["127.0.0.1:50051:50051"],
        "gateway": ["127.0.0.1:30000:30000"],
        "jaeger": ["127.0.0.1:16686:16686"],
        "prometheus": ["127.0.0.1:9090:9090"],
        "grafana": ["127.0.0.1:3000:3000"],
    }
    assert "edge" not in COMPOSE["scheduler"]["networks"] + COMPOSE["worker"]["networks"]


def test_replicas_of_workers_divide_the_processors() -> None:
    worker = load(WORKERS="4")["worker"]
    assert worker["deploy"]["replicas"] == 4
    settings = parse(settings_class("worker"), prog="", argv=worker["command"][1:], env={})
    assert settings.local_workers == 4


def test_the_door_closes_before_the_workers_do() -> None:
    """Compose stops in the opposite order of `depends_on`."""
    assert {"worker", "scheduler"} <= set(COMPOSE["tokenizer"]["depends_on"])
    assert "scheduler" in COMPOSE["worker"]["depends_on"]


def test_the_gateway_is_started_on_request_and_dials_the_scheduler() -> None:
    argv = COMPOSE["scheduler"]["command"][1:]
    (listen,) = parse(settings_class("scheduler"), prog="", argv=argv, env={}).listen
    gateway = COMPOSE["gateway"]
    assert gateway["profiles"] == ["openai"]
    assert f"grpc://scheduler:{listen.rpartition(':')[2]}" in gateway["command"]
    assert all("profiles" not in COMPOSE[service] for service in SERVICES)


def test_only_the_overlay_asks_for_a_gpu() -> None:
    assert set(GPU) == {"worker"}
    (device,) = GPU["worker"]["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "device_ids": ["0"], "capabilities": ["gpu"]}
    command = COMPOSE["worker"]["command"][1:]
    env = GPU["worker"]["environment"]
    assert parse(settings_class("worker"), prog="", argv=command, env=env).device == "cuda"
    assert parse(settings_class("worker"), prog="", argv=command, env={}).device == "auto"


@pytest.mark.parametrize("service", BESIDE)
def test_what_is_beside_the_set_is_bounded_and_pinned(service: str) -> None:
    described = OBSERVABILITY[service]
    assert described["init"] is described["read_only"] is True
    assert described["cap_drop"] == ["ALL"]
    assert described["security_opt"] == ["no-new-privileges:true"]
    assert {"mem_limit", "logging"} <= set(described)
    assert re.search(r":v?\d+\.\d+\.\d+$", described["image"])
    # Names in `edge` have a second address for each tokenizer, and it would be scraped twice.
    assert "edge" not in described["networks"]


def test_prometheus_scrapes_where_the_services_are_told_to_serve_metrics() -> None:
    config = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())
    scraped = {
        name: str(discovery["port"])
        for job in config["scrape_configs"]
        for discovery in job.get("dns_sd_configs", ())
        for name in discovery["names"]
    }
    told = {
        service: OBSERVABILITY[service]["environment"]["QUIRE_METRICS_PORT"] for service in SERVICES
    }
    assert scraped == told


@pytest.mark.parametrize("service", SERVICES)
def test_the_service_understands_what_the_overlay_tells_it(service: str) -> None:
    env = {
        name: value
        for described in (COMPOSE[service], OBSERVABILITY[service])
        for name, value in described.get("environment", {}).items()
        if name.startswith("QUIRE_")
    }
    fields = {
        f"QUIRE_{field.name.upper()}" for field in dataclasses.fields(settings_class(service))
    }
    assert set(env) <= fields
    env = {name: str(value) for name, value in env.items()}
    settings = parse(
        settings_class(service), prog=service, argv=COMPOSE[service]["command"][1:], env=env
    )
    assert settings.enable_metrics
    assert settings.metrics_host == "0.0.0.0"
    assert settings.trace_sample_ratio == 1.0


def test_files_that_the_overlay_mounts_are_there() -> None:
    mounted = [
        volume.split(":")[0]
        for service in BESIDE
        for volume in OBSERVABILITY[service].get("volumes", ())
        if volume.startswith("./")
    ]
    assert mounted
    assert [path for path in mounted if not (ROOT / path).exists()] == []


def test_traces_go_from_the_services_to_the_collector_to_jaeger() -> None:
    config = yaml.safe_load((ROOT / "deploy/otel/collector.yaml").read_text())
    port = config["receivers"]["otlp"]["protocols"]["grpc"]["endpoint"].rpartition(":")[2]
    for service in SERVICES:
        told = OBSERVABILITY[service]["environment"]["QUIRE_OTLP_TRACES_ENDPOINT"]
        assert told == f"http://collector:{port}"
    assert config["exporters"]["otlp"]["endpoint"] == "jaeger:4317"
    processors = config["service"]["pipelines"]["traces"]["processors"]
    assert (processors[0], processors[-1]) == ("memory_limiter", "batch")


def test_only_the_fetcher_may_write_models() -> None:
    volumes = {name: described.get("volumes") for name, described in COMPOSE.items()}
    assert volumes == {
        "model": ["models:/var/lib/quire"],
        "scheduler": ["models:/var/lib/quire:ro"],
        "worker": ["models:/var/lib/quire:ro"],
        "tokenizer": ["models:/var/lib/quire:ro"],
        "gateway": None,
    }


def test_each_image_is_built_once() -> None:
    builds = {
        described["image"]: described["build"]["target"]
        for described in COMPOSE.values()
        if "build" in described
    }
    assert builds == {f"quire:{target}": target for target in IMAGES}
    assert sum("build" in described for described in COMPOSE.values()) == len(builds)
    for target in builds.values():
        assert re.search(rf"^FROM base AS {target}$", DOCKERFILE, re.MULTILINE)


def test_old_engines_can_build_and_run_it() -> None:
    """Engine 20.10 knows no heredoc, no --link and no start_interval, and pulls a syntax image."""
    assert not re.search(r"^#\s*syntax=|<<|--link|--mount", DOCKERFILE, re.MULTILINE)
    for file in ROOT.glob("compose*.yaml"):
        assert "start_interval" not in file.read_text()


def test_images_run_as_a_plain_user_and_without_a_shell() -> None:
    stages = re.split(r"^FROM ", DOCKERFILE, flags=re.MULTILINE)[1:]
    final = [stage for stage in stages if re.match(rf"base AS ({'|'.join(IMAGES)})\n", stage)]
    assert len(final) == len(IMAGES)
    for stage in final:
        assert "\nUSER quire\n" in stage
        (command,) = re.findall(r"^CMD (.*)$", stage, re.MULTILINE)
        assert json.loads(command)[0].startswith(("quire", "smg"))


def test_the_image_gets_the_packages_of_the_wheel() -> None:
    packages = ("quire", "services", "kernels", "benchmarks")
    ignore = (ROOT / ".dockerignore").read_text().splitlines()
    for package in packages:
        assert f"COPY {package} /{package}\n" in DOCKERFILE
        assert f"!{package}/" in ignore
        importlib.import_module(package)


def test_no_service_asks_a_hub_and_the_fetcher_may() -> None:
    assert "HF_HUB_OFFLINE=1" in DOCKERFILE
    assert COMPOSE["model"]["environment"]["HF_HUB_OFFLINE"] == "0"
