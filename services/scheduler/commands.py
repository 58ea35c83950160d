"""The commands of the scheduler for `quire`; cheap to import, each is imported when called."""

from quire.cli.command import Entry

REPLAY = Entry(
    name="replay",
    help="execute a recorded run of a scheduler again, as it was or with other settings",
    target="services.scheduler.replay_command:COMMAND",
    extra="scheduler",
    needs=("numpy",),
)
