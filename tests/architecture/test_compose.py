"""compose.yaml and the Dockerfile say what the services understand, and keep the hardening."""

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


def load(**variables: str) -> dict[str, Any]:
    """compose.yaml with `${NAME:-default}` filled in."""

    def fill(match: re.Match[str]) -> str:
        return variables.get(match[1]) or match[2]

    text = re.sub(r"\$\{([A-Z_]+):-([^}]*)\}", fill, (ROOT / "compose.yaml").read_text())
    assert "$" not in re.sub(r"^\s*#.*", "", text, flags=re.MULTILINE)
    return yaml.safe_load(text)["services"]


COMPOSE = load()


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


def test_only_the_tokenizer_is_published_and_only_to_this_host() -> None:
    published = {name: described.get("ports", []) for name, described in COMPOSE.items()}
    assert published.pop("tokenizer") == ["127.0.0.1:50051:50051"]
    assert not any(published.values())
    assert "edge" not in COMPOSE["scheduler"]["networks"] + COMPOSE["worker"]["networks"]


def test_only_the_fetcher_may_write_models() -> None:
    volumes = {name: described.get("volumes") for name, described in COMPOSE.items()}
    assert volumes == {
        "model": ["models:/var/lib/quire"],
        "scheduler": None,
        "worker": ["models:/var/lib/quire:ro"],
        "tokenizer": ["models:/var/lib/quire:ro"],
    }


def test_each_image_is_built_once() -> None:
    builds = {
        described["image"]: described["build"]["target"]
        for described in COMPOSE.values()
        if "build" in described
    }
    assert builds == {"quire:slim": "slim", "quire:worker": "worker"}
    assert sum("build" in described for described in COMPOSE.values()) == len(builds)
    for target in builds.values():
        assert re.search(rf"^FROM base AS {target}$", DOCKERFILE, re.MULTILINE)


def test_old_engines_can_build_and_run_it() -> None:
    """Engine 20.10 knows no heredoc, no --link and no start_interval, and pulls a syntax image."""
    assert not re.search(r"^#\s*syntax=|<<|--link|--mount", DOCKERFILE, re.MULTILINE)
    assert "start_interval" not in (ROOT / "compose.yaml").read_text()


def test_images_run_as_a_plain_user_and_without_a_shell() -> None:
    stages = re.split(r"^FROM ", DOCKERFILE, flags=re.MULTILINE)[1:]
    final = [stage for stage in stages if re.match(r"base AS (slim|worker)\n", stage)]
    assert len(final) == 2
    for stage in final:
        assert "\nUSER quire\n" in stage
        (command,) = re.findall(r"^CMD (.*)$", stage, re.MULTILINE)
        assert json.loads(command)[0].startswith("quire")


def test_the_image_gets_the_packages_of_the_wheel() -> None:
    packages = ("quire", "services", "kernels", "benchmarks")
    ignore = (ROOT / ".dockerignore").read_text().splitlines()
    for package in packages:
        assert f"COPY {package} /{package}\n" in DOCKERFILE
        assert f"!{package}/" in ignore
        importlib.import_module(package)
