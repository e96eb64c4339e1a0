"""HTML becomes the text that a reader sees, whatever is wrong with it."""

from __future__ import annotations

import pytest

from phalanx.data.prepare.read.html_text import html_to_text


@pytest.mark.parametrize(
    ("html", "text"),
    [
        ("<h1>A</h1><p>b <i>c</i>\nd</p><p>e</p>", "A\n\nb c d\n\ne"),
        ("<head><title>t</title></head><body>x<br>y</body>", "x\ny"),
        ("<head><title>never closed<body>x", "x"),
        ("a<script>if (1 < 2) { b() }</script> c", "a c"),
        ("<nav><ul><li>menu</nav>text<footer>f</footer>", "text"),
        ("&lt;b&gt; &amp; &eacute; &#8364;", "<b> & é €"),
        ("<ul><li>one<li>two</ul>", "one\ntwo"),
        ("<p>a<p><p>b", "a\n\nb"),
        ("</div></script>x<", "x<"),
        ("", ""),
    ],
)
def test_visible_text(html: str, text: str) -> None:
    assert html_to_text(html) == text
