import base64
import hashlib
import re

from toolkit.reports.document import page, table


def test_a_browser_may_run_the_pages_own_script_alone():
    text = page("t", "")
    script = re.search("<script>(.*)</script>", text, re.DOTALL)[1]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'" in text


def test_a_table_escapes_its_cells_and_marks_figures():
    found = table(("a", "<b>"), [("x & y", 1), ("<i>", 0.5)], numbers={1})
    assert found == (
        '<div class="wide"><table><thead><tr><th>a</th><th class="n">&lt;b&gt;</th></tr></thead>'
        '<tbody><tr><td>x &amp; y</td><td class="n">1</td></tr>'
        '<tr><td>&lt;i&gt;</td><td class="n" data-v="0.5">0.500</td></tr></tbody></table></div>'
    )
    assert "<th><button>a</button></th>" in table(("a",), [], numbers=(), sortable=True)
