"""`quire model`: the models on this machine. A table; each command is a module of its own."""

from quire.cli.command import Entry, Group

COMMAND = Group(
    "model",
    "fetch models and list them",
    (
        Entry(
            name="pull",
            help="fetch a model: an alias, a hub id, or a file or folder of this machine",
            target="quire.cli.model_pull:COMMAND",
            extra="tokenizer",
            needs=("huggingface_hub", "tokenizers"),
        ),
        Entry(
            name="list",
            help="show the models on this machine",
            target="quire.cli.model_list:COMMAND",
        ),
    ),
)
