from __future__ import annotations

import pytest

from serve.page.markdown import inline, render


@pytest.mark.parametrize(
    ("text", "html"),
    [
        ("# a", "<h2>a</h2>"),
        ("### a", "<h4>a</h4>"),
        ("a\nb\n\nc", "<p>a b</p><p>c</p>"),
        ("- a\n- b", "<ul><li>a</li><li>b</li></ul>"),
        ("```\n# a\n  b\n```\nc", "<pre><code># a\n  b</code></pre><p>c</p>"),
        ("```\nnever closed", "<pre><code>never closed</code></pre>"),
        ("", ""),
    ],
)
def test_blocks(text: str, html: str) -> None:
    assert render(text) == html


def test_a_table_has_a_head_and_rows() -> None:
    html = render("| a | b |\n|---|:-:|\n| `1` | **2** |")
    assert '<th scope="col">a</th><th scope="col">b</th>' in html
    assert '<th scope="row"><code>1</code></th><td><strong>2</strong></td>' in html
    assert "---" not in html


@pytest.mark.parametrize(
    ("text", "html"),
    [
        ("**a** *b* `c`", "<strong>a</strong> <em>b</em> <code>c</code>"),
        ("2 * 3 * 4", "2 * 3 * 4"),
        ("[a](https://x.y/z)", '<a href="https://x.y/z" rel="noopener noreferrer">a</a>'),
        ("[a](javascript:alert(1))", "[a](javascript:alert(1))"),
        ("[a](//x.y)", "[a](//x.y)"),
        ('[a](https://x"onclick="y)', '<a href="https://x&quot;onclick=&quot;y" rel="noopener noreferrer">a</a>'),
        ("<b>`<i>`**<u>**", "&lt;b&gt;<code>&lt;i&gt;</code><strong>&lt;u&gt;</strong>"),
    ],
)
def test_what_is_no_mark_of_ours_stays_the_text_it_is(text: str, html: str) -> None:
    assert inline(text) == html
