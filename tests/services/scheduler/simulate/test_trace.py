"""Traces: both forms, and what is wrong with a line."""

from pathlib import Path

import pytest

from services.scheduler.simulate.load import Arrival
from services.scheduler.simulate.step_model import InputError
from services.scheduler.simulate.trace import check_trace, trace

EXPECTED = [
    Arrival(at_us=0, prompt_tokens=10, output_tokens=5, tenant="a"),
    Arrival(
        at_us=1_500_000,
        prompt_tokens=20,
        output_tokens=6,
        max_tokens=60,
        priority_class="batch",
        session="s1",
        shared_tokens=12,
    ),
]


def test_json_lines_and_csv_say_the_same(tmp_path: Path) -> None:
    lines = tmp_path / "trace.jsonl"
    lines.write_text(
        '{"at": 0, "prompt_tokens": 10, "output_tokens": 5, "tenant": "a"}\n\n'
        '{"at": 1.5, "prompt_tokens": 20, "output_tokens": 6, "max_tokens": 60, "class": "batch",'
        ' "session": "s1", "shared_tokens": 12}\n'
    )
    table = tmp_path / "trace.csv"
    table.write_text(
        "at,prompt_tokens,output_tokens,max_tokens,class,tenant,session,shared_tokens\n"
        "0,10,5,,,a,,\n"
        "1.5,20,6,60,batch,,s1,12\n"
    )
    assert list(trace(lines)) == EXPECTED
    assert list(trace(table)) == EXPECTED


def test_a_checked_trace_tells_how_long_its_requests_may_get(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("at,prompt_tokens,output_tokens,max_tokens\n0,10,5,\n0,10,5,90\n1,50,5,\n")
    extent = check_trace(path)
    assert (extent.requests, extent.longest) == (3, 100)


@pytest.mark.parametrize(
    ("lines", "wrong"),
    [
        (['{"at": 0, "prompt_tokens": 1}'], "line 1: output_tokens: missing"),
        (
            ['{"at": 0, "prompt_tokens": 0, "output_tokens": 1}'],
            "line 1: prompt_tokens: must be from 1 to 16777216, got 0",
        ),
        (["{" + f'"at": {"9" * 5000}' + "}"], "line 1: a number is too long"),
        (["{" + '"at": ' + "[" * 100_000], "line 1: nested too deeply"),
        (
            ["{" + f'"at": {"9" * 400}, "prompt_tokens": 1, "output_tokens": 1' + "}"],
            "line 1: at: must be seconds from 0 to 1000000000, got a number of 1329 bits",
        ),
        (
            [r'{"at": 0, "prompt_tokens": 1, "output_tokens": 1, "class": "\ud800"}'],
            "line 1: class: is no Unicode text",
        ),
        (
            ['{"at": 0, "prompt_tokens": 1.5, "output_tokens": 1}'],
            "line 1: prompt_tokens: must be from 1 to 16777216, got 1.5",
        ),
        (
            ['{"at": 0, "prompt_tokens": true, "output_tokens": 1}'],
            "line 1: prompt_tokens: must be from 1 to 16777216, got True",
        ),
        (
            ['{"at": -1, "prompt_tokens": 1, "output_tokens": 1}'],
            "line 1: at: must be seconds from 0 to 1000000000, got -1",
        ),
        (
            ['{"at": "soon", "prompt_tokens": 1, "output_tokens": 1}'],
            "line 1: at: must be seconds from 0 to 1000000000, got 'soon'",
        ),
        (
            [
                '{"at": 2, "prompt_tokens": 1, "output_tokens": 1}',
                '{"at": 1, "prompt_tokens": 1, "output_tokens": 1}',
            ],
            "line 2: at: must not be before the line above (2.0 s), got 1.0",
        ),
        (
            ['{"at": 0, "prompt_tokens": 1, "output_tokens": 9, "max_tokens": 8}'],
            "line 1: max_tokens: must be at least output_tokens, 9",
        ),
        (
            ['{"at": 0, "prompt_tokens": 1, "output_tokens": 1, "tenant": 3}'],
            "line 1: tenant: must be a text, got 3",
        ),
        (
            ['{"at": 0, "prompt_tokens": 1, "output_tokens": 1, "user": "x"}'],
            "line 1: user: no such field (known: at, prompt_tokens",
        ),
        (['{"at": 0, "prompt_tokens": 1,'], "line 1: not JSON: "),
        (['{"at": 0, "prompt_tokens": 1, "output_tokens": 1}', "[]"], "line 2: must be an object"),
        (["at,prompt_tokens,output_tokens", "0,1,x"], "line 2: output_tokens: must be from 1"),
        (["at,prompt_tokens,output_tokens", "0,1,2,3"], "line 2: more values than the header has"),
        (["at,prompt_tokens", "0,1"], "line 2: output_tokens: missing"),
        (
            ["at,prompt_tokens,output_tokens,tenant", f"0,1,1,{'x' * 200_000}"],
            "line 2: field larger than field limit",
        ),
        (
            ["at,prompt_tokens,output_tokens", f"0,{'9' * 5000},1"],
            f"line 2: prompt_tokens: must be from 1 to 16777216, got '{'9' * 79}…",
        ),
        (
            ['{"at": 0, "prompt_tokens": [[1]], "output_tokens": 1}'],
            "line 1: prompt_tokens: must be from 1 to 16777216, got a list",
        ),
    ],
)
def test_a_wrong_line_is_named_with_its_field(tmp_path: Path, lines: list[str], wrong: str) -> None:
    path = tmp_path / "trace"
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(InputError) as error:
        check_trace(path)
    assert error.value.message.startswith(f"{path}, {wrong}")


@pytest.mark.parametrize("text", ["", "at,prompt_tokens,output_tokens\n"])
def test_an_empty_trace_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "trace"
    path.write_text(text)
    with pytest.raises(InputError, match="holds no request"):
        check_trace(path)


def test_a_trace_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"nowhere: No such file"):
        check_trace(tmp_path / "nowhere")
    path = tmp_path / "binary"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="binary: not UTF-8 text"):
        check_trace(path)
