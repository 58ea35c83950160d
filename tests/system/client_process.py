"""A client as a process of its own, to be killed: says on standard output how far it has come.

    python -m tests.system.client_process ADDRESS DOOR PROMPT_LEN MAX_TOKENS STREAM WINDOW

It asks the text or the token door for tokens, prints `sent`, then `answered` after the first
message, and reads on until the end. WINDOW is how many bytes the transport reads ahead.
"""

import sys

import grpc

from quire.v1 import text_pb2_grpc, token_pb2_grpc
from tests.system.raw_requests import text_request, token_request


def main() -> None:
    """One request from its start to its end."""
    address, door, prompt_len, max_tokens, stream, window = sys.argv[1:]
    options = (("grpc.http2.lookahead_bytes", int(window)), ("grpc.http2.bdp_probe", 0))
    prompt = range_prompt(int(prompt_len))
    with grpc.insecure_channel(address, options=options) as channel:
        if door == "text":
            request = text_request(prompt, int(max_tokens), stream=stream == "True")
            call = text_pb2_grpc.TextServiceStub(channel).Generate(request)
        else:
            request = token_request(prompt, int(max_tokens))
            call = token_pb2_grpc.TokenServiceStub(channel).Generate(request)
        say("sent")
        for number, _ in enumerate(call):
            if not number:
                say("answered")
    say("ended")


def say(word: str) -> None:
    sys.stdout.write(f"{word}\n")
    sys.stdout.flush()


def range_prompt(length: int) -> list[int]:
    return [index % 251 for index in range(length)]


if __name__ == "__main__":
    main()
