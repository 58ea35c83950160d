"""What absent sampling fields take: the model's `generation_config.json`, else the contract."""

import logging
from pathlib import Path

from quire.generation_config import GENERATION_CONFIG_FILE, DamagedConfig, read_file_defaults
from services.chassis.process import StartupError
from services.tokenizer.domain import SamplingDefaults

log = logging.getLogger(__name__)


def load_sampling_defaults(folder: Path) -> SamplingDefaults:
    """Keys present in the file count, else the contract's defaults.

    Raises:
        StartupError: the file is damaged, or a value is out of range.
    """
    try:
        file = read_file_defaults(folder)
    except DamagedConfig as error:
        raise StartupError(str(error)) from error
    if file.ignored:
        path = folder / GENERATION_CONFIG_FILE
        log.warning("%s: not available in this version: %s", path, ", ".join(file.ignored))
    contract = SamplingDefaults()
    return SamplingDefaults(
        temperature=contract.temperature if file.temperature is None else file.temperature,
        top_p=contract.top_p if file.top_p is None else file.top_p,
        top_k=contract.top_k if file.top_k is None else file.top_k,
    )
