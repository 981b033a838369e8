"""`triolet`'s file of results: whatever a kill leaves, each index has one line in the end."""

import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import ConfigError
from grpc_service.cli.results_file import Indices, ResultsFile
from tests.support.files import largest_file

ABOUT = {"input file": "digest", "--model": "m"}


def kill(results, path, cut, hole):
    """End a program without its leave: the last bytes may be missing, and some of the last that are
    left may be 0, where a block was not written before the machine fell."""
    results.close()
    data = bytearray(path.read_bytes())
    del data[len(data) - cut :]
    begin = max(0, len(data) - hole)
    data[begin : begin + hole // 2] = bytes(len(data[begin : begin + hole // 2]))
    path.write_bytes(data)


@given(
    total=st.integers(0, 40),
    runs=st.lists(
        st.tuples(st.integers(0, 30), st.integers(0, 60), st.integers(0, 90)), max_size=6
    ),
    order=st.randoms(use_true_random=False),
)
def test_each_index_has_one_line_after_any_kills(total, runs, order):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "out.jsonl"
        for count, cut, hole in runs:
            with ResultsFile(str(path), ABOUT) as results:
                left = [index for index in range(total) if index not in results.done]
                order.shuffle(left)
                for index in left[:count]:
                    results.add(index, f'"text": "é{index}"')
                results.flush()
            kill(results, path, min(cut, path.stat().st_size), hole)
        with ResultsFile(str(path), ABOUT) as results:
            assert sum(index in results.done for index in range(total)) == len(results.done)
            for index in range(total):
                if index not in results.done:
                    results.add(index, '"late": true')
            results.sync()
            ordered = [json.loads(line)["index"] for line in results.in_order()]
            assert ordered == list(range(total))
            results.finish()
        lines = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
        assert sorted(line["index"] for line in lines) == list(range(total))
        assert all(line.get("text", f"é{line['index']}") == f"é{line['index']}" for line in lines)
        assert [one.name for one in Path(folder).iterdir()] == ["out.jsonl"]


def test_results_in_whole_lines_are_kept(tmp_path):
    path = tmp_path / "out"
    first = ResultsFile(str(path), ABOUT)
    first.add(7, '"a": 1')
    first.add(2, '"a": 2')
    first.note("model", "resolved")
    first.flush()
    kill(first, path, 3, 0)
    with ResultsFile(str(path), ABOUT) as second:
        assert [index for index in range(10) if index in second.done] == [7]
        assert second.noted == {"model": "resolved"}
        with pytest.raises(ValueError, match="index 7"):
            second.add(7, '"a": 1')


def test_only_a_file_of_the_same_work_goes_on(tmp_path):
    path = tmp_path / "out"
    path.write_text("mine\n")
    with pytest.raises(ConfigError, match="exists, and has no unfinished results"):
        ResultsFile(str(path), ABOUT)
    assert path.read_text() == "mine\n"
    path.unlink()
    with ResultsFile(str(path), ABOUT) as first:
        with pytest.raises(ConfigError, match="by another process"):
            ResultsFile(str(path), ABOUT)
        first.add(0, '"a": 1')
        first.flush()
    for other, names in (
        ({"input file": "other", "--model": "m"}, "another input file; remove it and out.resume"),
        ({"input file": "digest"}, "another --model"),
        ({"input file": "x", "--model": "m", "--kind": "y"}, "another input file, --kind"),
    ):
        with pytest.raises(ConfigError, match=names):
            ResultsFile(str(path), other)
    (tmp_path / "out.resume").write_text("torn")
    with pytest.raises(ConfigError, match="has no unfinished results"):
        ResultsFile(str(path), ABOUT)
    assert path.read_text() == '{"index": 0, "a": 1}\n'
    with pytest.raises(ConfigError, match="cannot be written"):
        ResultsFile(str(tmp_path / "none" / "out"), ABOUT)


def test_a_command_that_got_no_result_binds_no_other_one(tmp_path):
    path = tmp_path / "out"
    with ResultsFile(str(path), ABOUT) as first:
        first.note("model", "resolved")
    other = ABOUT | {"--model": "other"}
    with ResultsFile(str(path), other) as second:
        assert second.noted == {}
        second.add(0, '"a": 1')
        second.flush()
    with ResultsFile(str(path), other) as third:
        assert 0 in third.done


def test_a_full_disk_is_told_and_costs_what_was_not_written(tmp_path):
    path = tmp_path / "out"
    with ResultsFile(str(path), ABOUT) as first:
        first.add(0, '"a": 1')
        first.flush()
        first.add(1, f'"a": "{"x" * 1000}"')
        with (
            largest_file(path.stat().st_size + 500),
            pytest.raises(ConfigError, match="out cannot be written"),
        ):
            first.flush()
    assert path.stat().st_size > 500
    with ResultsFile(str(path), ABOUT) as second:
        assert len(second.done) == 1
        second.add(1, '"a": 2')
        second.finish()
    assert path.read_text() == '{"index": 0, "a": 1}\n{"index": 1, "a": 2}\n'


@given(st.sets(st.integers(0, 3000)))
def test_indices_are_a_set(numbers):
    indices = Indices()
    for number in numbers:
        indices.add(number)
    assert len(indices) == len(numbers)
    assert {number for number in range(3100) if number in indices} == numbers
