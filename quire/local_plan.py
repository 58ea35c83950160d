"""What a local set consists of: which processes, with which flags, on which ports.

Starts nothing that lasts: it only lets each service check its own flags. Knows of the services
their flags and health names.
"""

import asyncio
import contextlib
import errno
import itertools
import socket
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

from quire.errors import SetFailed
from quire.local_process import RestartPolicy

SERVICES = ("scheduler", "worker", "tokenizer")
GATEWAY = "gateway"
"""The process that OpenAI clients talk to: `smg`, a program of others."""

PROGRAMS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        **{service: (sys.executable, "-m", f"services.{service}") for service in SERVICES},
        GATEWAY: (sys.executable, "-m", "smg", "launch"),
    }
)
"""How the processes of each service are started, without their flags."""

CHECKS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        service: (sys.executable, "-m", "services.check_settings", service)
        for service in (*SERVICES, GATEWAY)
    }
)
"""Programs that say in a moment what is wrong with the flags of a service."""

MOST_OF_A_SERVICE = 64
"""Limit on the workers and on the tokenizers of one set; more than a machine has use for."""

_TEXT_SERVICE, _TOKEN_SERVICE, _PROCESS = "quire.v1.TextService", "quire.v1.TokenService", ""
_WORKER_SERVICE = "quire.v1.WorkerLinkService"
_LAST_PORT = 65_535
_METRICS_FLAG, _METRICS_PORT = "--metrics-port=", 9461
_GATEWAY_METRICS_FLAG = "--prometheus-port"
_FAULTS_OF_A_PORT = (errno.EADDRINUSE, errno.EACCES, errno.EPERM)
_SOME_PORT = 1
_LOOPBACK = "127.0.0.1"
_GATEWAY_GRACE_S = 30
"""How long the gateway lets running requests go on once it is to end; before it is made to."""


class WrongSettings(SetFailed):
    """Settings of a set that cannot be used; nothing was started.

    Args:
        problems: each is one line and, where it is about one flag, begins with it.
    """

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = tuple(problems)


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalConfig:
    """What to start.

    Attributes:
        model: the model's folder.
        served_model_name: what clients call it.
        workers: how many, 1 to 64; they share the processors and the memory.
        tokenizers: how many, 1 to 64, on consecutive ports.
        host: where the tokenizers listen.
        port: of the first tokenizer; 0 for any free ones.
        openai_port: where the OpenAI gateway listens, at the same host; 0 for any free one; None
            for no gateway.
        serves_metrics: the flags or the environment say so; the ports are tried before the start.
        flags: further flags by service, e.g. `{"worker": ("--dtype", "float32")}`.
        programs: how the processes of each service are started, without their flags.
        checks: programs by service that take its flags and say what is wrong with them.
        restarts: when a process that ended by itself is started again.
        info_port: of this machine's loopback, where the scheduler tells facts about itself to
            `quire top`; any free one where that is taken. None: nowhere but within the set.
        log_dir: where the logs go; None for the run folder, which goes away with the set.
        drain_timeout_s: how long a process may take to end after it was asked, seconds.
        hurry_timeout_s: the same after one was given up, when nothing can be finished any more.
    """

    model: Path
    served_model_name: str
    workers: int = 1
    tokenizers: int = 1
    host: str = "127.0.0.1"
    port: int = 50051
    info_port: int | None = None
    openai_port: int | None = None
    serves_metrics: bool = False
    flags: Mapping[str, Sequence[str]] = field(default_factory=dict)
    programs: Mapping[str, Sequence[str]] = field(default_factory=lambda: PROGRAMS)
    checks: Mapping[str, Sequence[str]] = field(default_factory=lambda: CHECKS)
    restarts: RestartPolicy = field(default_factory=RestartPolicy)
    log_dir: Path | None = None
    drain_timeout_s: float = 40.0
    hurry_timeout_s: float = 2.0


@dataclass(frozen=True, slots=True)
class Member:
    """One process of the plan: what it is called and told, and where it says that it can serve."""

    service: str
    name: str
    flags: tuple[str, ...]
    ready_at: tuple[tuple[str, str], ...] = ()
    """Pairs of address and health name."""
    ready_url: str = ""
    """For one that speaks HTTP: what it answers with 200 once it can serve."""

    @property
    def metrics_port(self) -> int | None:
        """Where it serves its metrics, if told to; None: anywhere."""
        if self.service == GATEWAY:  # it serves them in any case
            return int(self.flags[self.flags.index(_GATEWAY_METRICS_FLAG) + 1])
        last = self.flags[-1] if self.flags else ""
        port = last.removeprefix(_METRICS_FLAG)
        is_number = last.startswith(_METRICS_FLAG) and port.isascii() and port.isdigit()
        return int(port) or None if is_number else None


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayPorts:
    """Ports of the OpenAI gateway: where it listens, tells its metrics, finds the scheduler."""

    listen: int
    metrics: int
    scheduler: int


@dataclass(frozen=True, slots=True)
class Plan:
    """What a set consists of.

    Attributes:
        scheduler: where it listens.
        info: where it tells facts about itself beside that; "" nowhere.
        targets: addresses at which the tokenizers are reached.
        members: the processes.
        openai_url: base URL for OpenAI clients; "" where there is no gateway.
    """

    scheduler: str
    info: str
    targets: tuple[str, ...]
    members: tuple[Member, ...]
    openai_url: str = ""


async def checked_plan(config: LocalConfig, folder: Path) -> Plan:
    """The set that `config` describes, once nothing that shows before a start is wrong with it.

    Args:
        config: what was asked for.
        folder: of this run, for sockets.

    Raises:
        WrongSettings: numbers, ports and the flags of the services; all that is wrong.
    """
    scheduler = f"unix://{folder}/scheduler.sock"
    wrong_numbers = _wrong_numbers(config)
    ports: tuple[int, ...] = ()
    gateway = None
    try:
        if not wrong_numbers:
            ports = free_ports(config.host, config.port, config.tokenizers)
            gateway = _gateway_ports(config)
    except SetFailed as error:
        ports, wrong_numbers = (), [error.message]
    # The other flags can be checked all the same, with numbers that nobody complains about.
    checked = replace(config, workers=1) if wrong_numbers else config
    info = "" if config.info_port is None else _info_address(config.info_port, ports)
    if gateway is None and config.openai_port is not None:
        gateway = GatewayPorts(listen=_SOME_PORT, metrics=_SOME_PORT, scheduler=_SOME_PORT)
    members = members_of(checked, folder, scheduler, ports or (_SOME_PORT,), gateway, info)
    if problems := [*wrong_numbers, *await _wrong_flags(config, members)]:
        raise WrongSettings(problems)
    if config.serves_metrics:
        _try_metrics_ports(members)
    targets = tuple(dialled(config.host, port) for port in ports)
    url = "" if gateway is None else f"http://{dialled(config.host, gateway.listen)}/v1"
    return Plan(scheduler, info, targets, tuple(members), url)


def members_of(
    config: LocalConfig,
    folder: Path,
    scheduler: str,
    ports: Sequence[int],
    gateway: GatewayPorts | None = None,
    info: str = "",
) -> list[Member]:
    """The processes of the set, with all their flags.

    Args:
        config: what was asked for.
        folder: of this run, for sockets.
        scheduler: where it listens.
        ports: of the tokenizers.
        gateway: ports of the OpenAI gateway; None: there is none.
        info: where the scheduler tells facts beside that; "" nowhere.
    """
    numbers = itertools.count()

    def metrics(service: str) -> str:
        """Each process has a port of its own, in the order of this list."""
        return _metrics_port(config.flags.get(service, ()), next(numbers))

    model = ("--model", str(config.model), "--served-model-name", config.served_model_name)
    run = f"{socket.gethostname()[:64]}-{folder.name}"
    further = {service: tuple(config.flags.get(service, ())) for service in SERVICES}
    for_gateway: tuple[str, ...] = ()
    if gateway is not None:
        tcp = address(_LOOPBACK, gateway.scheduler)
        for_gateway = ("--listen", tcp, "--tokenizer", str(config.model))
    members = [
        Member(
            service="scheduler",
            name="scheduler",
            flags=(
                *("--listen", scheduler),
                *for_gateway,
                *(("--info-listen", info) if info else ()),
                *further["scheduler"],
                metrics("scheduler"),
            ),
            ready_at=((scheduler, _PROCESS),),
        )
    ]
    for number in range(config.workers):
        name = f"worker-{number}"
        own = f"unix://{folder}/{name}.sock"
        worker = ("--worker-id", f"{run}-{name}", "--local-workers", str(config.workers))
        members.append(
            Member(
                service="worker",
                name=name,
                flags=(
                    *("--scheduler", scheduler, "--listen", own),
                    *(*worker, *model, *further["worker"], metrics("worker")),
                ),
                ready_at=((own, _WORKER_SERVICE), (scheduler, _TOKEN_SERVICE)),
            )
        )
    for number, port in enumerate(ports):
        listen = address(config.host, port)
        members.append(
            Member(
                service="tokenizer",
                name=f"tokenizer-{number}",
                flags=(
                    *("--listen", listen, "--scheduler", scheduler),
                    *(*model, *further["tokenizer"], metrics("tokenizer")),
                ),
                ready_at=((dialled(config.host, port), _TEXT_SERVICE),),
            )
        )
    if gateway is not None:
        members.append(_gateway(config, gateway))
    return members


def _metrics_port(flags: Sequence[str], number: int) -> str:
    """The flag that gives the process of this number its port; it comes after the user's own."""
    default = f"{_METRICS_FLAG}{_METRICS_PORT}"
    given = next((flag for flag in flags if flag.startswith(_METRICS_FLAG)), default)
    port = given.removeprefix(_METRICS_FLAG)
    # Anything but a number is for the service to refuse; 0 is any free one.
    if not port.isascii() or not port.isdigit() or int(port) == 0:
        return given
    return f"{_METRICS_FLAG}{int(port) + number}"


def _gateway(config: LocalConfig, ports: GatewayPorts) -> Member:
    return Member(
        service=GATEWAY,
        name=GATEWAY,
        flags=(
            *("--worker-urls", f"grpc://{address(_LOOPBACK, ports.scheduler)}"),
            *("--policy", "round_robin"),  # there is one
            # With one scheduler it would make a minute's outage of its restart.
            "--disable-circuit-breaker",
            *("--host", config.host, "--port", str(ports.listen)),
            *("--prometheus-host", _LOOPBACK, _GATEWAY_METRICS_FLAG, str(ports.metrics)),
            *("--worker-startup-check-interval", "1", "--health-check-interval-secs", "2"),
            *("--shutdown-grace-period-secs", str(_GATEWAY_GRACE_S), "--log-level", "warn"),
        ),
        ready_url=f"http://{dialled(config.host, ports.listen)}/readiness",
    )


def _wrong_numbers(config: LocalConfig) -> list[str]:
    """What is wrong with the counts and the port, before any port is tried."""
    counts = {"--workers": config.workers, "--tokenizers": config.tokenizers}
    problems = [
        f"{flag} must be from 1 to {MOST_OF_A_SERVICE}, got {count!r}"
        for flag, count in counts.items()
        # Callers from Python may pass anything, and True is not a count.
        if type(count) is not int or not 1 <= count <= MOST_OF_A_SERVICE
    ]
    if not 0 <= config.port <= _LAST_PORT:
        problems.append(f"--port must be from 0 to {_LAST_PORT}, got {config.port}")
    elif not problems and config.port + config.tokenizers - 1 > _LAST_PORT:
        problems.append(
            f"--port {config.port} leaves no room for {config.tokenizers} tokenizers on ports "
            f"from there on; the last one is {_LAST_PORT}"
        )
    if config.openai_port is not None and not 0 <= config.openai_port <= _LAST_PORT:
        problems.append(f"--openai-port must be from 0 to {_LAST_PORT}, got {config.openai_port}")
    return problems


def _gateway_ports(config: LocalConfig) -> GatewayPorts | None:
    if config.openai_port is None:
        return None
    with contextlib.ExitStack() as trials:
        return GatewayPorts(
            listen=_try_port(trials, config.host, config.openai_port, flag="--openai-port"),
            metrics=_try_port(trials, _LOOPBACK, 0),
            scheduler=_try_port(trials, _LOOPBACK, 0),
        )


def _try_metrics_ports(members: Sequence[Member]) -> None:
    with contextlib.ExitStack() as trials:
        for member in members:
            if member.service != GATEWAY and member.metrics_port is not None:
                try:
                    _try_port(trials, _LOOPBACK, member.metrics_port, flag="--metrics-port")
                except SetFailed as error:
                    raise WrongSettings([f"{member.name}: {error.message}"]) from error


async def _wrong_flags(config: LocalConfig, members: Sequence[Member]) -> list[str]:
    """Lets each service say what is wrong with its flags."""
    one_each = {member.service: member for member in members}
    async with asyncio.TaskGroup() as tasks:
        said = [
            tasks.create_task(_problems((*config.checks[service], *member.flags)))
            for service, member in one_each.items()
            if service in config.checks
        ]
    # The services share some variables of the environment: the same problem once is enough.
    return list(dict.fromkeys(problem for task in said for problem in task.result()))


async def _problems(command: Sequence[str]) -> list[str]:
    pipe = asyncio.subprocess.PIPE
    try:
        check = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.DEVNULL, stdout=pipe, stderr=pipe
        )
    except OSError as error:
        return [f"cannot start {command[0]}: {error.strerror}"]
    try:
        _, err = await check.communicate()
    finally:
        if check.returncode is None:
            check.kill()
    if check.returncode == 0:
        return []
    return err.decode(errors="replace").splitlines()[-16:] or ["the settings cannot be checked"]


def free_ports(host: str, port: int, count: int) -> tuple[int, ...]:
    """`count` ports from `port` on, or any free ones for 0, after trying them out.

    Raises:
        SetFailed: one is taken, or nobody can listen at `host`.
    """
    with contextlib.ExitStack() as trials:  # all at once, so that no port is found twice
        return tuple(_try_port(trials, host, port + i if port else 0) for i in range(count))


def _info_address(port: int, taken: Collection[int]) -> str:
    """The loopback's `port`, or a free one where somebody, or a tokenizer of `taken`, has it."""
    if port not in taken:
        with contextlib.suppress(SetFailed):
            (port,) = free_ports(_LOOPBACK, port, 1)
            return address(_LOOPBACK, port)
    (free,) = free_ports(_LOOPBACK, 0, 1)
    return address(_LOOPBACK, free)


def _try_port(trials: contextlib.ExitStack, host: str, port: int, *, flag: str = "--port") -> int:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, place = found[0]
        trial = trials.enter_context(socket.socket(family, kind, protocol))
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        trial.bind(place)
        return int(trial.getsockname()[1])
    except UnicodeError as error:  # a name that no name can be
        raise SetFailed(f"cannot listen on {host!r} ({error}); choose another --host") from error
    except OSError as error:
        reason = error.strerror or str(error)
        if not isinstance(error, socket.gaierror) and error.errno in _FAULTS_OF_A_PORT:
            where = address(host, port)
        else:
            where, flag = host, "--host"
        raise SetFailed(f"cannot listen on {where} ({reason}); choose another {flag}") from error


def dialled(host: str, port: int) -> str:
    """The address at which somebody who listens at `host` is reached from this machine."""
    return address({"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host), port)


def address(host: str, port: int) -> str:
    """`host:port`, with brackets where the host is a number of IPv6."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
