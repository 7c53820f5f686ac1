"""`oelm prepare` on a large corpus: throughput against single-thread tiktoken, memory, and equal tokens.

    OELM_SHARED=../shared python bench/prepare_throughput.py --gb 1

Repeats real documents, each with a running number so that none is a duplicate, until the corpus has the
wanted size; prepares it with GPT-2 BPE while sampling the resident memory of all processes; then encodes
the same documents in a plain single-threaded loop, in slices before and after, and compares the tokens.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil


def real_documents(root: Path) -> list[str]:
    stories = (root / "data/tinystories/train.txt").read_text().split("<|endoftext|>")
    pages = [json.loads(line)["text"] for line in (root / "data/openwebtext/docs.jsonl").open()]
    articles = (root / "data/wikitext2/train.txt").read_text().split("\n \n")
    return [text.strip() for text in (*stories, *pages, *articles) if text.strip()]


def corpus(root: Path, size: int) -> Iterator[str]:
    documents, written, number = real_documents(root), 0, 0
    while written < size:
        text = f"{documents[number % len(documents)]}\n{number}"
        yield text
        written += len(text.encode())
        number += 1


def sample_memory(pid: int, seen: list[int], done: threading.Event) -> None:
    """Sum of resident memory over a process and its children, ten times a second."""
    while not done.wait(0.1):
        try:
            tree = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
            seen.append(sum(process.memory_info().rss for process in tree))
        except psutil.Error:
            continue


def plain_rate(texts: list[str]) -> float:
    """Bytes per second of single-thread tiktoken."""
    import tiktoken

    encoding = tiktoken.get_encoding("gpt2")
    begin = time.perf_counter()
    for text in texts:
        encoding.encode_ordinary(text)
    return sum(len(text.encode()) for text in texts) / (time.perf_counter() - begin)


def check_tokens(texts: Iterator[str], out: Path) -> bool:
    """A plain loop over the documents, against the train file."""
    import tiktoken

    encoding = tiktoken.get_encoding("gpt2")
    tokens, at = np.memmap(out / "train.bin", dtype=np.uint16, mode="r"), 0
    for text in texts:
        ids = [*encoding.encode_ordinary(text), encoding.eot_token]
        if tokens[at : at + len(ids)].tolist() != ids:
            return False
        at += len(ids)
    return at == len(tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=1.0)
    options = parser.parse_args()
    root, size = Path(os.environ["OELM_SHARED"]), int(options.gb * 1e9)
    os.environ.setdefault("TIKTOKEN_CACHE_DIR", str(root / "tiktoken_cache"))
    with tempfile.TemporaryDirectory() as folder:
        source, out = Path(folder, "train.txt"), Path(folder, "out")
        with open(source, "w", encoding="utf-8") as file:
            for text in corpus(root, size):
                file.write(text + "\n<|endoftext|>\n")
        for split in ("valid", "test"):
            Path(folder, f"{split}.txt").write_text(f"a {split} document\n")
        documents = real_documents(root)
        rates = [plain_rate(documents)]
        files = [str(Path(folder, f"{name}.txt")) for name in ("train", "valid", "test")]
        command = [
            sys.executable,
            "-m",
            "oelm",
            "prepare",
            "big",
            "--from",
            *files,
            "--tokenizer",
            "gpt2",
            "--out",
            out,
        ]
        memory: list[int] = []
        done = threading.Event()
        begin = time.perf_counter()
        process = subprocess.Popen([str(word) for word in command])
        threading.Thread(target=sample_memory, args=(process.pid, memory, done), daemon=True).start()
        if process.wait():
            sys.exit("oelm prepare failed")
        seconds = time.perf_counter() - begin
        done.set()
        rates.append(plain_rate(documents))
        equal = check_tokens(corpus(root, size), out)
    cores, single = os.cpu_count() or 1, sum(rates) / len(rates)
    rate = size / seconds
    print(
        f"{size / 1e9:.2f} GB in {seconds:.1f} s = {rate / 1e6:.1f} MB/s | single-thread tiktoken "
        f"{rates[0] / 1e6:.1f} before, {rates[1] / 1e6:.1f} after | {rate / (cores * single):.2f} x {cores} cores | "
        f"peak memory {max(memory) / 1e9:.2f} GB | tokens {'equal' if equal else 'DIFFER'}"
    )


if __name__ == "__main__":
    main()
