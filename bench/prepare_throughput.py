"""`oelm prepare` on a large corpus: throughput against single-thread tiktoken, memory, and equal tokens.

    OELM_SHARED=../shared python bench/prepare_throughput.py --gb 1

Repeats real documents, each with a running number so that none is a duplicate, until the corpus has the
wanted size; prepares it with GPT-2 BPE, several times, with a plain single-threaded loop before and after
each, while sampling the resident memory of all processes; then compares the tokens with a plain loop's.
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
    """Sum of resident memory over a process and its children, twice a second: looking costs time too."""
    while not done.wait(0.5):
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


def prepare(files: list[str], out: Path) -> tuple[float, int]:
    """Seconds and peak resident bytes of one `oelm prepare`."""
    command = [sys.executable, "-m", "oelm", "prepare", "big", "--from", *files, "--tokenizer", "gpt2", "--json"]
    memory: list[int] = []
    done = threading.Event()
    begin = time.perf_counter()
    process = subprocess.Popen([*command, "--out", str(out)], stdout=subprocess.DEVNULL)
    threading.Thread(target=sample_memory, args=(process.pid, memory, done), daemon=True).start()
    if process.wait():
        sys.exit("oelm prepare failed")
    done.set()
    return time.perf_counter() - begin, max(memory)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    root, size = Path(os.environ["OELM_SHARED"]), int(options.gb * 1e9)
    os.environ.setdefault("TIKTOKEN_CACHE_DIR", str(root / "tiktoken_cache"))
    cores = os.cpu_count() or 1
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "out")
        files = [str(Path(folder, f"{name}.txt")) for name in ("train", "valid", "test")]
        with open(files[0], "w", encoding="utf-8") as file:
            for text in corpus(root, size):
                file.write(text + "\n<|endoftext|>\n")
        for path in files[1:]:
            Path(path).write_text(f"the only document of {Path(path).stem}\n")
        sample = list(corpus(root, 60_000_000))
        singles, ratios, peak = [plain_rate(sample)], [], 0
        for _ in range(options.rounds):
            seconds, memory = prepare(files, out)
            singles.append(plain_rate(sample))
            ratios.append(size / seconds / (cores * (singles[-2] + singles[-1]) / 2))
            peak = max(peak, memory)
            print(f"{size / seconds / 1e6:.1f} MB/s, single thread {singles[-1] / 1e6:.1f}: {ratios[-1]:.2f} x {cores}")
        equal = check_tokens(corpus(root, size), out)
    print(
        f"{size / 1e9:.2f} GB, {options.rounds} rounds: {np.median(ratios):.2f} x {cores} cores x single-thread "
        f"tiktoken ({min(ratios):.2f} to {max(ratios):.2f}) | peak memory {peak / 1e9:.2f} GB | "
        f"tokens {'equal' if equal else 'DIFFER'}"
    )


if __name__ == "__main__":
    main()
