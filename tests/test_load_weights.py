"""load_weights.py: what it reads, against a NumPy reference and a naive BPE; what it refuses."""

import http.server
import json
import math
import random
import re
import shutil
import threading
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from numpy_gpt2 import numpy_logits, random_weights
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

from data.files import save_tensors
from data.hub import find, read_metadata, read_tensors
from data.optimizers import optimizer_tensors, restore_optimizers
from data.tokenizer import load_tokenizer
from load_weights import fingerprint, load_gpt2
from model import GPT2, GPT2Config

FILES = ("config.json", "vocab.json", "merges.txt", "model.safetensors")

# ---- a tiny tokenizer ----

# texts for it, cut by hand into the words inside which GPT-2 merges
TEXTS = [["Hello", " world", ",", " hello", " World", "!", " worlds"],
         ["I", "'m", " sure", " it", "'s", " what", " they", "'ve", " said", ";"],
         [" we", "'ll", " don", "'t", " '", "S", "'d", "'re", "'", "M"],
         ["a", " ", " b", "   ", " cc", "\n  ", " cc", "\n\n", "\t", "d", "  "],
         ["x", "123", " 45", " v", "2", ".", "0", " (", "½", ")==", "3"],
         ["naïve", " café", " Ünï", " 日本語日本", "。", " 🙂🙂", "\u00a0", "é"]]
EOT = "<|endoftext|>"
HIDDEN = [b for b in range(256) if b == 32 or not chr(b).isprintable()]
# how the files spell it
CHARACTER = {b: chr(256 + HIDDEN.index(b)) if b in HIDDEN else chr(b) for b in range(256)}


def spell(text):
    return [CHARACTER[b] for b in text.encode()]


def merge(parts, pair):
    """parts, with each occurrence of the pair (from the left) made one part"""
    merged = []
    for part in parts:
        if merged and (merged[-1], part) == pair:
            merged[-1] += part
        else:
            merged.append(part)
    return merged


def train_merges():
    """The most frequent pair, again and again, in each two neighbouring words: so merges across
    words exist as well."""
    texts, merges = [spell(a + b) for words in TEXTS for a, b in pairwise(words)], []
    while pairs := Counter(pair for parts in texts for pair in pairwise(parts)):
        merges.append(min(pairs, key=lambda pair: (-pairs[pair], pair)))
        texts = [merge(parts, merges[-1]) for parts in texts]
    return merges


MERGES = train_merges()


def naive_bpe(word, merges):
    """A word -> its tokens: while a pair of neighbours is listed, merge the one listed first."""
    parts = spell(word)
    while listed := [pair for pair in merges if pair in pairwise(parts)]:
        parts = merge(parts, listed[0])
    return parts


def write_tokenizer(directory, merges=MERGES):
    tokens = [*sorted(CHARACTER.values()), *("".join(pair) for pair in merges), EOT]
    vocab = {token: i for i, token in enumerate(tokens)}
    (directory / "vocab.json").write_text(json.dumps(vocab), encoding="utf-8")
    (directory / "merges.txt").write_text("\n".join(["#version: 0.2", *map(" ".join, merges), ""]),
                                          encoding="utf-8")
    return vocab


def write_tokenizer_json(directory, merges=MERGES, pairs=True, edit=lambda file: None):
    """As transformers 5 writes it, in the place of the two files that write_tokenizer wrote."""
    vocab = write_tokenizer(directory, merges)
    for name in ("vocab.json", "merges.txt"):
        (directory / name).unlink()
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    flags = dict.fromkeys(["single_word", "lstrip", "rstrip", "normalized"], False)
    file = {"version": "1.0", "truncation": None, "padding": None,
            "added_tokens": [{"id": vocab[EOT], "content": EOT, "special": True} | flags,
                             {"id": len(vocab), "content": "<|user|>", "special": False} | flags],
            "normalizer": None, "pre_tokenizer": byte_level, "decoder": byte_level,
            "post_processor": {"type": "TemplateProcessing", "special_tokens": {},
                               "single": [{"Sequence": {"id": "A", "type_id": 0}}],
                               "pair": [{"Sequence": {"id": name, "type_id": 0}} for name in "AB"]},
            "model": {"type": "BPE", "dropout": None, "unk_token": None, "vocab": vocab,
                      "merges": [list(m) if pairs else " ".join(m) for m in merges]}}
    edit(file)
    (directory / "tokenizer.json").write_text(json.dumps(file), encoding="utf-8")
    return vocab


# ---- a tiny checkpoint ----

VOCAB = 256 + len(MERGES) + 1
SIZES = dict(vocab_size=VOCAB, n_positions=16, n_embd=8, n_layer=2, n_head=2)


def make_checkpoint(directory, edit=lambda tensors: tensors, shards=0, **changes):
    """Writes a model with random weights, run through `edit`, and SIZES with changes.

    Returns the tensors written.
    """
    config = SIZES | changes
    weights = random_weights(*map(config.get,
                                  ("vocab_size", "n_positions", "n_embd", "n_layer", "n_inner")))
    tensors = edit({name: torch.from_numpy(array) for name, array in weights.items()})
    directory.mkdir(parents=True, exist_ok=True)
    if shards:
        index = {name: f"model-{1 + i % shards}.safetensors" for i, name in enumerate(tensors)}
        for file in set(index.values()):
            save_file({name: tensor for name, tensor in tensors.items() if index[name] == file},
                      directory / file)
        (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    else:
        save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps({"model_type": "gpt2"} | config))
    write_tokenizer(directory)
    return tensors


def edit_config(directory, edit):
    path = directory / "config.json"
    path.write_text(json.dumps(edit(json.loads(path.read_text()))))


def assert_loads(directory, tensors, n_head=2, eps=1e-5):
    """What load_gpt2 makes of the directory computes what NumPy computes from the tensors."""
    gpt2, _ = load_gpt2(directory)
    assert all(p.dtype == torch.float32 and not p.requires_grad for p in gpt2.parameters())
    ids = [7, 0, 255, 12, 12, 91, 3, gpt2.config.vocab_size - 1]
    weights = {re.sub(r"^((_orig_mod|module|model|transformer)\.)*", "", name): t.double().numpy()
               for name, t in tensors.items()}
    weights.setdefault("wte.weight", weights.get("lm_head.weight"))
    expected = torch.tensor(numpy_logits(weights, ids, n_head, eps))
    torch.testing.assert_close(gpt2(torch.tensor([ids]))[0].double(), expected, atol=1e-4,
                               rtol=1e-4)


def prefixed(tensors):
    return {"transformer." + name: tensor for name, tensor in tensors.items()}


def with_masks(tensors):
    masks = {"h.0.attn.bias": torch.ones(1, 1, 16, 16).tril(),
             "h.0.attn.masked_bias": torch.tensor(-1e4),
             "h.1.attn.bias": torch.ones(16, 16, dtype=torch.bool),
             "h.1.attn.masked_bias": torch.tensor(-1e4)}
    return tensors | masks


def with_head(tensors):
    name = "transformer.wte.weight" if "transformer.wte.weight" in tensors else "wte.weight"
    return tensors | {"lm_head.weight": tensors[name].clone()}  # the head itself is never prefixed


def head_alone(tensors):
    tensors = with_head(tensors)
    return {name: tensor for name, tensor in tensors.items() if not name.endswith("wte.weight")}


def behind(prefix, edit=lambda tensors: tensors):
    return lambda tensors: {prefix + name: tensor for name, tensor in edit(tensors).items()}


def stored_as(dtype):
    return lambda tensors: {name: tensor.to(dtype) for name, tensor in tensors.items()}


# ---- what is read ----

LAYOUTS = dict(plain=lambda tensors: tensors, prefixed=prefixed, masks=with_masks, head=with_head,
               all=lambda tensors: with_head(prefixed(with_masks(tensors))),
               head_alone=lambda tensors: head_alone(prefixed(tensors)),
               compiled=behind("_orig_mod.", with_masks), parallel=behind("module.", with_head),
               both=behind("module._orig_mod.", prefixed), lightning=behind("model.", prefixed),
               both_and_a_head=behind("_orig_mod.module.", lambda t: with_head(prefixed(t))),
               float64=stored_as(torch.float64), float16=stored_as(torch.float16),
               bfloat16=stored_as(torch.bfloat16))


@pytest.mark.parametrize("shards", [0, 3])
@pytest.mark.parametrize("edit", LAYOUTS.values(), ids=LAYOUTS)
def test_every_layout_computes_what_numpy_computes(tmp_path, edit, shards):
    assert_loads(tmp_path, make_checkpoint(tmp_path, edit, shards))


@pytest.mark.parametrize("changes", [
    dict(n_positions=8), dict(n_inner=20), dict(n_inner=None), dict(n_layer=11),
    dict(n_embd=12, n_head=4), dict(layer_norm_epsilon=0.1)], ids=str)
def test_every_size_of_the_config_is_used(tmp_path, changes):
    tensors = make_checkpoint(tmp_path, **changes)
    assert_loads(tmp_path, tensors, changes.get("n_head", 2),
                 changes.get("layer_norm_epsilon", 1e-5))


def test_config_under_the_other_names_of_the_sizes(tmp_path):
    alias = dict(n_embd="hidden_size", n_head="num_attention_heads", n_layer="num_hidden_layers",
                 n_positions="max_position_embeddings")
    tensors = make_checkpoint(tmp_path)
    edit_config(tmp_path,
                lambda config: {alias.get(name, name): value for name, value in config.items()})
    assert_loads(tmp_path, tensors)


def test_settings_that_change_nothing_are_accepted(tmp_path):
    tensors = make_checkpoint(tmp_path, activation_function="gelu_new", scale_attn_weights=True,
                              attn_pdrop=0.1, tie_word_embeddings=True, pruned_heads={},
                              add_cross_attention=False, architectures=["X"])
    assert_loads(tmp_path, tensors)


def test_defaults_of_the_config_are_gpt2_small():
    assert GPT2Config() == GPT2Config(50257, 1024, 768, 12, 12, None, 1e-5)


# ---- what is refused ----

def refusal(directory):
    """The one line with which load_gpt2 refuses the directory (less its path, which holds the
    name of the test)."""
    with pytest.raises(ValueError) as caught:
        load_gpt2(directory)
    assert "\n" not in str(caught.value)
    return str(caught.value).replace(str(directory), "")


@pytest.mark.parametrize("name, value", [
    ("model_type", "llama"), ("activation_function", "gelu"), ("activation_function", "relu"),
    ("scale_attn_weights", False), ("scale_attn_by_inverse_layer_idx", True),
    ("add_cross_attention", True),
    ("tie_word_embeddings", False), ("pruned_heads", {"0": [1]}),
    ("quantization_config", {"bits": 8}),
    ("n_head", 3), ("n_embd", "8"), ("n_embd", 8.0), ("n_layer", None), ("n_layer", 0),
    ("n_head", True),
    ("n_head", -2), ("n_positions", [16]), ("vocab_size", {}), ("n_inner", "32"),
    ("layer_norm_epsilon", "1e-5"), ("layer_norm_epsilon", 0), ("layer_norm_epsilon", float("nan")),
    ("layer_norm_epsilon", float("inf")), ("n_positions", 10 ** 30)])
def test_refuses_a_setting_by_its_name(tmp_path, name, value):
    make_checkpoint(tmp_path)
    edit_config(tmp_path, lambda config: config | {name: value})
    assert name in refusal(tmp_path)


@pytest.mark.parametrize("name, value, tensor", [
    ("n_layer", 1, "h.1."), ("n_layer", 3, "h.2."), ("n_embd", 10, f"({VOCAB}, 8)"),
    ("n_positions", 17, "wpe.weight"),
    ("vocab_size", VOCAB + 1, "wte.weight"), ("n_inner", 30, "mlp.c_fc.weight")])
def test_refuses_a_config_that_does_not_fit_the_file(tmp_path, name, value, tensor):
    make_checkpoint(tmp_path)
    edit_config(tmp_path, lambda config: config | {name: value})
    assert tensor in refusal(tmp_path)


def replaced(name, change):
    return lambda tensors: tensors | {name: change(tensors[name]).contiguous()}


@pytest.mark.parametrize("edit, message", [
    (lambda tensors: with_head(tensors) | {"lm_head.weight": tensors["wte.weight"] * 1.01},
     "lm_head.weight"),
    (lambda tensors: with_head(tensors) | {"lm_head.weight": tensors["wte.weight"][:, :4].clone()},
     "lm_head.weight"),
    (lambda tensors: tensors | {"score.weight": torch.ones(2, 8)}, "score.weight"),
    (lambda tensors: tensors | {"h.0.crossattention.c_attn.bias": torch.ones(2)},
     "h.0.crossattention.c_attn.bias"),
    (lambda tensors: {name: t for name, t in tensors.items() if name != "h.1.mlp.c_proj.bias"},
     "h.1.mlp.c_proj.bias"),
    (lambda tensors: {name: t for name, t in tensors.items() if name != "wte.weight"},
     "wte.weight"),
    # not a Conv1D: (out, in)
    (replaced("h.1.attn.c_attn.weight", lambda t: t.t()), "1.attn.c_attn.weight"),
    (replaced("h.0.attn.c_attn.bias", lambda t: t[:-1]), "0.attn.c_attn.bias"),
    (replaced("ln_f.weight", lambda t: t[None]), "ln_f.weight"),
    (lambda tensors: {"module." + n if n != "ln_f.bias" else n: t for n, t in tensors.items()},
     "ln_f.bias"),
    (lambda tensors: behind("_orig_mod.")(tensors) | {"lm_head.weight": torch.ones(VOCAB, 8)},
     "_orig_mod."),
    (replaced("wpe.weight", lambda t: t.int()), "wpe.weight"),
    (replaced("h.1.ln_1.bias", lambda t: t.to(torch.float8_e4m3fn)), "h.1.ln_1.bias"),
    (replaced("h.0.attn.c_attn.weight", lambda t: t.to(torch.complex64)), "h.0.attn.c_attn.weight"),
    (replaced("h.0.mlp.c_fc.weight", lambda t: t.to(torch.int8)), "0.mlp.c_fc.weight")])
def test_refuses_tensors_by_their_name(tmp_path, edit, message):
    make_checkpoint(tmp_path, edit)
    assert message in refusal(tmp_path)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["wte.weight", "h.1.mlp.c_fc.weight", "ln_f.bias"])
def test_the_first_use_refuses_a_single_number_that_is_not_finite(tmp_path, name, value):
    def spoil(tensors):
        tensors[name].view(-1)[-1] = value
        return tensors

    make_checkpoint(tmp_path, spoil)
    gpt2 = load_gpt2(tmp_path)[0]
    for _ in range(2):                          # the first use is refused, and so is a second try
        with pytest.raises(ValueError, match=f"{name} is not finite"):
            gpt2.embed(torch.tensor([[0]]))


def test_a_float64_beyond_float32_is_not_finite_but_a_sum_beyond_it_is_no_fault(tmp_path):
    large = {"ln_f.bias": torch.full((8,), 1e300, dtype=torch.float64)}
    make_checkpoint(tmp_path, lambda tensors: tensors | large)
    with pytest.raises(ValueError, match="ln_f.bias is not finite"):
        load_gpt2(tmp_path)[0](torch.tensor([[0]]))
    make_checkpoint(tmp_path, lambda tensors: tensors | {"ln_f.bias": torch.full((8,), 3e38)})
    load_gpt2(tmp_path)[0](torch.tensor([[0]]))


@pytest.mark.parametrize("edit", [lambda tensors: tensors, with_head, head_alone])
def test_rows_beyond_the_tokenizer_are_cut_off(tmp_path, edit):
    def favour(tensors):                        # an id without a token wins, in every logit
        tensors["wte.weight"][VOCAB:] *= 100
        return edit(tensors)

    tensors = make_checkpoint(tmp_path, favour, vocab_size=512)
    gpt2, tokenizer = load_gpt2(tmp_path)
    assert gpt2.config.vocab_size == gpt2.wte.num_embeddings == tokenizer.n_vocab == VOCAB
    assert not gpt2.wte.weight.requires_grad
    ids = torch.arange(16)[None]
    weights = {name: tensor.double().numpy() for name, tensor in tensors.items()}
    weights.setdefault("wte.weight", weights.get("lm_head.weight"))
    padded = torch.tensor(numpy_logits(weights, ids[0].tolist(), 2, 1e-5))
    assert padded.argmax(dim=-1).max() >= VOCAB
    torch.testing.assert_close(gpt2(ids)[0].double(), padded[:, :VOCAB], atol=1e-4, rtol=1e-4)
    tokenizer.decode(gpt2(ids)[0].argmax(dim=-1).tolist())


def without(name):
    return lambda directory: (directory / name).unlink()


def rewritten(name, change):
    return lambda directory: (directory / name).write_bytes(change((directory / name).read_bytes()))


def header(file):
    return file[:8 + int.from_bytes(file[:8], "little")]


@pytest.mark.parametrize("spoil, words", [
    (rewritten("model.safetensors", lambda file: file[:-1]), ["model.safetensors", "truncated"]),
    (rewritten("model.safetensors", lambda file: file[:len(file) // 2]),
     ["model.safetensors", "truncated"]),
    (rewritten("model.safetensors", header), ["model.safetensors", "truncated"]),
    (rewritten("model.safetensors", lambda file: header(file)[:-9]),
     ["model.safetensors", "damaged"]),
    (rewritten("model.safetensors", lambda file: b""), ["model.safetensors", "damaged"]),
    (rewritten("model.safetensors", lambda file: b"<html>\nNot Found</html>\n" * 99),
     ["model.safetensors", "damaged"]),
    (rewritten("config.json", lambda file: file[:20]), ["config.json", "damaged"]),
    (rewritten("config.json", lambda file: b"[1,\n2]"), ["config.json", "damaged"]),
    (rewritten("config.json", lambda file: b"\xff\xfe"), ["config.json", "damaged"]),
    (rewritten("vocab.json", lambda file: file[:-1]), ["vocab.json", "damaged"]),
    (without("model.safetensors"), ["model.safetensors is missing"]),
    (lambda model: (model / "model.safetensors").rename(model / "pytorch_model.bin"),
     ["pickle", "safetensors"]),
    (lambda model: [(model / "model.safetensors").unlink(), (model / "model.safetensors").mkdir()],
     ["model.safetensors is a directory"]),
    (without("config.json"), ["config.json is missing"]),
    (without("vocab.json"), ["vocab.json is missing"]),
    (without("merges.txt"), ["merges.txt is missing"])])
def test_refuses_damaged_and_incomplete_directories(tmp_path, spoil, words):
    make_checkpoint(tmp_path)
    spoil(tmp_path)
    message = refusal(tmp_path)
    assert all(word in message for word in words)


def test_refuses_an_index_that_names_a_missing_shard(tmp_path):
    make_checkpoint(tmp_path, shards=2)
    (tmp_path / "model-2.safetensors").unlink()
    assert "model-2.safetensors" in refusal(tmp_path)


@pytest.mark.parametrize("index", [{}, {"weight_map": {}}, {"weight_map": ["model-1.safetensors"]}],
                         ids=str)
def test_refuses_a_damaged_index(tmp_path, index):
    make_checkpoint(tmp_path, shards=2)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "model.safetensors.index.json" in refusal(tmp_path)


def test_refuses_a_tokenizer_with_more_ids_than_the_model(tmp_path):
    make_checkpoint(tmp_path, vocab_size=VOCAB - 1)
    assert "vocab_size" in refusal(tmp_path)


def test_refuses_an_unknown_name_and_lists_the_known(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "gpt2-medium" in refusal("gpt3")


# ---- the tokenizer ----

@pytest.fixture
def tokenizer(tmp_path):
    make_checkpoint(tmp_path)
    return load_gpt2(tmp_path)[1]


@pytest.mark.parametrize("words",
                         [*TEXTS, sum(reversed(TEXTS), []), ["<|", "endoftext", "|>", " world"]])
def test_ids_equal_a_naive_bpe(tmp_path, tokenizer, words):
    vocab = json.loads((tmp_path / "vocab.json").read_text(encoding="utf-8"))
    expected = [vocab[token] for word in words for token in naive_bpe(word, MERGES)]
    assert tokenizer.encode_ordinary("".join(words)) == expected
    assert len(expected) < len("".join(words).encode())                     # something did merge


def test_every_token_stands_for_the_bytes_it_spells(tmp_path, tokenizer):
    vocab = json.loads((tmp_path / "vocab.json").read_text(encoding="utf-8"))
    byte = {character: b for b, character in CHARACTER.items()}
    for token, i in vocab.items():
        assert tokenizer.decode_single_token_bytes(i) == bytes(byte[character]
                                                               for character in token)
    for b in range(256):
        assert tokenizer.encode_single_token(bytes([b])) == vocab[CHARACTER[b]]


def test_texts_of_random_characters_survive_the_round_trip(tokenizer):
    dice = random.Random(0)
    for _ in range(200):
        text = "".join(chr(dice.choice([dice.randrange(128), dice.randrange(0xd800),
                                        dice.randrange(0xe000, 0x110000)]))
                       for _ in range(dice.randrange(1, 40)))
        assert tokenizer.decode_bytes(tokenizer.encode_ordinary(text)) == text.encode()


def test_end_of_text_is_ordinary_in_a_text(tmp_path, tokenizer):
    ids = tokenizer.encode_ordinary(f"a{EOT}b")
    vocab = json.loads((tmp_path / "vocab.json").read_text(encoding="utf-8"))
    assert tokenizer.eot_token == vocab[EOT]
    assert tokenizer.eot_token not in ids and tokenizer.decode(ids) == f"a{EOT}b"


def test_a_changed_merges_file_is_noticed(tmp_path):
    write_tokenizer(tmp_path)
    assert len(load_tokenizer(tmp_path).encode_ordinary("Hello world")) < 11
    write_tokenizer(tmp_path, [])
    assert len(load_tokenizer(tmp_path).encode_ordinary("Hello world")) == 11


def test_merges_cut_short_anywhere_are_refused(tmp_path):
    write_tokenizer(tmp_path)
    whole = (tmp_path / "merges.txt").read_bytes()
    for length in range(len(whole) - 1):  # the last byte is a line break, which may lack
        (tmp_path / "merges.txt").write_bytes(whole[:length])
        with pytest.raises(ValueError) as caught:
            load_tokenizer(tmp_path)
        assert "merges.txt" in str(caught.value) and "\n" not in str(caught.value), length


@pytest.mark.parametrize("change", [{"!": "0"}, {"!": 1}, {"!": -1}, {"!": None}, {EOT: 5},
                                    {EOT: "500"}, {EOT: 500}], ids=str)
def test_refuses_ids_that_are_none(tmp_path, change):
    vocab = write_tokenizer(tmp_path)
    (tmp_path / "vocab.json").write_text(json.dumps(vocab | change), encoding="utf-8")
    with pytest.raises(ValueError, match="vocab.json"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("merges", [[("\u2603", "a")],  # a snowman spells no byte
                                    [("a", "b"), ("c", "d"), ("a", "b")],  # the same merge again
                                    # tiktoken would make a, bc one
                                    [("b", "c"), ("a", "b"), ("ab", "c")]], ids=str)
def test_refuses_merges_that_tiktoken_cannot_follow(tmp_path, merges):
    write_tokenizer(tmp_path, merges)
    with pytest.raises(ValueError, match="merges.txt|vocab.json"):
        load_tokenizer(tmp_path)


def test_merges_may_come_close_to_end_of_text(tmp_path):
    # so "<|" and "endoftext|>" are tokens
    merges = [("<", "|"), *((EOT[2:i], EOT[i]) for i in range(3, len(EOT)))]
    vocab = write_tokenizer(tmp_path, merges)
    assert load_tokenizer(tmp_path).eot_token == vocab[EOT]


# ---- downloads and caches ----

def test_a_directory_of_the_repository_is_found_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find("tests").samefile(Path(__file__).parent)
    (tmp_path / "tests").mkdir()
    assert find("tests").samefile(tmp_path / "tests")           # but one that is here comes first


SNAPSHOT = "models--openai-community--gpt2/snapshots/607a30d7"


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """In the place of huggingface.co: serves `directory`, lists `requests`, fails as `faults`
    {name: how} say."""
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            server.requests.append(self.path)
            name = self.path.removeprefix(f"/{server.repository}/resolve/main/")
            fault = server.faults.get(name)
            if not (server.directory / name).is_file() or fault == "404":
                return self.send_error(404)
            file = (server.directory / name).read_bytes()
            body = file[:len(file) // 2] if fault and self.command == "GET" else file
            self.send_response(200)
            self.send_header("Content-Length", str(len(body if fault == "wrong size" else file)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, *_):
            pass

    for name in ("HF_HOME", "HF_HUB_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("no_proxy", "*")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.directory, server.requests, server.faults = tmp_path / "served", [], {}
    server.repository = "openai-community/gpt2"
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    threading.Thread(target=server.serve_forever, args=[0.01]).start()
    server.tensors = make_checkpoint(server.directory)
    yield server
    server.shutdown()
    server.server_close()


def test_a_name_is_downloaded_once(tmp_path, hub):
    assert_loads("gpt2", hub.tensors)
    assert {path.rpartition("/")[2] for path in hub.requests} == set(FILES)
    hub.requests.clear()
    assert_loads("gpt2", hub.tensors)
    assert not hub.requests
    assert sorted(path.name for path in (tmp_path / "home").rglob("*.*")
                  if path.is_file()) == sorted(FILES)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
@pytest.mark.parametrize("fault", ["cut", "wrong size", "404"])
def test_a_failed_download_leaves_nothing_and_is_made_up_for(tmp_path, hub, fault, name):
    hub.faults[name] = fault
    with pytest.raises((OSError, ValueError)) as caught:
        load_gpt2("gpt2")
    assert name in str(caught.value) and "\n" not in str(caught.value)
    assert not [path for path in (tmp_path / "home").rglob("*") if name in path.name
                or "part" in path.name]
    hub.faults.clear()
    assert_loads("gpt2", hub.tensors)


def test_an_unreachable_hub_is_one_line(hub, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises((OSError, ValueError)) as caught:
        load_gpt2("gpt2")
    assert "config.json" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("variable, inside",
                         [(None, "home/.cache/huggingface/hub"), ("HF_HUB_CACHE", "cache"),
                          ("HF_HOME", "cache/hub"), ("XDG_CACHE_HOME", "cache/huggingface/hub")])
@pytest.mark.parametrize("snapshot", [SNAPSHOT, SNAPSHOT.replace("openai-community--", "")])
def test_a_hugging_face_cache_is_used_without_a_request(tmp_path, hub, monkeypatch, variable,
                                                        inside, snapshot):
    shutil.copytree(hub.directory, tmp_path / inside / snapshot)
    if variable:
        monkeypatch.setenv(variable, str(tmp_path / "cache"))
    assert_loads("gpt2", hub.tensors)
    assert not hub.requests


def put_snapshot(cache, repository, commit, changes, main=False):
    """A model in a Hugging Face cache, told from another by the epsilon of its config."""
    folder = cache / f"models--{repository.replace('/', '--')}"
    tensors = make_checkpoint(folder / "snapshots" / commit, **changes)
    if main:
        (folder / "refs").mkdir()
        (folder / "refs" / "main").write_text(commit)
    return tensors


OLD, NEW = "gpt2", "openai-community/gpt2"


@pytest.mark.parametrize("model, stored, meant", [
    ("gpt2", [(NEW, "a", False), (NEW, "b", True), (NEW, "c", False)], 1),
    ("gpt2", [(OLD, "a", True), (NEW, "b", False), (NEW, "c", True)], 2),
    ("gpt2", [(NEW, "z", False), (OLD, "b", False), (OLD, "c", True)], 2),
    (NEW, [(NEW, "a", False), (NEW, "b", True)], 1),
    ("someone/their-gpt2", [("someone/their-gpt2", "b", True), (NEW, "a", True)], 0),
    ("someone/their-gpt2", [("someone/their-gpt2", "b", False)], 0)])
def test_refs_main_says_which_snapshot_is_meant(tmp_path, hub, monkeypatch, model, stored, meant):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    for i, (repository, commit, main) in enumerate(stored):
        put_snapshot(tmp_path / "cache", repository, commit, {"layer_norm_epsilon": 0.1 + i}, main)
    assert load_gpt2(model)[0].config.layer_norm_epsilon == 0.1 + meant
    assert not hub.requests


def test_an_older_snapshot_does_not_stand_in_for_main(tmp_path, hub, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    put_snapshot(tmp_path / "cache", NEW, "old", {"layer_norm_epsilon": 0.1})
    put_snapshot(tmp_path / "cache", NEW, "new", {"layer_norm_epsilon": 0.2}, main=True)
    (tmp_path / "cache/models--openai-community--gpt2/snapshots/new/merges.txt").unlink()
    assert_loads("gpt2", hub.tensors)
    assert hub.requests


@pytest.mark.parametrize("one_file", [False, True])
@pytest.mark.parametrize("shards", [0, 3])
def test_an_owners_name_is_downloaded_in_each_layout(tmp_path, hub, one_file, shards):
    hub.repository = "someone/their-gpt2"
    shutil.rmtree(hub.directory)
    tensors = make_checkpoint(hub.directory, shards=shards, vocab_size=VOCAB + one_file)
    if one_file:
        write_tokenizer_json(hub.directory)
    assert_loads("someone/their-gpt2", tensors)
    hub.requests.clear()
    assert_loads("someone/their-gpt2", tensors)
    assert not hub.requests


def test_a_repository_without_safetensors_names_the_file_that_lacks(hub):
    (hub.directory / "model.safetensors").unlink()
    with pytest.raises(OSError, match="resolve/main/model.safetensors: .*404"):
        load_gpt2("gpt2")


@pytest.mark.parametrize("name", ["data/mni", "a/b/c", "../there", "/no/where", "some one/x", ""])
def test_what_is_no_name_is_not_asked_for(hub, name):
    with pytest.raises(ValueError, match="no such model"):
        find(name or "a/")
    assert not hub.requests


@pytest.mark.parametrize("lacking", FILES)
def test_an_incomplete_snapshot_is_not_used(tmp_path, hub, monkeypatch, lacking):
    shutil.copytree(hub.directory, tmp_path / "cache" / SNAPSHOT)
    (tmp_path / "cache" / SNAPSHOT / lacking).unlink()
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    assert_loads("gpt2", hub.tensors)
    assert hub.requests


# ---- transformers, where it is installed ----

@pytest.mark.parametrize("changes", [{}, dict(n_inner=20, layer_norm_epsilon=0.1, n_head=4)],
                         ids=str)
def test_transformers_computes_the_same_from_our_checkpoint(tmp_path, changes):
    transformers = pytest.importorskip("transformers")
    make_checkpoint(tmp_path, **changes)
    theirs = transformers.GPT2LMHeadModel.from_pretrained(tmp_path).eval()
    ours = load_gpt2(tmp_path)[0]
    ids = torch.randint(VOCAB, (2, 16), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(ours(ids), theirs(ids).logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("size", ["1GB", "20KB"])  # the second makes shards
def test_a_checkpoint_that_transformers_saved_computes_the_same(tmp_path, size):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    theirs = transformers.GPT2LMHeadModel(transformers.GPT2Config(**SIZES,
                                                                  initializer_range=0.5)).eval()
    theirs.save_pretrained(tmp_path, max_shard_size=size)
    write_tokenizer(tmp_path)
    assert (tmp_path / "model.safetensors").exists() == (size == "1GB")
    ids = torch.randint(VOCAB, (2, 16), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(load_gpt2(tmp_path)[0](ids), theirs(ids).logits, atol=1e-4,
                                   rtol=1e-4)


def test_transformers_makes_the_same_ids(tmp_path):
    transformers = pytest.importorskip("transformers")
    make_checkpoint(tmp_path)
    theirs = transformers.GPT2TokenizerFast.from_pretrained(tmp_path)
    ours = load_tokenizer(tmp_path)
    for words in TEXTS:
        assert ours.encode_ordinary("".join(words)) == theirs("".join(words)).input_ids


# ---- files of our own ----

def test_fingerprint_tells_models_apart(tmp_path):
    make_checkpoint(tmp_path / "a")
    make_checkpoint(tmp_path / "b", prefixed, shards=2)
    make_checkpoint(tmp_path / "c", n_head=4)
    gpt2 = load_gpt2(tmp_path / "a")[0]
    prints = {fingerprint(gpt2)}
    # the layout of the file does not matter
    assert prints == {fingerprint(load_gpt2(tmp_path / "b")[0])}
    prints.add(fingerprint(load_gpt2(tmp_path / "c")[0]))  # same tensors, another config
    for p in gpt2.parameters():
        p *= 1.01
        prints.add(fingerprint(gpt2))
    assert len(prints) == 2 + len(list(gpt2.parameters()))


def test_saved_tensors_come_back_with_their_metadata(tmp_path):
    tensors = {"a": torch.arange(6.).view(2, 3).t(), "b": torch.tensor(3.5),
               "c": torch.ones(2, dtype=torch.bfloat16)}
    save_tensors(tmp_path / "x.safetensors", tensors, {"step": "7"})
    found = read_tensors(tmp_path / "x.safetensors")
    assert found.keys() == tensors.keys() and all(torch.equal(found[name], tensors[name])
                                                  for name in tensors)
    assert read_metadata(tmp_path / "x.safetensors") == {"step": "7"}
    assert [path.name for path in tmp_path.iterdir()] == ["x.safetensors"]


def test_a_failed_save_leaves_the_old_file_alone(tmp_path):
    resource = pytest.importorskip("resource")  # no such thing on Windows
    path, old = tmp_path / "x.safetensors", {"a": torch.zeros(8)}
    save_tensors(path, old, {})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # as a full disk: a file ends at 1000 bytes
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(OSError):
            save_tensors(path, {"a": torch.ones(9999)}, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert torch.equal(load_file(path)["a"], old["a"])
    assert [path.name for path in tmp_path.iterdir()] == ["x.safetensors"]


def test_a_save_to_nowhere_fails_and_leaves_nothing(tmp_path):
    with pytest.raises(OSError):
        save_tensors(tmp_path / "none" / "x.safetensors", {"a": torch.zeros(8)}, {})
    assert not list(tmp_path.iterdir())


def new_training():
    torch.manual_seed(0)
    gpt2 = GPT2(GPT2Config(**SIZES))
    matrices = [p for p in gpt2.blocks.parameters() if p.ndim == 2]
    others = [p for p in gpt2.parameters() if not any(p is q for q in matrices)]
    return gpt2, [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=0.01)]


def train(gpt2, optimizers, steps):
    for step in steps:
        ids = torch.randint(VOCAB, (2, 16), generator=torch.Generator().manual_seed(step))
        F.cross_entropy(gpt2(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def test_training_resumes_exactly(tmp_path):
    whole, optimizers = new_training()
    train(whole, optimizers, range(8))
    first, optimizers = new_training()
    train(first, optimizers, range(4))
    save_tensors(tmp_path / "x.safetensors", first.state_dict()
                 | optimizer_tensors(first, optimizers), {})

    second, optimizers = new_training()
    tensors = read_tensors(tmp_path / "x.safetensors")
    second.load_state_dict({name: tensors[name] for name in second.state_dict()})
    restore_optimizers(second, optimizers, tensors)
    train(second, optimizers, range(4, 8))
    for name, p in whole.named_parameters():
        assert torch.equal(second.get_parameter(name), p), name
    assert all(torch.equal(tensor, read_tensors(tmp_path / "x.safetensors")[name])
               for name, tensor in tensors.items())
