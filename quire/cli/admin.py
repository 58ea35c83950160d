"""`quire admin`: looks at and changes a running scheduler. A table; the commands are in modules."""

from quire.cli.command import Entry, Group

COMMAND = Group(
    "admin",
    "look at and change a running scheduler",
    (
        Entry(
            name="get",
            help="show the configuration in force",
            target="quire.cli.admin_config:GET",
        ),
        Entry(
            name="set",
            help="change the configuration, without a restart",
            target="quire.cli.admin_config:SET",
        ),
        Entry(
            name="changes",
            help="show the latest changes, and who made them",
            target="quire.cli.admin_config:CHANGES",
        ),
        Entry(
            name="pin",
            help="keep a prefix cached",
            target="quire.cli.admin_pins:PIN",
        ),
        Entry(
            name="unpin",
            help="let a pinned prefix go",
            target="quire.cli.admin_pins:UNPIN",
        ),
        Entry(
            name="pins",
            help="show the pinned prefixes",
            target="quire.cli.admin_pins:PINS",
        ),
    ),
)
