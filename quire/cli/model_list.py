"""`quire model list`."""

import argparse
import json
from pathlib import Path

from quire.models import ALIASES, LocatedModel, models_dir, pulled_models


class ModelList:
    """Shows the models on this machine."""

    name = "list"
    help = "show the models on this machine"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Adds the command's arguments."""
        parser.add_argument("--json", action="store_true", help="one JSON array instead of a table")

    def run(self, args: argparse.Namespace) -> int:
        """Prints one line per model."""
        models = pulled_models()
        if args.json:
            print(json.dumps([_facts(model) for model in models]))
            return 0
        if not models:
            print(
                f"no model in {models_dir()}; get one with: quire model pull {next(iter(ALIASES))}"
            )
            return 0
        width = max(len(model.name) for model in models)
        for model in models:
            facts = _facts(model)
            size = f"{int(facts['bytes']) / 2**20:,.0f} MiB"
            print(f"{model.name:<{width}}  {size:>10}  {facts['weights']:<11}  {model.path}")
        return 0


def _facts(model: LocatedModel) -> dict[str, str | int]:
    return {
        "name": model.name,
        "bytes": sum(file.stat().st_size for file in model.path.rglob("*") if file.is_file()),
        "weights": _weights(model.path),
        "path": str(model.path),
    }


def _weights(folder: Path) -> str:
    if next(folder.glob("*.safetensors"), None):
        return "safetensors"
    return "gguf" if next(folder.glob("*.gguf"), None) else "none"


COMMAND = ModelList()
