"""data/lab/heads.py, memory.py and blame.py against plain loops and scores known beforehand."""

import sys

import numpy as np
import pytest
import torch
from tiny import CONFIG, random_ids, random_path, tiny_gpt2, write_checkpoint
from torch.testing import assert_close

from data.lab import blame, heads, memory
from model import GPT2, GPT2Config
from oracle import no_oracle

LENGTH = 6                      # of a sequence that comes twice


def attending(back):
    """A GPT-2 of one block: head 0 attends `back` tokens back, head 1 to all it sees alike.

    Positions are orthogonal directions; head 0's query at t asks for that of t - back.
    """
    n = 4 * LENGTH
    gpt2 = GPT2(GPT2Config(vocab_size=20, n_positions=n, n_embd=2 * n, n_layer=1, n_head=2))
    gpt2.requires_grad_(False).wte.weight.zero_()
    gpt2.wpe.weight.copy_(torch.cat([torch.eye(n), -torch.eye(n)], dim=1))      # of mean 0
    weight = gpt2.blocks[0].attn.c_attn.weight.zero_()
    gpt2.blocks[0].attn.c_attn.bias.zero_()
    C, t = 2 * n, torch.arange(back, n)
    weight[t - back, t] = 100                                   # query: t -> direction t - back
    weight[C + torch.arange(n), torch.arange(n)] = 1            # key: t -> direction t
    return gpt2


# ---- heads ----

def test_attention_weights_are_numpys():
    gpt2, H = tiny_gpt2(), CONFIG.n_head
    block, x = gpt2.blocks[3], gpt2.states(random_ids(2, 9), 3)[-1]
    got = heads.attention_weights(block, x)
    y = x.numpy().astype(np.float64)
    y = (y - y.mean(-1, keepdims=True)) / np.sqrt(y.var(-1, keepdims=True) + 1e-5)
    y = y * block.ln_1.weight.numpy() + block.ln_1.bias.numpy()
    y = y @ block.attn.c_attn.weight.numpy().T + block.attn.c_attn.bias.numpy()
    C, D = CONFIG.n_embd, CONFIG.n_embd // H
    for b in range(2):
        for h in range(H):
            for t in range(9):
                q, k = y[b, t, h * D:(h + 1) * D], y[b, :t + 1, C + h * D:C + (h + 1) * D]
                e = np.exp(k @ q / D ** 0.5)
                np.testing.assert_allclose(got[b, h, t, :t + 1], e / e.sum(), atol=1e-5, rtol=1e-4)
                assert not got[b, h, t, t + 1:].any()


def test_attention_weights_are_the_models_own():
    block, x = tiny_gpt2().blocks[2], torch.randn(2, 7, CONFIG.n_embd)
    attn, normed = block.attn, block.ln_1(x)
    y = heads.attention_weights(block, x) @ attn.keys_values(normed)[1]
    assert_close(attn.c_proj(y.transpose(1, 2).flatten(2)), attn(normed), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("back, first", [(1, 1), (2, 3), (LENGTH - 1, LENGTH)])
def test_mean_weights_of_known_heads(back, first):
    T = 2 * LENGTH
    score = heads.mean_weights(attending(back), random_ids(3, T) % 20, back, first)
    uniform = np.mean([1 / (t + 1) for t in range(first, T)])
    assert_close(score, torch.tensor([[1.0, uniform]], dtype=torch.float32), atol=1e-4, rtol=1e-4)
    other = heads.mean_weights(attending(back), random_ids(3, T) % 20, back - 1, first)
    assert other[0, 0] < 1e-4


def test_mean_weights_of_all_blocks_by_a_loop():
    gpt2, ids, back, first = tiny_gpt2(), random_ids(2, 12), 5, 6
    got = heads.mean_weights(gpt2, ids, back, first)
    assert got.shape == (CONFIG.n_layer, CONFIG.n_head)
    for i, x in enumerate(gpt2.states(ids, CONFIG.n_layer - 1)):
        weights = heads.attention_weights(gpt2.blocks[i], x)
        for h in range(CONFIG.n_head):
            its = [weights[b, h, t, t - back].item() for b in range(2) for t in range(first, 12)]
            assert got[i, h].item() == pytest.approx(np.mean(its), abs=1e-6)


def test_repeated_sequences():
    ids = heads.repeated(50, LENGTH)
    assert ids.shape == (heads.SEQUENCES, 2 * LENGTH)
    for row in ids.tolist():
        assert row[:LENGTH] == row[LENGTH:] and len(set(row)) == LENGTH
        for t in range(LENGTH, 2 * LENGTH):         # what prefix matching looks at
            assert row[t - (LENGTH - 1)] == row[row.index(row[t]) + 1]
    assert len(set(map(tuple, ids.tolist()))) > heads.SEQUENCES // 2
    assert torch.equal(ids, heads.repeated(50, LENGTH))


def test_the_same_scores_give_the_same_picture(tmp_path):
    pytest.importorskip("matplotlib")
    scores = {"one": torch.rand(6, 4), "two": torch.rand(6, 4)}
    for name in ("a.svg", "b.svg"):
        heads.draw(scores, [range(2, 5)], tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_a_picture_without_matplotlib_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ValueError, match="pip install matplotlib"):
        heads.draw({}, [], "heads.svg")


def test_heads_marks_the_skipped_blocks(tmp_path, monkeypatch, capsys):
    model = write_checkpoint(tmp_path / "tiny")
    monkeypatch.setattr(heads, "load_tokens", lambda *_: (None, random_ids(1, 200)[0]))
    monkeypatch.setattr(sys, "argv", ["heads", "--model", str(model), "--skip", "1-2,4-4"])
    heads.main()
    lines = capsys.readouterr().out.splitlines()
    marked = [line.split()[0] for line in lines if line.split()[1:2] == ["skipped"]]
    assert marked == ["1", "2", "4"] * 2
    assert len([line for line in lines if line[:1].isdigit()]) == 2 * CONFIG.n_layer


# ---- memory ----

@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("prompt", [1, 2, 9, 15])
def test_hits_by_a_loop(seed, prompt):
    window = random_ids(4, 16, seed) % 4                # few tokens, so many pairs come again
    got = memory.hits(window, prompt)
    assert got.shape == (4, 16 - prompt)
    for row, its in zip(window.tolist(), got.tolist(), strict=True):
        pairs = {(row[j - 1], row[j]) for j in range(1, prompt)}
        assert its == [(row[t - 1], row[t]) in pairs for t in range(prompt, 16)]


def test_hits_of_a_window_written_out():
    #                            prompt         | scored
    window = torch.tensor([[7, 1, 2, 3, 1, 2, 9, 7, 1, 8, 8, 8, 2, 3]])
    #                                            9-7 no, 7-1, 1-8, 8-8 no, again no, 8-2, 2-3
    assert memory.hits(window, 7).tolist() == [[False, True, False, False, False, False, True]]


def test_hit_rows():
    losses = {"full model": torch.tensor([[1., 2, 3]]), "no prompt": torch.tensor([[2., 5, 4]])}
    full, none = memory.hit_rows(losses, torch.tensor([[True, False, True]]))
    assert full == {"path": "full model", "hits": 2, "hits_excess": 0, "others": 2,
                    "others_excess": 0}
    assert none == {"path": "no prompt", "hits": 3, "hits_excess": 1, "others": 5,
                    "others_excess": 3}


def test_lookup_prompts():
    ids, value = memory.lookup_prompts(40, 5, 100)
    assert ids.shape == (100, 11) and value.shape == (100,)
    asked = []
    for row, answer in zip(ids.tolist(), value.tolist(), strict=True):
        table = dict(zip(row[:-1:2], row[1:-1:2], strict=True))
        assert len(set(row[:-1])) == 10 and table[row[-1]] == answer
        asked.append(list(table).index(row[-1]))
    assert [asked.count(i) for i in range(5)] == [20] * 5       # every place is asked as often
    assert torch.equal(ids, memory.lookup_prompts(40, 5, 100)[0])
    assert not torch.equal(ids[:5], ids[5:10])


def test_a_model_that_looks_up_is_exact_where_the_pairs_were_read(monkeypatch):
    """A stand-in whose cache is the ids that were read; its answer stands behind the key there."""
    path = no_oracle(tiny_gpt2(), [range(2, 4)])

    def look_up(key, read):
        answer = [its[its.index(k) + 1] if k in its else 0
                  for [k], its in zip(key.tolist(), read.tolist(), strict=True)]
        return torch.eye(CONFIG.vocab_size)[answer][:, None]

    monkeypatch.setattr(path.gpt2, "forward", look_up)
    monkeypatch.setattr(path, "forward", lambda ids: look_up(ids[:, -1:], ids[:, :-1]))
    monkeypatch.setattr(memory, "readers", lambda path, ids: {
        "full model": lambda ids: (None, ids), "last half": lambda ids: (None, ids[:, 4:]),
        "no prompt": lambda ids: (None, ids[:, -1:])})
    rows = {row["path"]: row["exact"] for row in memory.lookup_rows(path, 4)}
    assert rows == {"full model": 1, "last half": 0.5, "no prompt": 0, "path throughout": 1}


def test_lookup_rows_are_those_of_one_pass_where_nothing_is_skipped():
    gpt2 = tiny_gpt2()
    rows = {row["path"]: row["exact"] for row in memory.lookup_rows(no_oracle(gpt2, []), 4)}
    ids, value = memory.lookup_prompts(CONFIG.vocab_size, 4)
    exact = (gpt2(ids)[:, -1].argmax(dim=-1) == value).float().mean().item()
    assert rows["full model"] == rows["oracle prefill"] == rows["path throughout"] == exact


# ---- blame ----

@pytest.mark.parametrize("blocks", [[], [3], range(6)])
def test_the_truth_stands_in_the_blocks_that_were_named(blocks):
    path, ids = random_path(tiny_gpt2(), "2-4"), random_ids(2, 12)
    logits, cache = blame.read_with_truth(path, blocks)(ids)
    true, filled = path.gpt2.prefill(ids)[1], path.prefill(ids)[1]
    for i, layer in enumerate(cache):
        wanted = true[i] if i in blocks else filled[i]
        assert torch.equal(layer.k[:, :, :-1], wanted.k[:, :, :-1])
        assert torch.equal(layer.v[:, :, :-1], wanted.v[:, :, :-1])
        assert len(layer) == 12
    expected = {0: path.prefill, 6: path.gpt2.prefill}
    if len(blocks) in expected:
        assert_close(logits, expected[len(blocks)](ids)[0], atol=1e-4, rtol=1e-4)
    else:
        for read in expected.values():
            assert not torch.allclose(logits, read(ids)[0], atol=1e-3)


def test_blame_rows_name_each_block_behind_the_first_jump():
    path, ids = random_path(tiny_gpt2(), "1-3,5-5"), random_ids(4, 16).split(2)
    rows = {row["path"]: row for row in blame.blame_rows(path, ids, ids, 12)}
    assert list(rows) == ["none (oracle prefill)", "block 2", "block 3", "block 4", "block 5",
                          "blocks 1-3"]
    assert len({row["ratio"] for row in rows.values()}) == len(rows)
