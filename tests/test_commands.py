"""train_oracle.py and eval_ppl.py as commands: what they print and write, when they are cut, and
when they refuse."""

import json
import os
import platform
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import tiny_text, write_checkpoint

import eval_ppl
import train_oracle
from data.options import train_options
from load_weights import load_gpt2
from oracle import read_oracle

ROOT = Path(train_oracle.__file__).parent
STEPS = 8

# A run that meets a signal while it writes its fifth file: one at the start, one after each step.
INTERRUPTED = """
import os, signal, sys
import train_oracle
name, replace, count = sys.argv.pop(1), os.replace, 0

def interrupt(*args):
    global count
    count += 1
    if count == 5:
        os.kill(os.getpid(), signal.Signals[name])
    replace(*args)

train_oracle.SAVE_EVERY, os.replace = 0, interrupt
train_oracle.command(train_oracle.main)
"""


def python(cwd, *args):
    return subprocess.run([sys.executable, *map(str, args)], cwd=cwd, capture_output=True,
                          text=True, timeout=600, env={**os.environ, "PYTHONPATH": str(ROOT)})


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """run(module, *arguments) -> (exit status, stdout, stderr): a command without the seconds that
    a process takes."""
    monkeypatch.chdir(tmp_path)

    def run(module, *args):
        monkeypatch.setattr(sys, "argv", [f"{module.__name__}.py", *map(str, args)])
        status = 0
        try:
            module.command(module.main)
        except SystemExit as end:
            status = end.code
        return status, *capsys.readouterr()
    return run


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A directory with a model, another one, and a text."""
    place = tmp_path_factory.mktemp("place")
    write_checkpoint(place / "model")
    write_checkpoint(place / "other", seed=1)
    (place / "text.txt").write_text(tiny_text(), encoding="utf-8")
    return place


@pytest.fixture(scope="module")
def training(place):
    """The arguments of every training run here; a later option overrides an earlier one."""
    return ["--model", place / "model", "--text", place / "text.txt", "--skip", "2-3", "--dim", 8,
            "--steps", STEPS, "--batch-size", 2, "--context", 16]


@pytest.fixture(scope="module")
def trained(place, training):
    """(oracle file, finished process)"""
    done = python(place, ROOT / "train_oracle.py", *training, "--out", "oracle.safetensors")
    return place / "oracle.safetensors", done


@pytest.fixture(scope="module")
def bad(place, trained):
    """A directory of files that are not what they should be."""
    bad = place / "bad"
    bad.mkdir()
    (bad / "empty.txt").write_text("")
    (bad / "short.txt").write_text("too short")
    (bad / "latin1.txt").write_bytes(b"caf\xe9 " * 500)
    (bad / "truncated.safetensors").write_bytes(trained[0].read_bytes()[:-100])
    settings = {"skip": "2-3", "model": "data/mini", "step": 1, "steps": 1, "fingerprint": "f" * 16}
    save_file({"0.up": torch.zeros(2)}, bad / "old.safetensors",
              {"pathoracle": json.dumps(settings)})
    return bad


def settings_of(file):
    return read_oracle(file)[0]


def assert_same_weights(file, other):
    a, b = load_file(file), load_file(other)
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# ---- training ----

def test_training_writes_an_oracle_and_prints_the_table(trained):
    file, done = trained
    assert (done.returncode, done.stderr) == (0, "")
    assert "0.readouts.1.up.weight" in load_file(file) and settings_of(file)["step"] == STEPS
    assert not [name for name in load_file(file) if name.startswith("optimizer.")]
    rows = [line[:18].strip() for line in done.stdout.splitlines() if line][-3:]
    assert rows == ["full model", "no oracle, 2-3", "oracle.safetensors"]
    assert f"step {STEPS}/{STEPS}" in done.stdout
    assert [p.name for p in file.parent.glob("*oracle*")] == ["oracle.safetensors"]     # no others


def test_the_same_seed_gives_the_same_bytes(run, training, trained, tmp_path):
    for name, seed in (("same", 0), ("other", 1)):
        assert run(train_oracle, *training, "--seed", seed, "--out", name)[0] == 0
    assert (tmp_path / "same").read_bytes() == trained[0].read_bytes()
    name = "0.readouts.0.up.weight"
    assert not torch.equal(load_file("other")[name], load_file("same")[name])


@pytest.mark.parametrize("options", [
    ["--skip", "1-2,4-5", "--shared"], ["--kl-weight", 0], ["--cache-weight", 0, "--blocks", 2],
    ["--skip", "0-5", "--heads", 1]], ids=str)
def test_every_oracle_can_be_trained_and_judged(run, training, trained, options):
    assert run(train_oracle, *training, *options)[0] == 0
    status, out, _ = run(eval_ppl)              # finds oracle.safetensors in the working directory
    assert status == 0 and "oracle prefill" in out
    name = "0.readouts.0.up.weight"
    found, usual = (load_file(file)[name] for file in ("oracle.safetensors", trained[0]))
    assert not torch.equal(found, usual)


@pytest.mark.parametrize("name, start", [("kl_weight", "KL_FROM"), ("cache_weight", "CACHE_FROM")])
def test_the_terms_of_the_distributions_join_later(run, training, monkeypatch, name, start):
    seen, loss = [], train_oracle.path_loss

    def look(path, ids, cos_weight, kl_weight, cache_weight):
        seen.append({"kl_weight": kl_weight, "cache_weight": cache_weight}[name])
        return loss(path, ids, cos_weight, kl_weight, cache_weight)

    monkeypatch.setattr(train_oracle, "path_loss", look)
    assert run(train_oracle, *training, "--kl-weight", 3, "--cache-weight", 5)[0] == 0
    value, share = {"kl_weight": (3, 0.7), "cache_weight": (5, 0.5)}[name]
    assert getattr(train_oracle, start) == share
    assert seen == [value if step >= share * STEPS else 0 for step in range(STEPS)]


def test_the_learning_rate_warms_up_and_falls_to_zero(run, training, monkeypatch):
    seen, make = [], train_oracle.new_optimizers

    def watched(oracles):
        for optimizer in (optimizers := make(oracles)):
            optimizer.register_step_pre_hook(
                lambda its, *_: seen.append(its.param_groups[0]["lr"]))
        return optimizers

    monkeypatch.setattr(train_oracle, "new_optimizers", watched)
    monkeypatch.setattr(train_oracle, "WARM_UP", 4)
    assert run(train_oracle, *training, "--lr", 0.8)[0] == 0
    wanted = [lr for share in (2, 4, 6, 5, 4, 3, 2, 1) for lr in [0.1 * share] * 2]
    assert seen == pytest.approx(wanted)


def test_a_run_that_diverges_says_so_and_can_be_gone_on_with(run, training, trained, tmp_path):
    out = tmp_path / "oracle.safetensors"
    out.write_bytes(b"what was here before")
    status, stdout, err = run(train_oracle, *training, "--lr", 1e38)
    assert status == 2 and err.startswith("error: ") and err.count("\n") == 1 and "--lr" in err
    assert "saved in" not in stdout and out.read_bytes() == b"what was here before"
    lr = train_options("").get_default("lr")            # and what is saved is from before
    assert run(train_oracle, "--resume", "--lr", lr)[0] == 0
    assert_same_weights(out, trained[0])


@pytest.mark.parametrize("module", [train_oracle, eval_ppl])
def test_help_names_the_defaults(run, module):
    status, out, err = run(module, "--help")
    assert (status, err) == (0, "") and "default" in out
    if module is train_oracle:
        parser = train_options("")
        for name in ("skip", "steps", "batch_size", "lr", "kl_weight", "cos_weight",
                     "cache_weight"):
            assert str(parser.get_default(name)) in out


# ---- runs that are cut ----

@pytest.mark.parametrize("existing", [False, True], ids=["new file", "existing file"])
@pytest.mark.parametrize("name", ["SIGKILL", "SIGINT"])
def test_a_run_that_was_cut_goes_on_to_the_same_weights(run, training, trained, tmp_path, name,
                                                        existing):
    out = tmp_path / "my oracle"
    if existing:
        out.write_bytes(b"what was here before")
    done = python(tmp_path, "-c", INTERRUPTED, name, *training, "--out", out)
    if existing:
        assert out.read_bytes() == b"what was here before"
    if name == "SIGINT":
        assert (done.returncode, done.stderr) == (130, "")
        command = done.stdout.splitlines()[-1]
        resume = shlex.split(command.partition("go on with: python train_oracle.py ")[2])
    else:
        assert done.returncode == -signal.SIGKILL
        resume = ["--resume", "--out", out]
    saved, = tmp_path.glob("*.unfinished")
    assert 0 < settings_of(saved)["step"] < STEPS               # it was cut midway
    status, _, message = run(train_oracle, *training, "--out", out)     # not by mistake anew
    assert status == 2 and "--resume" in message and message.count("\n") == 1
    assert run(train_oracle, *resume)[0] == 0
    assert_same_weights(out, trained[0])
    assert {file.suffix for file in tmp_path.iterdir() if file != out} <= {".part"}


@pytest.mark.parametrize("steps", [STEPS, 2 * STEPS], ids=["anew", "fine-tuning"])
def test_a_run_that_fails_leaves_the_existing_oracle(run, training, trained, tmp_path, monkeypatch,
                                                     steps):
    out, sample, calls = tmp_path / "oracle.safetensors", train_oracle.training_windows, []

    def fail(*args, **keywords):
        calls.append(args)
        if len(calls) == 5:
            raise OSError("no space left on device")
        return sample(*args, **keywords)

    out.write_bytes(trained[0].read_bytes())
    monkeypatch.setattr(train_oracle, "SAVE_EVERY", 0)
    args = training if steps == STEPS else ["--resume", "--steps", steps]
    with monkeypatch.context() as patch:
        patch.setattr(train_oracle, "training_windows", fail)
        status, _, err = run(train_oracle, *args)
    assert (status, err) == (2, "error: no space left on device\n")
    assert out.read_bytes() == trained[0].read_bytes()
    assert run(train_oracle, "--resume")[0] == 0
    assert settings_of(out)["step"] == steps and [*tmp_path.iterdir()] == [out]
    if steps == STEPS:
        assert_same_weights(out, trained[0])


def test_a_batch_beyond_all_memory_is_one_line(run, training):
    status, _, err = run(train_oracle, *training, "--batch-size", 10 ** 13)
    assert status == 2 and err.startswith("error: ") and err.count("\n") == 1
    assert "--batch-size" in err


def test_more_steps_fine_tune_a_finished_oracle(run, trained, tmp_path):
    out = tmp_path / "oracle.safetensors"
    out.write_bytes(trained[0].read_bytes())
    assert run(train_oracle, "--resume", "--steps", STEPS + 2)[0] == 0
    assert settings_of(out) == {**settings_of(trained[0]), "step": STEPS + 2, "steps": STEPS + 2}
    name = "0.readouts.0.up.weight"
    assert not torch.equal(load_file(out)[name], load_file(trained[0])[name])


def test_a_run_stopped_at_its_last_step_only_has_to_be_resumed(run, trained, tmp_path):
    (tmp_path / "oracle.safetensors.unfinished").write_bytes(trained[0].read_bytes())
    assert run(train_oracle, "--resume")[0] == 0
    assert [file.name for file in tmp_path.iterdir()] == ["oracle.safetensors"]
    assert_same_weights("oracle.safetensors", trained[0])


# ---- evaluation ----

def test_json_has_the_figures_of_both_tables(place, trained):
    done = python(place, ROOT / "eval_ppl.py", trained[0], "--json", "figures.json")
    assert (done.returncode, done.stderr) == (0, "")
    figures = json.loads((place / "figures.json").read_text(), parse_constant=pytest.fail)  # no NaN
    assert figures.keys() == {"model", "text", "tokens", "context", "rows", "continuation"}
    assert figures["model"] == str(place / "model") and figures["text"] == str(place / "text.txt")
    assert figures["context"] == 16 and figures["tokens"] > 16
    columns = {"path", "compute", "ppl", "ratio", "prefill_ms", "speedup"}
    rows, continuation = ({row["path"]: row for row in figures[table]}
                          for table in ("rows", "continuation"))
    name = str(trained[0])
    assert list(rows) == ["full model", "no oracle, 2-3", name]
    last, = (way for way in continuation if way.startswith("full model, last"))
    assert continuation.keys() == {
        "full model", "oracle prefill", "no oracle", "no cache in the skipped blocks", last,
        "no prompt", "path throughout"}
    more = ({"blocks_run", "cosine", "mse"}, {"first_16_ppl", "first_16_ratio", "recall", "kept"})
    for table, its in zip((rows, continuation), more, strict=True):
        assert table["full model"]["ratio"] == table["full model"]["speedup"] == 1
        for way, row in table.items():
            assert row.keys() == columns | its and row["ppl"] > 1
            assert row["ratio"] == pytest.approx(row["ppl"] / table["full model"]["ppl"])
            assert f"\n{way} " in done.stdout                   # each row was printed, too
    assert [row["blocks_run"] for row in rows.values()] == [6, 4, 4]
    assert rows[name]["compute"] < 1 and "hardly copies" in done.stdout
    assert all(row["kept"] is None and row["recall"] > 0 for row in continuation.values())


@pytest.mark.parametrize("json_file", ["nowhere/figures.json", "."])
def test_json_into_nowhere_is_refused_before_the_evaluation(run, trained, monkeypatch, json_file):
    monkeypatch.setattr(eval_ppl, "evaluate", pytest.fail)
    status, _, err = run(eval_ppl, trained[0], "--json", json_file)
    assert status == 2 and err.count("\n") == 1


def test_two_oracles_are_judged_side_by_side(run, training, trained, tmp_path):
    assert run(train_oracle, *training, "--skip", "2-4", "--out", "other.safetensors")[0] == 0
    files = [str(trained[0]), "other.safetensors"]
    assert run(eval_ppl, *files, "--json", "figures.json")[0] == 0
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert [row["path"] for row in figures["rows"]] == [
        "full model", "no oracle, 2-3", files[0], "no oracle, 2-4", files[1]]
    assert [row["oracle"] for row in figures["continuation"]] == [files[0]] * 7 + [files[1]] * 7


def test_prompt_shows_the_greedy_continuations(run, place, trained):
    gpt2, tokenizer = load_gpt2(place / "model")
    ids = torch.tensor([tokenizer.encode_ordinary("the cat")])
    while ids.shape[1] < 32:                                    # as far as the context goes
        ids = torch.cat([ids, gpt2(ids)[:, -1:].argmax(dim=-1)], dim=1)
    status, out, err = run(eval_ppl, trained[0], "--prompt", "the cat")
    assert (status, err) == (0, "")
    parts = out.split("\n[")[1:]
    assert [part.split(";")[0] for part in parts] == [
        f"{name}: {way}" for name in ("full model", trained[0])
        for way in ("prefill, then the full model", "path throughout")]
    for part in parts[:2]:
        assert part.rstrip("\n").endswith(tokenizer.decode(ids[0].tolist()).rstrip("\n"))
        assert "100% as the full model" in part
    assert out.count("]\nthe cat") == 4


# ---- bad input ----

TRAINING_TROUBLE = [
    (["--skip", "9-2"], "2-9"), (["--skip", "2-12"], "0 to 5"), (["--skip", "a-b"], "a-b"),
    (["--skip", ""], "''"), (["--skip", "1-2,3-4"], "1-2,3-4"), (["--skip=-1-3"], "-1-3"),
    (["--text", "nowhere.txt"], "nowhere.txt"), (["--text", "{bad}"], "directory"),
    (["--text", "{bad}/empty.txt"], "empty"), (["--text", "{bad}/short.txt"], "tokens"),
    (["--text", "{bad}/latin1.txt"], "UTF-8"), (["--model", "nowhere"], "nowhere"),
    (["--dim", "9"], "heads"), (["--context", "33"], "8 to 32"), (["--context", "7"], "8 to 32"),
    (["--steps", "0"], "--steps"), (["--steps", "many"], "many"),
    (["--batch-size", "-1"], "--batch-size"), (["--seed", "x"], "--seed"),
    (["--seed", "9" * 20], "--seed"), (["--heads", "0"], "--heads"), (["--dim", "0"], "--dim"),
    (["--shared", "--skip", "1-2,4-4"], "--shared"), (["--lr", "-1"], "-1"),
    (["--lr", "0"], "'0'"), (["--lr", "nan"], "nan"), (["--kl-weight", "-1"], "-1"),
    (["--cache-weight", "inf"], "inf"), (["--cos-weight", "x"], "--cos-weight"),
    (["--device", "meta"], "meta"), (["--device", "abacus"], "abacus"),
    (["--oracle", "mlp"], "mlp"), (["--no-such-option"], "--no-such-option"),
    (["--out", "nowhere/oracle.safetensors"], "nowhere"), (["--out", "."], "directory"),
    (["--resume"], "oracle.safetensors"), (["--resume", "--out", "nowhere"], "nowhere"),
    (["--resume", "--out", "{bad}/truncated.safetensors"], "truncated"),
    (["--resume", "--out", "{bad}/old.safetensors"], "no oracle of this version"),
    (["--resume", "--out", "{oracle}"], "--steps"),
    (["--resume", "--out", "{oracle}", "--skip", "1-2"], "--skip 2-3"),
    (["--resume", "--out", "{oracle}", "--dim", "16"], "--dim 8"),
    (["--resume", "--out", "{oracle}", "--cache-weight", "2"], "--cache-weight 1.0"),
    (["--resume", "--out", "{oracle}", "--text", "docs"], "--text"),
    (["--resume", "--out", "{oracle}", "--model", "{other}", "--steps", "99"], "another model")]
EVALUATION_TROUBLE = [
    (["nowhere.safetensors"], "nowhere.safetensors"),
    (["{bad}/truncated.safetensors"], "truncated"),
    (["{bad}/empty.txt"], "empty.txt"), (["{model}/model.safetensors"], "no oracle"),
    (["{bad}/old.safetensors"], "no oracle of this version"),
    (["{oracle}", "--model", "{other}"], "another model"),
    (["{oracle}", "--model", "nowhere"], "nowhere"),
    (["{oracle}", "--text", "nowhere.txt"], "nowhere.txt"),
    (["{oracle}", "--text", "{bad}"], "directory"),
    (["{oracle}", "--text", "{bad}/empty.txt"], "empty"),
    (["{oracle}", "--text", "{bad}/short.txt"], "tokens"),
    (["{oracle}", "--text", "{bad}/latin1.txt"], "UTF-8"),
    (["{oracle}", "--context", "33"], "8 to 32"), (["{oracle}", "--context", "7"], "8 to 32"),
    (["{oracle}", "--context", "0"], "--context"), (["{oracle}", "--replay", "8"], "--replay"),
    (["{oracle}", "--prompt", ""], "--prompt"), (["{oracle}", "--prompt", "x" * 32], "--prompt"),
    (["{oracle}", "--json", "nowhere/figures.json"], "nowhere"),
    (["{oracle}", "--json", "x", "--prompt", "x"], "--prompt"),
    (["{oracle}", "--no-such-option"], "--no-such-option"),
    (["{oracle}", "--device", "abacus"], "abacus")]


@pytest.mark.parametrize("module, args, hint", [
    *((train_oracle, *case) for case in TRAINING_TROUBLE),
    *((eval_ppl, *case) for case in EVALUATION_TROUBLE)], ids=lambda part:
    " ".join(part) if isinstance(part, list) else getattr(part, "__name__", ""))
def test_bad_input_is_one_line_and_status_2(run, place, training, trained, bad, tmp_path, module,
                                            args, hint):
    places = {"bad": bad, "oracle": trained[0], "model": place / "model", "other": place / "other"}
    before = {path: path.read_bytes() for path in (trained[0], *bad.iterdir())}
    args = [arg.format(**places) for arg in args]
    status, _, err = run(module, *(training if module is train_oracle else []), *args)
    assert status == 2
    assert err.startswith("error: ") and err.count("\n") == 1 and hint.format(**places) in err
    assert [*tmp_path.iterdir()] == []                          # nothing was begun
    assert {path: path.read_bytes() for path in (trained[0], *bad.iterdir())} == before
    assert not [*place.glob("*.unfinished"), *place.glob("*.lock")]


def test_a_real_process_shows_no_traceback(place):
    done = python(place, ROOT / "train_oracle.py", "--skip", "9-2", "--model", "model",
                  "--text", "text.txt")
    assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1


FAULTS = """
import resource, sys, torch
from data.cli import keep_memory
if sys.argv[1] == "keep":
    keep_memory()
for step in range(10):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [torch.ones(10 << 20) for _ in range(3)]   # 40 MB each, more than glibc keeps itself
    del blocks
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver() < ("glibc", "2.36"),
                    reason="glibc, and not one that caps what it keeps")
def test_memory_that_a_step_frees_is_kept_for_the_next():
    kept, returned = (int(subprocess.check_output([sys.executable, "-c", FAULTS, how], cwd=ROOT))
                      for how in ("keep", "return"))
    assert kept < 0.1 * returned
