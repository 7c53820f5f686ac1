"""Strings that users write are shown as text: nothing of them runs, nothing is loaded."""

import http.server
import shutil
import subprocess
import threading
from collections import Counter
from html.parser import HTMLParser

import pytest

from oelm.report.build import write_report
from tests.lab.made_runs import DATA, make_run
from tests.report.hostile import payloads


def hostile_study(root, url):
    """Payloads as run name, data set (four to one: each has its figures), tokenizer, reason, machine, sample text."""
    strings = payloads(url)
    for i, payload in enumerate(strings):
        name = f"{i:02d}{payload.replace('/', '∕')}"[:120]
        first, seed = i - i % 4, 1 + i % 4
        dataset = " ".join(strings[first : first + 4])
        data = {**DATA, "tokenizer": strings[first]} if i % 8 < 4 else DATA
        for arm in ("baseline", "oelm_v2"):
            folder = make_run(
                root, f"{name}{arm}", arm, seed, dataset=dataset, data=data, machine={"device_name": payload}
            )
            sample = str({"prompt": list(payload.encode()), "sample": list(payload.encode())}).replace("'", '"')
            (folder / "sample.json").write_text(sample)
        make_run(root, f"{name}failed", "oelm_random", seed, dataset=dataset, data=data, state="failed", reason=payload)
    return root


class Elements(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.attributes, self.text = Counter(), set(), ""

    def handle_starttag(self, tag, attrs):
        self.tags[tag] += 1
        self.attributes |= {name for name, _ in attrs}

    def handle_data(self, data):
        self.text += data


def elements(path):
    parser = Elements()
    parser.feed(path.read_text())
    return parser


@pytest.fixture(scope="module")
def hostile_page(tmp_path_factory):
    hits = []

    class Counting(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            hits.append(self.path)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *arguments):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Counting)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    root = hostile_study(tmp_path_factory.mktemp("hostile"), url)
    (page,) = write_report(root, "en", ["html"])
    yield page, url, hits
    server.shutdown()


def test_hostile_strings_add_no_element_and_no_attribute(hostile_page, tmp_path):
    page, url, _ = hostile_page
    make_run(tmp_path, "a")
    make_run(tmp_path, "b", "oelm_v2")
    make_run(tmp_path, "c", "oelm_random", state="failed", reason="x")
    make_run(tmp_path, "d", "baseline", dataset="other")
    make_run(tmp_path, "e", "oelm_v2", dataset="other")
    (plain,) = write_report(tmp_path, "en", ["html"])
    hostile, usual = elements(page), elements(plain)
    assert hostile.tags.keys() == usual.tags.keys()
    assert hostile.attributes == usual.attributes
    for payload in payloads(url):
        assert payload in hostile.text


def test_in_a_browser_no_script_runs_and_no_request_leaves(hostile_page, tmp_path):
    page, url, hits = hostile_page
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if not browser:
        pytest.skip("no Chromium here")

    def dom(path):
        command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=4000",
                   f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", path.as_uri()]  # fmt: skip
        return subprocess.run(command, capture_output=True, text=True, timeout=120).stdout

    found = dom(page)
    assert "</html>" in found
    assert "<body data-pwned" not in found
    assert 'data-pwned="1"' not in found
    assert hits == []
    naive = tmp_path / "naive.html"  # the same strings unescaped: the trap does catch
    naive.write_text("<body>" + payloads(url)[0] + payloads(url)[7] + "</body>")
    assert 'data-pwned="1"' in dom(naive)
    assert hits != []
