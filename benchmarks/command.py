"""`quire bench`: the table of benchmarks. Cheap to import; a benchmark is imported when called."""

from quire.cli.command import Entry, Group

COMMAND = Group(
    "bench",
    "measure a server, or a part of one",
    (
        Entry(
            name="serve",
            help="put a closed-loop load on a server and report throughput and latencies",
            target="benchmarks.serve:COMMAND",
        ),
        Entry(
            name="stalled-reader",
            help="what a caller that stops reading costs the others",
            target="benchmarks.stalled_reader:COMMAND",
        ),
        Entry(
            name="tenants",
            help="what a tenant that floods the service costs another one",
            target="benchmarks.tenants:COMMAND",
        ),
        Entry(
            name="long-prompts",
            help="what long prompts cost streams that run",
            target="benchmarks.long_prompts:COMMAND",
        ),
        Entry(
            name="scheduler",
            help="cost of a step in the scheduler core",
            target="benchmarks.scheduler:COMMAND",
            extra="scheduler",
            needs=("numpy",),
        ),
        Entry(
            name="recording",
            help="what recording adds to a step of the scheduler core",
            target="benchmarks.recording:COMMAND",
            extra="scheduler",
            needs=("numpy",),
        ),
        Entry(
            name="telemetry",
            help="what metrics and traces cost",
            target="benchmarks.telemetry:COMMAND",
            extra="all",
            needs=("opentelemetry.sdk",),
        ),
        Entry(
            name="link",
            help="cost of the step link per step, without a model",
            target="benchmarks.link:COMMAND",
            extra="scheduler",
            needs=("numpy", "uvloop"),
        ),
    ),
)
