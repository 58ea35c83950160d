"""`quire simulate`: the table of its commands. Cheap to import; each is imported when called."""

from quire.cli.command import Entry, Group

_NEEDS = ("matplotlib", "numpy", "uvloop", "yaml")


def _entry(name: str, help_line: str, module: str) -> Entry:
    return Entry(
        name=name,
        help=help_line,
        target=f"services.scheduler.simulate.{module}:COMMAND",
        extra="simulate",
        needs=_NEEDS,
    )


COMMAND = Group(
    "simulate",
    "drive the scheduler with simulated workers on a simulated clock",
    (
        _entry(
            "mixes", "four prompt/output mixes at several concurrencies, v0 against ours", "mixes"
        ),
        _entry("run", "one load under one or several policies", "run"),
        _entry("fleet", "many schedulers with a million requests in all", "fleet"),
        _entry("soak", "hours of mixed load; is resident memory flat?", "soak"),
        _entry("fit", "make a step model of a recorded run", "fit"),
    ),
)
