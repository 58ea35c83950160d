"""Says what the OpenAI gateway of a local set lacks, without starting it.

    python -m quire.check_gateway [FLAG ...]

Ends with 0, or with 2 and one problem a line on standard error. The gateway (`smg`) and the stubs
by which a scheduler serves it are packages of the extra `openai`; they are looked for, not
imported.
"""

import importlib.util
import sys

_PACKAGES = ("smg", "smg_grpc_proto")


def main() -> int:
    """Returns the exit code."""
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        sys.stderr.write(
            f"--openai needs {' and '.join(missing)}; install with: "
            "pip install 'quire-llm[openai]'\n"
        )
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
