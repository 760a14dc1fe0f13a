"""data/tokenizer.py: tokenizer.json, and which merges are refused, against a naive BPE."""

import json
import random

import pytest
from test_load_weights import (
    CHARACTER,
    EOT,
    MERGES,
    TEXTS,
    make_checkpoint,
    naive_bpe,
    write_tokenizer,
    write_tokenizer_json,
)

from data.tokenizer import load_tokenizer
from load_weights import load_gpt2


def refusal(directory):
    with pytest.raises(ValueError) as caught:
        load_tokenizer(directory)
    assert "\n" not in str(caught.value)
    return str(caught.value).replace(str(directory), "")


@pytest.mark.parametrize("pairs", [False, True])
def test_tokenizer_json_gives_the_ids_of_a_naive_bpe(tmp_path, pairs):
    vocab = write_tokenizer_json(tmp_path, pairs=pairs)
    tokenizer = load_tokenizer(tmp_path)
    for words in TEXTS:
        expected = [vocab[token] for word in words for token in naive_bpe(word, MERGES)]
        assert tokenizer.encode_ordinary("".join(words)) == expected
    assert tokenizer.eot_token == vocab[EOT] and tokenizer.n_vocab == len(vocab) + 1
    assert tokenizer.decode([len(vocab), vocab["a"]]) == "<|user|>a"
    assert tokenizer.encode("<|user|>", allowed_special="all") == [len(vocab)]


@pytest.mark.parametrize("pairs", [False, True])
def test_tokenizers_makes_the_same_ids_of_tokenizer_json(tmp_path, pairs):
    tokenizers = pytest.importorskip("tokenizers")
    write_tokenizer_json(tmp_path, pairs=pairs)
    theirs = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for words in TEXTS:
        ids = load_tokenizer(tmp_path).encode_ordinary("".join(words))
        assert ids == theirs.encode("".join(words)).ids


def test_a_model_that_transformers_saved_loads_with_the_same_ids(tmp_path):
    transformers = pytest.importorskip("transformers")
    make_checkpoint(tmp_path / "a", vocab_size=512)
    theirs = transformers.GPT2TokenizerFast.from_pretrained(tmp_path / "a")
    theirs.add_tokens(["<|user|>"])
    theirs.save_pretrained(tmp_path / "b")
    transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "a").save_pretrained(tmp_path / "b")
    gpt2, ours = load_gpt2(tmp_path / "b")
    assert gpt2.config.vocab_size == len(theirs) == ours.n_vocab
    for words in TEXTS:
        assert ours.encode_ordinary("".join(words)) == theirs("".join(words)).input_ids


def change(part, name, value):
    def edit(file):
        file[part] = {**(file[part] or {}), name: value}
    return edit


@pytest.mark.parametrize("part, name, value", [
    ("model", "type", "WordPiece"), ("model", "type", "Unigram"), ("model", "dropout", 0.1),
    ("model", "continuing_subword_prefix", "##"), ("model", "end_of_word_suffix", "</w>"),
    ("normalizer", "type", "NFC"), ("pre_tokenizer", "type", "Whitespace"),
    ("pre_tokenizer", "type", "Sequence"), ("pre_tokenizer", "add_prefix_space", True),
    ("pre_tokenizer", "use_regex", False), ("post_processor", "type", "BertProcessing"),
    ("post_processor", "special_tokens", {EOT: {"id": EOT}}), ("decoder", "type", "WordPiece")])
def test_refuses_by_its_name_what_gpt2s_tokenizer_does_not_do(tmp_path, part, name, value):
    write_tokenizer_json(tmp_path, edit=change(part, name, value))
    message = refusal(tmp_path)
    assert f"{part}.{name}" in message and str(value) in message


def test_refuses_a_prefix_space_that_the_settings_ask_for(tmp_path):
    write_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"add_prefix_space": false}')
    load_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"add_prefix_space": true}')
    assert "add_prefix_space" in refusal(tmp_path)


@pytest.mark.parametrize("edit", [
    change("model", "vocab", None), change("model", "vocab", [["a", 1]]),
    change("model", "merges", None), change("model", "merges", [1]),
    change("model", "merges", [["a", 1]]), change("model", "merges", [["a", "b", "c"]]),
    change("model", "merges", ["ab"]), lambda file: file.pop("model"),
    lambda file: file.update(added_tokens=[{"content": "x"}]),
    lambda file: file.update(added_tokens=[{"content": 1, "id": 999}]),
    lambda file: file.update(added_tokens=[{"content": EOT, "id": 3}]),
    lambda file: file.update(added_tokens=[{"content": "<|user|>", "id": 9999}]),
    lambda file: file.update(model=3), lambda file: file["model"]["merges"].pop()])
def test_refuses_a_damaged_tokenizer_json(tmp_path, edit):
    write_tokenizer_json(tmp_path, edit=edit)
    assert "tokenizer.json" in refusal(tmp_path)


def test_added_tokens_stand_beside_the_two_files(tmp_path):
    vocab = write_tokenizer(tmp_path)
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<|user|>": len(vocab)}))
    assert load_tokenizer(tmp_path).decode([len(vocab)]) == "<|user|>"


@pytest.mark.parametrize("gap", [0, 5, 300])
def test_refuses_ids_with_a_gap(tmp_path, gap):
    vocab = write_tokenizer(tmp_path)
    vocab = {token: i + (i >= gap) for token, i in vocab.items()}
    (tmp_path / "vocab.json").write_text(json.dumps(vocab), encoding="utf-8")
    assert "vocab.json" in refusal(tmp_path)


def test_merges_are_refused_exactly_where_a_naive_bpe_does_not_make_each_token(tmp_path):
    """Or where a part is made after the whole: of (bb, b), (b, b), GPT-2 makes "bbbb" bb, bb, for
    it merges all occurrences of a pair at once; tiktoken goes on with the first."""
    dice, verdicts = random.Random(0), []
    for _ in range(300):
        tokens, merges = list("ab"), []
        for _ in range(dice.randrange(1, 7)):
            pair = dice.choice(tokens), dice.choice(tokens)
            if "".join(pair) not in tokens:
                merges.append(pair)
                tokens.append("".join(pair))
        if dice.random() < 0.2:
            dice.shuffle(merges)
        write_tokenizer(tmp_path, merges)
        good = all(naive_bpe(a + b, merges) == [a + b] for a, b in merges)
        for i, pair in enumerate(merges):
            good = good and {*pair} <= {"a", "b", *map("".join, merges[:i])}
        verdicts.append(good)
        if not good:
            assert "tiktoken" in refusal(tmp_path), merges
            continue
        tokenizer = load_tokenizer(tmp_path)            # and then it gives GPT-2's ids of any word
        for _ in range(20):
            word = "".join(dice.choices("ab", k=dice.randrange(1, 12)))
            ids = tokenizer.encode_ordinary(word)
            assert [tokenizer.decode([i]) for i in ids] == naive_bpe(word, merges), merges
    assert 50 < sum(verdicts) < 250 and set(CHARACTER) == set(range(256))
