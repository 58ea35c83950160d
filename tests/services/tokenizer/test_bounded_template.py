import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from jinja2.exceptions import TemplateError, TemplateSyntaxError

from services.tokenizer.bounded_template import (
    MAX_RENDERED,
    BoundedTemplate,
    TemplateTooLarge,
    TemplateTooSlow,
)

FOREVER = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


def test_ordinary_templates_render() -> None:
    source = (
        "{%- for m in messages %}{{ bos ~ m.role + ': ' + m['content'] | trim }}\n{% endfor %}"
        "{{ '%s-%03d' % ('a', 7) }}{{ 'ab' * 3 }}{{ 2 ** 10 }}{{ {'a': [1]} | tojson(indent=2) }}"
        "{{ 'x'.center(5) }}{{ '{:>4}'.format(1) }}{{ 'aa'.replace('a', 'b') }}{{ 7 % 4 }}"
        "{{ 'aa' | replace('a', 'c') }}"
    )
    text = BoundedTemplate(source).render(
        {"messages": [{"role": "user", "content": " hi "}], "bos": "<s>"}
    )
    assert text == ('<s>user: hi\na-007ababab1024{\n  "a": [\n    1\n  ]\n}  x     1bb3cc')


def test_a_template_that_runs_for_ever_is_ended_and_the_next_one_renders() -> None:
    forever, short = BoundedTemplate(FOREVER, seconds=0.1), BoundedTemplate("{{ 1 + 1 }}")
    for _ in range(3):
        with pytest.raises(TemplateTooSlow):
            forever.render({})
        assert short.render({}) == "2"


def test_threads_of_a_pool_survive_it() -> None:
    forever, short = BoundedTemplate(FOREVER, seconds=0.05), BoundedTemplate("ok")
    with ThreadPoolExecutor(1) as pool:
        before = pool.submit(threading.get_ident).result()
        with pytest.raises(TemplateTooSlow):
            pool.submit(forever.render, {}).result()
        assert pool.submit(short.render, {}).result() == "ok"
        assert pool.submit(threading.get_ident).result() == before


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'x' * 10**10 }}",
        "{{ 10**10 * 'x' }}",
        "{{ [1] * 10**10 }}",
        "{{ 10 ** 99999 }}",
        "{{ '%999999999s' % 'x' }}",
        "{{ '%*d' % (999999999, 1) }}",
        "{{ '{:>999999999}'.format(1) }}",
        "{{ '{:>{}}'.format(1, 999999999) }}",
        "{{ 'x' | center(10**9) }}",
        "{{ 'x'.ljust(10**9) }}",
        "{{ [1] | batch(10**9, 0) | list }}",
        "{{ [[1]] | tojson(indent=10**9) }}",
        "{{ ('a' * 10**6).replace('a', 'b' * 10**6) }}",
        "{{ ('a' * 10**6) | replace('a', 'b' * 10**6) }}",
        "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}"
        "{% endfor %}",
        "{% set big = 'a' * 10**6 %}{% for i in range(1000) %}{{ big }}{% endfor %}",
    ],
)
def test_what_would_fill_the_memory(source) -> None:
    with pytest.raises(TemplateTooLarge, match=f"more than {MAX_RENDERED} characters"):
        BoundedTemplate(source).render({})


@pytest.mark.parametrize("source", ["{% for i in range(10**9) %}x{% endfor %}", "{{ lipsum() }}"])
def test_what_the_sandbox_does_not_have(source) -> None:
    with pytest.raises((OverflowError, TemplateError)):
        BoundedTemplate(source).render({})


def test_no_template() -> None:
    with pytest.raises(TemplateSyntaxError):
        BoundedTemplate("{% for")
