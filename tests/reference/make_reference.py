"""Makes smollm2_greedy.json: what `transformers` generates greedily with the demo model.

Run it by hand when the demo model changes; it takes some minutes on two cores:

    python -m tests.reference.make_reference

Float32, eager attention, one prompt at a time. For every output position the distance of the two
highest logits is kept: where it is tiny, another order of additions may choose the other token.
"""

import argparse
import hashlib
import json
import random
import sys
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from quire.models import locate_model

MAX_NEW_TOKENS = 32
OUT = Path(__file__).with_name("smollm2_greedy.json")
_SEED = 20240611
_LONG = (1040, 1310, 1640, 1960)
_SHORT = 64

_PEOPLE = (
    "the night porter", "a retired surveyor", "our neighbour Ines", "the ferry captain",
    "a young botanist", "the choir director", "my cousin Teo", "the village baker",
    "an impatient editor", "the new apprentice", "Dr. Halloran", "a travelling clockmaker",
)  # fmt: skip
_ACTS = (
    "repaired", "misplaced", "painted", "measured", "described", "borrowed", "catalogued",
    "photographed", "carried home", "auctioned off", "took apart", "quietly replaced",
)  # fmt: skip
_THINGS = (
    "an old barometer", "the brass telescope", "three crates of pears", "a map of the canal",
    "the broken loom", "a box of letters", "the weather station", "two dozen lanterns",
    "a wooden bridge", "the library's oldest atlas", "a jar of blue ink", "the town's only tram",
)  # fmt: skip
_PLACES = (
    "beside the reservoir", "in the attic of the school", "at the edge of the marsh",
    "behind the customs house", "on the slow train to Brenau", "under the railway arch",
    "in a greenhouse full of ferns", "on the roof of the observatory",
)  # fmt: skip
_TIMES = (
    "Last winter", "On the first warm morning of April", "Shortly before midnight",
    "In the year of the great flood", "Every second Thursday", "After the harvest",
    "While the others slept", "Long before the road was built",
)  # fmt: skip
_REASONS = (
    "because nobody else had the patience", "although the instructions were missing",
    "hoping that the committee would notice", "which surprised everyone",
    "and kept a careful note of the cost", "so that the work could begin again",
    "without telling a soul", "since the insurance demanded it",
)  # fmt: skip
_TASKS = (
    "Explain in two sentences why {thing} would matter to {person}.",
    "Write the opening line of a story in which {person} finds {thing} {place}.",
    "List four questions that {person} should ask about {thing}.",
    "I am {person}. What is the difference between a lake and a reservoir?",
    "I am {person}. Give me three short tips for learning to cook rice.",
    "Translate into French for {person}: Where is the nearest pharmacy?",
    "I am {person}. How many minutes are there in a day? Show the multiplication.",
    "I am {person}. Name the planets of the solar system in order from the Sun.",
    "Summarise this in one sentence: {sentence}",
    "Who is mentioned in the following text, and what did they do? {sentence} {sentence2}",
    "I am {person}. Write a Python function that returns the larger of two numbers.",
    "Suggest a title for a report about {thing}, found {place}.",
)


def main() -> None:
    """Generates and writes the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gguf", type=Path, help="the demo model's file (default: the one pulled)")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    gguf = given.gguf or next(locate_model("smollm2-135m-instruct").path.glob("*.gguf"))
    torch.set_num_threads(given.threads)
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    model = AutoModelForCausalLM.from_pretrained(
        **source, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    cases = []
    for ids in prompts(tokenizer):
        cases.append(generate(model, ids))
        sys.stderr.write(f"{len(cases)}: {len(ids)} tokens, {cases[-1]['finish']}\n")
    content = {
        "model_sha256": hashlib.sha256(gguf.read_bytes()).hexdigest(),
        "made_with": f"transformers {transformers.__version__}, torch {torch.__version__}",
        "max_new_tokens": MAX_NEW_TOKENS,
        "cases": cases,
    }
    given.out.write_text(json.dumps(content, separators=(",", ":")) + "\n")


def generate(model, ids: list[int]) -> dict:
    """Greedy continuation of `ids`, until an end token or MAX_NEW_TOKENS."""
    with torch.inference_mode():
        result = model.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
            do_sample=False,
            max_new_tokens=MAX_NEW_TOKENS,
            return_dict_in_generate=True,
            output_logits=True,
        )
    output = result.sequences[0, len(ids) :].tolist()
    best = torch.cat(result.logits).topk(2).values
    ends = model.generation_config.eos_token_id
    ended = output[-1] in (ends if isinstance(ends, list) else [ends])
    return {
        "prompt": ids,
        "output": output,
        "gaps": [round(gap, 5) for gap in (best[:, 0] - best[:, 1]).tolist()],
        "finish": "stop" if ended else "length",
    }


def prompts(tokenizer) -> list[list[int]]:
    """Distinct prompts as token ids: chats, plain texts of 1 to 200 tokens, and four long texts."""
    draw = random.Random(_SEED)
    found: dict[tuple[int, ...], None] = {}
    while len(found) < _SHORT:
        number = len(found)
        if number % 2:
            messages = [{"role": "user", "content": _task(draw, _TASKS[number // 2 % len(_TASKS)])}]
            ids = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_dict=False
            )
        else:
            ids = tokenizer(_text(draw, 14))["input_ids"][: 1 + number * 199 // (_SHORT - 2)]
        found[tuple(ids)] = None
    for length in _LONG:
        found[tuple(tokenizer(_text(draw, length // 14))["input_ids"][:length])] = None
    return [list(ids) for ids in found]


def _task(draw: random.Random, task: str) -> str:
    return task.format(
        person=draw.choice(_PEOPLE),
        thing=draw.choice(_THINGS),
        place=draw.choice(_PLACES),
        sentence=_sentence(draw),
        sentence2=_sentence(draw),
    )


def _text(draw: random.Random, sentences: int) -> str:
    return " ".join(_sentence(draw) for _ in range(sentences))


def _sentence(draw: random.Random) -> str:
    what = f"{draw.choice(_PEOPLE)} {draw.choice(_ACTS)} {draw.choice(_THINGS)}"
    return f"{draw.choice(_TIMES)}, {what} {draw.choice(_PLACES)}, {draw.choice(_REASONS)}."


if __name__ == "__main__":
    main()
