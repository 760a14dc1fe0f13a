"""The shape of the project: which file imports which, how long they are, what the README quotes."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CHAIN = ["model", "load_weights", "oracle", "eval_ppl", "train_oracle"]
LAB = "data.lab"


def sources():
    """Every Python file of the project."""
    return [path for folder in (".", "data", "data/lab", "tests")
            for path in sorted((ROOT / folder).glob("*.py"))]


def imports(path):
    """The modules that a file imports, at whatever place."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def of_project(path):
    return {name for name in imports(path) if name.split(".")[0] in {*CHAIN, "data"}}


def test_the_method_is_a_chain():
    for i, name in enumerate(CHAIN):
        its = {found.split(".")[0] for found in of_project(ROOT / f"{name}.py")}
        assert its <= {*CHAIN[:i], "data"} if i else not its, name
        assert i == 0 or CHAIN[i - 1] in its, f"{name} does not build on {CHAIN[i - 1]}"


@pytest.mark.parametrize("path", sorted((ROOT / "data").glob("*.py")), ids=lambda path: path.name)
def test_the_help_files_know_nothing_of_the_method(path):
    assert not {name.split(".")[0] for name in of_project(path)} & set(CHAIN)


def test_only_the_lab_and_tests_import_the_lab():
    for path in sources():
        if path.parent not in (ROOT / "data" / "lab", ROOT / "tests"):
            assert not any(f"{name}.".startswith(f"{LAB}.") for name in imports(path)), path


def test_the_method_is_short():
    lines = {name: len((ROOT / f"{name}.py").read_text().splitlines()) for name in CHAIN}
    assert sum(lines.values()) <= 720 and max(lines.values()) <= 210, lines


def test_no_line_is_longer_than_100_columns():
    paths = sources()
    assert len(paths) > 15
    assert not [f"{path.relative_to(ROOT)}:{n}" for path in paths
                for n, line in enumerate(path.read_text().splitlines(), 1) if len(line) > 100]


def test_the_readme_is_short():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 150 and len(text.encode()) <= 11_000


def test_the_readme_quotes_the_code_word_for_word():
    """Its Python blocks with `def hidden` stand in oracle.py, whatever they are indented by."""
    code = [line.strip() for line in (ROOT / "oracle.py").read_text().splitlines()]
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    quotes = [block for block in blocks if "def hidden" in block]
    assert quotes
    for block in quotes:
        quoted = [line.strip() for line in block.strip().splitlines()]
        assert any(code[i:i + len(quoted)] == quoted for i in range(len(code))), block


def test_ci_runs_the_test_command_of_the_readme():
    commands = [line for line in (ROOT / "README.md").read_text().splitlines()
                if line.endswith("python -m pytest")]
    assert len(commands) == 1
    assert commands[0] in (ROOT / ".ci" / "run").read_text().splitlines()
