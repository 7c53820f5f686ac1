import json

import typst

from oelm.report.blocks import Code, Document, Heading, Items, Notice, Table, Text
from oelm.report.typst import source
from tests.lab.made_runs import make_run
from tests.report.hostile import payloads


def test_a_chinese_pdf_without_a_font_says_how_to_get_one(oelm, monkeypatch, tmp_path):
    class Bare:
        def families(self):
            return ["Libertinus Serif"]

    monkeypatch.setattr(typst, "Fonts", Bare)
    make_run(tmp_path, "a", "baseline", 1)
    result = oelm("report", tmp_path, "--lang", "zh", "--format", "html,pdf")
    assert result.code == 2
    assert "apt install fonts-noto-cjk" in result.err
    assert (tmp_path / "report-zh.html").exists()
    assert f"written: {tmp_path / 'report-zh.html'}" in result.err


def test_typst_shows_markup_as_text(tmp_path):
    strings = payloads("http://x")
    blocks = [Text(strings[1]), Notice(strings[2]), Items(strings), Code("\n".join(strings))]
    blocks += [Table(["a"], [[s] for s in strings]), *(Heading(s) for s in strings)]
    document = Document("t", "s", "en", "PASS", "c", blocks)
    main = tmp_path / "a.typ"
    main.write_text(source(document, ["Libertinus Serif"]))
    shown = json.loads(typst.query(str(main), "heading", field="body"))
    assert [heading["text"] for heading in shown[1:]] == [s.replace("\u202e", "\ufffd") for s in strings]
