import numpy as np
import pytest

from oelm.data.tokenizer import ByteTokenizer, EncoderTokenizer, Template, load_tokenizer, train_bpe
from oelm.errors import UserError
from tests.conftest import make_documents

TEXTS = ["plain words", "  odd   spaces\n\n\ttabs", "正交初始化 🙂", "a<|endoftext|>b <|endoftext|>", ""]


@pytest.fixture(scope="module")
def bpe():
    return train_bpe(iter(make_documents()), 300)


@pytest.mark.parametrize("text", TEXTS)
def test_text_survives_encoding_and_decoding(bpe, text):
    for tokenizer in (ByteTokenizer(), bpe):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert tokenizer.end_of_text not in ids, "text never becomes the special token"
        assert all(0 <= i < tokenizer.vocab_size for i in ids)


def test_a_trained_vocabulary_has_the_size_asked_for_and_is_reproducible(bpe):
    assert (bpe.name, bpe.vocab_size) == ("bpe:300", 300)
    assert train_bpe(iter(make_documents()), 300).hash == bpe.hash
    assert train_bpe(iter(make_documents(seed=1)[:20]), 300).hash != bpe.hash


def test_too_little_text_for_the_vocabulary_is_said(bpe):
    with pytest.raises(UserError, match=r"only .* tokens"):
        train_bpe(iter(["ab"]), 5000)


def test_gpt2_is_the_published_vocabulary(shared, monkeypatch, tmp_path):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(shared / "tiktoken_cache"))
    tokenizer = load_tokenizer("gpt2", tmp_path)
    assert (tokenizer.vocab_size, tokenizer.end_of_text) == (50_257, 50_256)
    assert tokenizer.encode("Once upon a time") == [7454, 2402, 257, 640]
    assert tokenizer.decode(tokenizer.encode("<|endoftext|>")) == "<|endoftext|>"
    assert 50_256 not in tokenizer.encode("<|endoftext|>")


def test_gpt2_out_of_reach_is_one_line_with_the_way_out(monkeypatch, tmp_path):
    def unreachable(name):
        raise ConnectionError("no network")

    monkeypatch.setattr("tiktoken.get_encoding", unreachable)
    with pytest.raises(UserError, match="TIKTOKEN_CACHE_DIR"):
        load_tokenizer("gpt2", tmp_path)


def test_a_damaged_or_missing_vocabulary_is_named(tmp_path):
    with pytest.raises(UserError, match=r"tokenizer\.json was not found"):
        load_tokenizer("bpe:300", tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="is damaged"):
        load_tokenizer("bpe:300", tmp_path)


def test_a_pair_is_put_together_as_bert_expects_it():
    template = Template([2], [3], [3], pad=0, types=True)
    tokens, kinds = template.join([np.array([10, 11]), np.array([20])], 16)
    assert tokens.tolist() == [2, 10, 11, 3, 20, 3]
    assert kinds.tolist() == [0, 0, 0, 0, 1, 1]
    tokens, kinds = template.join([np.array([10, 11])], 16)
    assert tokens.tolist() == [2, 10, 11, 3]
    assert not kinds.any()


@pytest.mark.parametrize(
    ("sizes", "kept"), [((10_000, 3), (10, 3)), ((3, 10_000), (3, 10)), ((50, 50), (6, 7)), ((13, 0), (13, 0))]
)
def test_what_is_too_long_loses_its_end_the_longer_text_first(sizes, kept):
    template = Template([2], [3], [3], pad=0)
    first, second = np.arange(100, 100 + sizes[0]), np.arange(50_000, 50_000 + sizes[1])
    tokens, _ = template.join([first, second], 16)
    assert len(tokens) == 16
    assert (((tokens >= 100) & (tokens < 50_000)).sum(), (tokens >= 50_000).sum()) == kept
    assert tokens[[0, -1]].tolist() == [2, 3]


def test_the_template_is_read_off_the_tokenizer_itself():
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    vocabulary = {token: i for i, token in enumerate(["<s>", "<pad>", "</s>", "<unk>", "a", "b"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    template = EncoderTokenizer(tokenizer.to_str()).template()
    assert template == Template([0], [2, 2], [2], pad=1, types=False)
    ids, _ = template.join([np.array([4]), np.array([5])], 16)
    assert ids.tolist() == tokenizer.encode("a", "b").ids
