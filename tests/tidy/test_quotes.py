"""Pages quote the examples as they are. A comment ``<!-- quote FILE WORD -->`` in front of a fenced
block names what stands between the two lines ``// [WORD]`` of a file, without the second; run this
file to write the blocks anew."""

import re
import textwrap

import tree

BLOCK = re.compile(
    r"(?P<head><!-- quote (?P<file>\S+) (?P<word>\w+) -->\n```\w*\n)(?P<body>.*?)(?P<end>^```$)",
    re.DOTALL | re.MULTILINE,
)


def quoted(file: str, word: str) -> str | None:
    """The part of a file between its two marks, its first line without the mark."""
    marked = rf"^ *// \[{word}\] ?(.*?)^ *// \[{word}\]$"
    found = re.search(marked, tree.read(file), re.DOTALL | re.MULTILINE)
    if found is None:
        return None
    first, _, rest = found[1].partition("\n")
    indent = re.match(r" *", rest)[0]
    return textwrap.dedent(f"{indent}// {first}\n{rest}")


def pages() -> list[str]:
    return [name for name in tree.text_files() if name.startswith("docs/")]


def test_pages_quote_the_examples_as_they_are() -> None:
    complaints, count = [], 0
    for name in pages():
        for block in BLOCK.finditer(tree.read(name)):
            count += 1
            expected = quoted(block["file"], block["word"])
            if expected is None:
                complaints.append(f"{name}: {block['file']} has no part [{block['word']}]")
            elif expected != block["body"]:
                complaints.append(
                    f"{name}: the quote [{block['word']}] is not what {block['file']} says; "
                    "run tests/tidy/test_quotes.py"
                )
    tree.none(complaints)
    assert count > 0, "some page quotes an example"


def test_every_part_that_is_marked_is_quoted() -> None:
    pairs = {
        (block["file"], block["word"])
        for name in pages()
        for block in BLOCK.finditer(tree.read(name))
    }
    complaints = []
    for name in tree.under("examples", suffixes=(".cpp", ".rs")):
        words = re.findall(r"^ *// \[(\w+)\]$", tree.read(name), re.MULTILINE)
        complaints += [
            f"{name}: no page quotes [{word}]" for word in words if (name, word) not in pairs
        ]
    tree.none(complaints)


def write() -> None:
    for name in pages():
        text = tree.read(name)
        new = BLOCK.sub(
            lambda block: (
                block["head"] + (quoted(block["file"], block["word"]) or "") + block["end"]
            ),
            text,
        )
        if new != text:
            (tree.ROOT / name).write_text(new, encoding="utf-8")


if __name__ == "__main__":
    write()
