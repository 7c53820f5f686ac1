"""Verbs about one model: prepare, train, inspect, generate."""

import argparse
import json
import os
import sys
from pathlib import Path

from oelm.cli.parser import Parser, add_config_flags, config_of, given_settings
from oelm.errors import RunFailed, Stopped, UserError


def prepare_verb(parser: Parser) -> None:
    """Turn text, or labelled sentences, into token files: data/NAME/{train,val,test}.bin.

    oelm prepare python-stdlib
    oelm prepare tinystories                                  (from the Hugging Face hub)
    oelm prepare tinystories --from TinyStories/ --tokenizer gpt2
    oelm prepare mine --from a.txt b.jsonl --tokenizer bpe:1024 --out data/mine-1k
    oelm prepare xnli --tokenizer bert-base-uncased           (from the hub)
    oelm prepare nli --train mnli.jsonl --test xnli.tsv --labels entailment,neutral,contradiction --tokenizer ENCODER/

    Files whose name has valid, val, dev or test in it are used as those splits; splits without a file
    are drawn from the training documents. No document ends up in two splits.
    """
    known = "tinystories, openwebtext, wikitext103, wikitext2, python-stdlib; with labels: xnli, mnli, sst2, imdb, "
    known += "ag_news; or your own name with --from, --train …"
    held_out = "share to draw for each split without a file (default: 0.5 to 5 %%, about 4 MiB; of labelled rows 10 %%)"
    formats = "local files or folders: text, WikiText, JSONL, Parquet"
    parser.add_argument("name", metavar="NAME", help=known)
    parser.add_argument("--from", dest="sources", nargs="+", type=Path, default=[], metavar="PATH", help=formats)
    for split in ("train", "val", "test"):
        parser.add_argument(f"--{split}", nargs="+", type=Path, default=[], metavar="PATH", help=f"{split} files")
    tokenizers = "default gpt2; bpe:1024 for python-stdlib; an encoder's folder or name for its own"
    parser.add_argument("--tokenizer", metavar="gpt2|bpe:N|bytes|ENCODER", help=tokenizers)
    parser.add_argument("--labelled", action="store_true", help="rows of texts and labels: JSONL, CSV, TSV, Parquet")
    parser.add_argument("--labels", default="", metavar="A,B,…", help="classes in the order of their numbers")
    parser.add_argument("--columns", default="", metavar="TEXT[,TEXT],LABEL", help="of labelled rows")
    parser.add_argument("--out", type=Path, metavar="DIR", help="default data/NAME (or $OELM_DATA/NAME)")
    parser.add_argument("--workers", type=int, default=0, metavar="N", help="processes; default: one per core")
    parser.add_argument("--held_out", type=float, metavar="SHARE", help=held_out)
    parser.add_argument("--force", action="store_true", help="replace token files of another tokenizer")
    parser.add_argument("--json", action="store_true", help="print meta.json instead of a table")
    parser.set_defaults(run=_prepare)


def _prepare(options: argparse.Namespace) -> None:
    from oelm.data.examples import Labelling
    from oelm.data.prepare import prepare
    from oelm.data.progress import progress_bar, show_meta

    labels, columns = (tuple(filter(None, text.split(","))) for text in (options.labels, options.columns))
    labelling = Labelling(labels, columns) if options.labelled or labels or columns else None
    placed = {split: getattr(options, split) for split in ("train", "val", "test")}
    with progress_bar(quiet=options.json) as progress:
        meta = prepare(
            options.name,
            options.sources,
            options.tokenizer,
            options.out,
            options.workers,
            options.force,
            options.held_out,
            progress,
            labelling,
            placed,
        )
    if options.json:
        print(json.dumps(meta, indent=2, ensure_ascii=False))
    else:
        show_meta(meta, options.out)


def train_verb(parser: Parser) -> None:
    """Train one arm into a run folder.

    oelm train --model_type baseline --dataset tinystories --max_lr 3e-4 --max_steps 100000 \\
               --out_dir outputs/GPT-01_baseline
    oelm train --preset pocket --model_type oelm_v2 --dataset python-stdlib
    oelm train settings.toml --seed 43
    oelm train --resume outputs/GPT-01_baseline
    torchrun --nproc_per_node=2 -m oelm train …

    Flags take dashes or underscores. Order: defaults < preset < arm < TOML file < flags.
    """
    parser.add_argument("config", nargs="?", type=Path, metavar="FILE.toml", help="settings, by the names of the flags")
    resume = "continue an unfinished run (RUN, or the one in --out_dir); auto: if there is one, else start"
    parser.add_argument("--resume", nargs="?", const="", metavar="RUN", help=resume)
    parser.usage = "oelm train [FILE.toml] [--resume [RUN]] [--SETTING VALUE ...]"
    add_config_flags(parser)
    parser.set_defaults(run=_train)


def _train(options: argparse.Namespace) -> int:
    from oelm.config import load_toml, resolve
    from oelm.train.folder import RunFolder, unfinished

    flags, resume = given_settings(options), options.resume is not None
    if options.resume and options.resume.endswith(".toml"):
        options.config = Path(options.resume)
    elif options.resume and options.resume != "auto":
        flags["out_dir"] = options.resume
        RunFolder(Path(options.resume)).config()
    file = load_toml(options.config) if options.config else {}
    folder = RunFolder(resolve(flags, file).folder)
    if resume and options.resume != "auto" and not folder.config_file.exists() and not folder.alive():
        raise UserError(f"{folder.path} holds no run to resume: leave --resume out to start one, or name its folder")
    held = folder.config_file.exists() and not folder.finished() and not folder.alive()
    if resume and folder.config_file.exists() and not options.config:
        file = {**load_toml(folder.config_file), "out_dir": str(folder.path)}
    alone = "RANK" not in os.environ and sys.stdin.isatty() and sys.stdout.isatty()
    if held and not resume and alone:
        print(unfinished(folder).partition(": add")[0])
        if not _yes("Continue it? [Y/n] "):
            print("left as it is")
            return 0
        resume = True

    from oelm.train.run import train

    try:
        other_data = any(flags.get(key, file.get(key)) != file.get(key) for key in ("dataset", "data_path"))
        vocab_is_set = "vocab_size" in flags or ("vocab_size" in file and not other_data)
        train(resolve(flags, file), resume, vocab_is_set)
    except Stopped as stop:
        return 128 + stop.number
    except RunFailed as error:
        print(f"oelm: the run failed: {error}", file=sys.stderr)
        return 1
    return 0


def _yes(question: str) -> bool:
    try:
        return input(question).strip().lower() in ("", "y", "yes")
    except EOFError:
        return False


def inspect_verb(parser: Parser) -> None:
    """Parameters, FLOPs, checkpoint size, memory, and the bound on what freezing can save.

    oelm inspect --model_type oelm_v2 --preset medium-512
    oelm inspect --model_type oelm_v2 --json
    oelm inspect --arms
    oelm inspect --policies
    """
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--arms", action="store_true", help="list the arms")
    parser.add_argument("--policies", action="store_true", help="how to write what is frozen, where and when")
    parser.add_argument("config", nargs="?", type=Path, metavar="FILE.toml|RUN", help="settings, or a run folder")
    add_config_flags(parser)
    parser.usage = "oelm inspect [FILE.toml|RUN] [--json] [--arms] [--policies] [--SETTING VALUE ...]"
    parser.set_defaults(run=_inspect)


def _inspect(options: argparse.Namespace) -> None:
    from oelm import policy
    from oelm.inspect import show_arms, show_cost

    if options.policies:
        print(policy.__doc__)
    elif options.arms:
        show_arms(options.json)
    else:
        show_cost(config_of(options), options.json)


def predict_verb(parser: Parser) -> None:
    """Classify with a run: one text or pair, or the rows of a file.

    oelm predict outputs/RUN --premise "A man sleeps." --hypothesis "A man is awake."
    oelm predict outputs/RUN --text "A fine film."
    oelm predict outputs/RUN --from pairs.jsonl > answers.jsonl
    """
    parser.add_argument("run_dir", type=Path, metavar="RUN", help="run folder")
    parser.add_argument("--premise", "--text", dest="first", metavar="TEXT", help="the text, or the first of two")
    parser.add_argument("--hypothesis", dest="second", metavar="TEXT", help="the second text")
    parser.add_argument("--from", dest="source", type=Path, metavar="FILE", help="rows: JSONL, CSV, TSV, Parquet")
    parser.add_argument("--columns", default="", metavar="TEXT[,TEXT]", help="columns of the file's texts")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--checkpoint", default="last", metavar="last|best|step-…", help="default last")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda", "mps"], default="auto")
    parser.set_defaults(run=_predict)


def _predict(options: argparse.Namespace) -> None:
    if (options.first is None) == (options.source is None) or (options.second and options.first is None):
        raise UserError("give --premise (and --hypothesis), or --text, or a file with --from")
    from oelm.data.examples import is_text

    texts = [text for text in (options.first, options.second) if text is not None]
    if not all(text.strip() for text in texts):
        raise UserError("the text is empty")
    if not all(is_text(text) for text in texts):
        raise UserError("the text is not in UTF-8")
    from oelm.predict import Classifier, predict_file

    classifier = Classifier(options.run_dir, options.checkpoint, options.device)
    if options.source:
        columns = [name for name in options.columns.split(",") if name]
        skips = predict_file(classifier, options.source, columns, sys.stdout)
        if skips.counts:
            print(f"left out: {skips}", file=sys.stderr)
        classifier.warn()
        return
    (answer,) = classifier.answer([texts])
    classifier.warn()
    if options.json:
        print(json.dumps(answer.as_json(), ensure_ascii=False))
        return
    print(answer.label)
    for name, share in sorted(answer.shares.items(), key=lambda item: -item[1]):
        print(f"  {share:6.1%}  {name}")


def generate_verb(parser: Parser) -> None:
    """Sample text from a run.

    oelm generate outputs/GPT-01_baseline --prompt "Once upon a time"
    oelm generate outputs/GPT-02_oelm_freeze --prompt "Lily" --temperature 0.8 --top_k 50 --seed 7
    """
    parser.add_argument("run_dir", type=Path, metavar="RUN", help="run folder")
    parser.add_argument("--prompt", default="", help="text to continue; empty: start a new document")
    parser.add_argument("--max_tokens", type=int, default=200, metavar="N", help="tokens to add (default 200)")
    parser.add_argument("--temperature", type=float, default=0.8, metavar="X", help="0: the likeliest (0.8)")
    parser.add_argument("--top_k", type=int, default=0, metavar="K", help="only the K likeliest tokens; 0: all")
    parser.add_argument("--top_p", type=float, default=1.0, metavar="P", help="only the nucleus of mass P (default 1)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sampling (default 0)")
    parser.add_argument("--checkpoint", default="last", metavar="last|best|step-…", help="default last")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda", "mps"], default="auto")
    parser.set_defaults(run=_generate)


def _generate(options: argparse.Namespace) -> None:
    if (
        not (options.temperature == 0 or 0.01 <= options.temperature < 1e6)
        or not 0 < options.top_p <= 1
        or options.top_k < 0
    ):
        raise UserError("temperature must be 0 or at least 0.01, top_p in (0, 1], top_k 0 or more")
    if not 0 < options.max_tokens <= 1_000_000 or not 0 <= options.seed < 2**63:
        raise UserError("max_tokens must be 1 to 1,000,000 and seed 0 or more")
    from oelm.train.folder import RunFolder

    RunFolder(options.run_dir).config()
    from oelm.generate import load_run, stream_text
    from oelm.model.gpt import GPT
    from oelm.model.sample import sample

    loaded = load_run(options.run_dir, options.checkpoint, options.device, lambda line: print(line, file=sys.stderr))
    model, tokenizer = loaded.model, loaded.tokenizer
    if not isinstance(model, GPT) or model.config.labels:
        raise UserError(f"{options.run_dir} is a classifier: ask it with oelm predict")
    prompt = [tokenizer.end_of_text, *tokenizer.encode(options.prompt)]
    ids = sample(model, prompt, options.max_tokens, options.temperature, options.top_k, options.top_p, options.seed)
    print(options.prompt, end="", flush=True)
    for text in stream_text(tokenizer, ids):
        print(text, end="", flush=True)
    print()
