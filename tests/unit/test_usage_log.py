"""The usage log: whole lines, one for each record, whatever happens to its file or its disk."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import time

import pytest
import trio

from engine.errors import ConfigError
from engine.requests.usage import OTHERS, SHOWN_MAX, SUMS_MAX, Usage, UsageRecord
from grpc_service.app import usage_log
from grpc_service.app.usage_log import FLUSH_S, UsageLog, line_of
from tests.support.server import ROOT


def record(number=0, **fields):
    common = {"request_id": f"r{number}", "holder": "ann", "model": "m", "adapter": ""}
    return UsageRecord(**common | {"operation": "chat", "end": "OK", "ended_at": 1e9} | fields)


def names_in(path):
    """Return the ids in a file, each line of which must be whole."""
    data = path.read_text()
    assert data == "" or data.endswith("\n")
    return [json.loads(line)["request_id"] for line in data.splitlines()]


async def written(log, *numbers):
    for number in numbers:
        log.add(record(number))
    await log.flush()


def test_a_line_has_every_field_of_a_record_and_the_time_in_utc():
    found = json.loads(line_of(record(1, holder="ä\n", step_s=0.1, completion_tokens=3)))
    assert next(iter(found)) == "ended_at"
    assert found["ended_at"] == "2001-09-09T01:46:40.000+00:00"
    assert (found["holder"], found["step_s"], found["completion_tokens"]) == ("ä\n", 0.1, 3)
    assert set(found) == set(UsageRecord.__dataclass_fields__)
    assert "\n" not in line_of(record(1, holder="ä\n"))


@pytest.mark.parametrize(
    "torn", ["", "{", '{"ended_at":"2001', line_of(record(3))[:-1], '{"ended_at":"\0\0', "\0" * 99]
)
@pytest.mark.parametrize("whole", ["", line_of(record(1)) + "\n"])
async def test_a_torn_last_line_is_dropped_at_the_start(tmp_path, whole, torn):
    path = tmp_path / "usage"
    path.write_text(whole + torn)
    log = UsageLog(str(path), 10**6)
    assert path.read_text() == whole
    await written(log, 2)
    assert names_in(path) == ["r1"] * bool(whole) + ["r2"]
    await log.finish()


@pytest.mark.parametrize("end", ["all: build", "x" * 100_000, '{"ended": 1'])
def test_a_file_that_is_no_usage_log_is_refused_and_not_cut(tmp_path, end):
    path = tmp_path / "other"
    path.write_text(f"first\n{end}")
    with pytest.raises(ConfigError, match=r"--usage-log .*other cannot be written: it is no usage"):
        UsageLog(str(path), 10**6)
    assert path.read_text() == f"first\n{end}"


async def test_another_server_may_write_the_same_file(tmp_path):
    """Red if the second one takes the first one's last line for a torn one, or they overwrite."""
    path = tmp_path / "usage"
    one = UsageLog(str(path), 10**6)
    await written(one, 1)
    two = UsageLog(str(path), 10**6)
    for number in range(2, 6):
        await written(one if number % 2 else two, number)
    assert names_in(path) == [f"r{number}" for number in range(1, 6)]
    await one.finish()
    await two.finish()


async def test_a_server_that_hangs_with_the_lock_costs_no_record(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(usage_log, "LOCK_S", 0.05)
    path = tmp_path / "usage"
    log = UsageLog(str(path), 10**6)
    with path.open() as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        await written(log, 1)
    assert names_in(path) == []
    assert "another process holds its lock" in caplog.text
    await log.finish()
    assert names_in(path) == ["r1"]


async def test_a_write_that_is_cancelled_before_it_begins_loses_no_record(tmp_path):
    path = tmp_path / "usage"
    log = UsageLog(str(path), 10**6)
    with trio.CancelScope() as scope:
        scope.cancel()
        await written(log, 1)
    assert scope.cancelled_caught
    await log.finish()
    assert names_in(path) == ["r1"]


HALF = """
import os, sys, time, trio
from grpc_service.app.usage_log import UsageLog
from tests.unit.test_usage_log import record

def half(file, data):
    num_bytes = real(file, data[:-20])
    print("half", flush=True)
    time.sleep(0.5)
    return num_bytes

async def main():
    global real
    log = UsageLog(sys.argv[1], 10**6)
    real, os.write = os.write, half
    for number in (1, 2):
        log.add(record(number))
    await log.flush()
    os.write = real
    await log.finish()

trio.run(main)
"""


async def test_what_a_full_disk_has_cut_is_cut_off_without_the_lines_of_other_servers(tmp_path):
    path = tmp_path / "usage"
    argv = [sys.executable, "-c", HALF, str(path)]
    log = UsageLog(str(path), 10**6)
    process = await trio.lowlevel.open_process(argv, cwd=ROOT, stdout=subprocess.PIPE)
    async with process.stdout as out:
        written_by_it = b""
        while b"\n" not in written_by_it:
            written_by_it += await out.receive_some()
        assert written_by_it == b"half\n"
        await written(log, 3)
        assert await process.wait() == 0
    await log.finish()
    assert sorted(names_in(path)) == ["r1", "r2", "r3"]


SHARING = """
import resource, sys, trio
from grpc_service.app.usage_log import UsageLog
from tests.unit.test_usage_log import record

async def main():
    first, most = int(sys.argv[2]), int(sys.argv[3])
    log = UsageLog(sys.argv[1], 5000)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for number in range(first, first + 200):
        # where files may not grow beyond `most` bytes, writes are cut as on a full disk
        resource.setrlimit(resource.RLIMIT_FSIZE, (most if number % 3 else soft, hard))
        log.add(record(number))
        await log.flush()
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    await log.finish()

trio.run(main)
"""


def test_servers_that_share_a_log_on_a_full_disk_lose_nothing_and_rotate_it(tmp_path):
    path = tmp_path / "usage"
    makers = [
        subprocess.Popen(
            [sys.executable, "-c", SHARING, str(path), str(first), str(most)], cwd=ROOT
        )
        for first, most in ((0, 2000), (1000, 3100), (2000, 10**9))
    ]
    assert [process.wait(120) for process in makers] == [0, 0, 0]
    files = [*tmp_path.iterdir()]
    assert len(files) > 10
    assert max(file.stat().st_size for file in files) <= 5000
    found = [name for file in files for name in names_in(file)]
    wanted = [f"r{first + number}" for first in (0, 1000, 2000) for number in range(200)]
    assert sorted(found) == sorted(wanted)


async def test_a_full_file_is_renamed_and_no_record_is_lost(tmp_path):
    path = tmp_path / "usage"
    (tmp_path / "usage.1").write_text("an operator's own\n")
    log = UsageLog(str(path), 3 * len(line_of(record())))
    for number in range(10):
        await written(log, number)
    await log.finish()
    assert (tmp_path / "usage.1").read_text() == "an operator's own\n"
    files = [path, *(tmp_path / f"usage.{number}" for number in range(2, 6))]
    found = [name for file in files if file.exists() for name in names_in(file)]
    assert sorted(found) == [f"r{number}" for number in range(10)]
    assert len(list(tmp_path.iterdir())) > 4


async def test_a_file_that_was_renamed_by_others_is_made_anew(tmp_path):
    path = tmp_path / "usage"
    log = UsageLog(str(path), 10**6)
    await written(log, 1)
    path.rename(tmp_path / "yesterday")
    await written(log, 2)
    assert names_in(tmp_path / "yesterday") == ["r1"]
    assert names_in(path) == ["r2"]
    await log.finish()


async def test_what_a_full_disk_refuses_waits_and_leaves_no_torn_line(
    tmp_path, monkeypatch, caplog
):
    path = tmp_path / "usage"
    log = UsageLog(str(path), 10**6)
    await written(log, 1)
    real = os.write
    monkeypatch.setattr(os, "write", lambda file, data: real(file, data[:10]))
    await written(log, 2)
    await written(log, 3)
    assert names_in(path) == ["r1"]
    monkeypatch.setattr(usage_log, "WAITING_MAX", 3)
    for number in (4, 5):
        log.add(record(number))
    monkeypatch.setattr(os, "write", real)
    await log.flush()
    assert names_in(path) == ["r1", "r2", "r3", "r4"]
    assert [entry.levelname for entry in caplog.records] == ["ERROR", "WARNING"]
    assert "1 records were lost" in caplog.text
    await log.finish()


def test_a_file_that_cannot_be_opened_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"--usage-log .*usage cannot be written"):
        UsageLog(str(tmp_path / "missing" / "usage"), 10**6)


async def test_records_are_written_without_being_asked_and_at_the_end(tmp_path):
    path = tmp_path / "usage"
    log = UsageLog(str(path), 10**6)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(log.run)
        log.add(record(1))
        with trio.fail_after(10):
            while not names_in(path):  # noqa: ASYNC110 a file has no event
                await trio.sleep(0.01)
        log.add(record(2))
        nursery.cancel_scope.cancel()
    await log.finish()
    assert names_in(path) == ["r1", "r2"]


KILLED = """
import sys, time, trio
from engine.requests.usage import UsageRecord
from grpc_service.app.usage_log import UsageLog

async def main():
    log = UsageLog(sys.argv[1], 20_000)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(log.run)
        for number in range(10**9):
            log.add(UsageRecord(f"r{number}", "ann", "m", "", "chat", "OK", time.time()))
            print(number, time.monotonic(), flush=True)
            await trio.sleep(0.001)

trio.run(main)
"""


def test_a_killed_process_loses_a_second_of_records_at_most(tmp_path):
    path = tmp_path / "usage"
    argv = [sys.executable, "-c", KILLED, str(path)]
    with subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        lines = [process.stdout.readline()]
        until = time.monotonic() + 3 * FLUSH_S + 0.2
        while time.monotonic() < until:
            lines.append(process.stdout.readline())
        process.send_signal(signal.SIGKILL)
        killed_at = time.monotonic()
        lines += process.stdout.read().splitlines()
    added = dict(line.split() for line in lines if len(line.split()) == 2)
    kept = {name for file in tmp_path.iterdir() for name in names_in(file)}
    old = {f"r{number}" for number, at in added.items() if float(at) < killed_at - 1.0}
    assert len(old) > 100
    assert old <= kept


# ---- the sums ----------------------------------------------------------------------------------


def test_the_sums_of_all_minutes_are_those_of_the_records_whatever_is_forgotten(monkeypatch):
    monkeypatch.setattr("engine.requests.usage.SUMS_MAX", 10)
    usage = Usage(0.0)
    for number in range(300):
        usage.add(record(number, holder=f"h{number % 7}", ended_at=40.0 * number, prompt_tokens=2))
    begun, found = usage.sums()
    assert begun == 0.0
    assert sum(x.requests for x in found.values()) == 300
    assert found["h3", "m"].prompt_tokens == 2 * found["h3", "m"].requests
    begun, late = usage.sums(since=40.0 * 299)
    assert begun == 40.0 * 299 // 60 * 60
    assert 1 <= sum(x.requests for x in late.values()) <= 2
    begun, early = usage.sums(since=120.0)  # not kept apart any more
    assert begun == 0.0
    assert sum(x.requests for x in early.values()) == 300
    assert SUMS_MAX > 10


def test_a_clock_that_is_set_back_or_jumps_loses_no_record_and_no_minute():
    usage = Usage(0.0)
    for at in (36_000.0, 99_999_999.0, 36_100.0, 3_600.0, 36_100.0):
        usage.add(record(ended_at=at))
    requests = {
        since: sum(x.requests for x in usage.sums(since=since)[1].values())
        for since in (0.0, 3_660.0, 36_060.0, 36_120.0, 1e9)
    }
    assert requests == {0.0: 5, 3_660.0: 4, 36_060.0: 3, 36_120.0: 1, 1e9: 0}


def test_any_number_of_holders_takes_bounded_memory(monkeypatch):
    monkeypatch.setattr("engine.requests.usage.PAIRS_MAX", 20)
    usage = Usage(0.0)
    for number in range(1000):
        usage.add(record(number, holder=f"h{number}"))
    _, found = usage.sums()
    assert len(found) == 21
    assert found[OTHERS, "m"].requests == 980
    assert len(usage.shown) == SHOWN_MAX + 1
    assert usage.shown[OTHERS].requests == 1000 - SHOWN_MAX
