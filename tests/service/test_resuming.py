"""Streams whose server is killed, or whose connection is cut, and that go on all the same.

A server that is killed is started again, and a continuation goes on. A connection that is cut
leaves a request with a resume window, to which a client attaches. The servers have fake models,
whose text depends on the prompt alone.
"""

import asyncio
import contextlib
import threading
import time
from collections import Counter

import pytest

from grpc_service.cli.main import main
from grpc_service.client import (
    Aborted,
    AsyncClient,
    CallError,
    Cancelled,
    Client,
    GenerateRequest,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    Unavailable,
    messages,
)
from tests.service.fake_backend import runner
from tests.support.proxy import HoldingProxy, proxy
from tests.support.raw_http2 import GET_STATS, RawClient
from tests.support.server import fake
from tests.support.wire import stats, wait_idle, wait_until

SETTINGS = {"script": {"step_s": 0.01}, "runner": {"max_model_len": 4096, "num_blocks": 2048}}
NUM_TOKENS = 150  # 1.5 s of steps, and more on a busy machine
LIMIT_S = 120
NO_PROXY = [("grpc.enable_http_proxy", 0)]


class Restarted:
    """A server that is killed and started again at the same port."""

    def __init__(self):
        self._stack = contextlib.ExitStack()
        self.server = self._stack.enter_context(fake(**SETTINGS))
        self.address = self.server.address

    def kill(self):
        """Kill the server, as `kill -9` does."""
        self.server.process.kill()
        self.server.process.wait()
        self._stack.close()

    def start(self):
        """Start the server again."""
        port = int(self.address.rpartition(":")[2])
        self.server = self._stack.enter_context(fake(**SETTINGS, server={"port": port}))

    def __enter__(self):
        return self

    def __exit__(self, *failure):
        self._stack.close()


@pytest.fixture
def one():
    """Yield a server that can be restarted."""
    with Restarted() as server:
        yield server


def asked(number=0, num_tokens=NUM_TOKENS, **fields):
    """Return a request whose answer no other number's request has."""
    return GenerateRequest(
        token_ids={"ids": [5, 1 + number]}, sampling={"max_tokens": num_tokens}, **fields
    )


def test_a_stream_goes_on_after_its_server_was_killed_and_started_again(one):
    """Every choice is whole, every event comes once, and what was computed is not computed again.

    Red without `Resumption` (the first error ends the stream).
    """
    breaks = []
    request = asked(n=2, request_id="mine")
    with Client(one.address) as client:
        whole = [client.generate(request, timeout=LIMIT_S).text(choice) for choice in (0, 1)]
        with client.generate(
            request, timeout=LIMIT_S, on_break=lambda error, delay_s: breaks.append(error)
        ) as stream:
            events = [next(stream) for _ in range(40)]
            one.kill()
            one.start()
            events += stream
    texts = ["".join(e.delta.text for e in events if e.delta.choice == c) for c in (0, 1)]
    assert texts == whole
    assert [e.WhichOneof("event") for e in events].count("started") == 1
    ends = {e.finished.choice: e.finished.usage for e in events if e.HasField("finished")}
    assert sorted(ends) == [0, 1]
    assert all(usage.completion_tokens == NUM_TOKENS for usage in ends.values())
    assert all(usage.resumed_tokens >= 10 for usage in ends.values())
    assert breaks
    assert all(isinstance(error, Unavailable) for error in breaks)


def test_a_stream_is_given_up_in_time_and_a_cancel_ends_the_wait(one):
    with Client(one.address, resume_s=1.0) as hasty, Client(one.address) as patient:
        streams = [client.generate(asked(), timeout=LIMIT_S) for client in (hasty, patient)]
        for stream in streams:
            for _ in range(5):
                next(stream)
        one.kill()
        with pytest.raises(Unavailable):
            list(streams[0])
        threading.Timer(0.5, streams[1].cancel).start()
        with pytest.raises(Exception, match="was cancelled"):
            list(streams[1])
        with Client(one.address, resume_s=0) as plain, pytest.raises(Unavailable):
            plain.generate(asked(), timeout=LIMIT_S).text()
        one.start()  # so that the server's end is checked


def test_triolet_generate_survives_a_restart_in_mid_sentence(one, capsys):
    """The command tells of the break on standard error only."""
    argv = ["generate", "hi", "--max-tokens", str(NUM_TOKENS), "--server", one.address]
    assert main(argv) == 0
    whole = capsys.readouterr().out
    codes, shown = [], ""
    thread = threading.Thread(target=lambda: codes.append(main(argv)))
    thread.start()

    def has_begun():
        nonlocal shown
        shown += capsys.readouterr().out
        return shown.count("<") > 20

    wait_until(has_begun, 30, "the first words")
    one.kill()
    one.start()
    thread.join(LIMIT_S)
    rest = capsys.readouterr()
    assert codes == [0]
    assert shown + rest.out == whole
    assert "the connection to the server at" in rest.err
    assert "; going on in " in rest.err


@pytest.mark.parametrize(
    ("num_streams", "num_tokens"),
    [(8, 2 * NUM_TOKENS), pytest.param(100, 4 * NUM_TOKENS, marks=pytest.mark.full)],
)
def test_a_rolling_restart_costs_no_stream_its_answer(one, num_streams, num_tokens, capsys):
    """Half of the clients prefer each of two servers. The first server is killed. When all streams
    go on at the second, the first is started again, and the second is killed."""
    broken, heard, ended, all_heard = Counter(), set(), set(), asyncio.Event()

    def note(number, numbers):
        numbers.add(number)
        if len(heard | ended) == num_streams:
            all_heard.set()

    async def read(client, number):
        text = ""
        async with client.generate(
            asked(number, num_tokens),
            timeout=LIMIT_S,
            on_break=lambda error, delay_s: broken.update([number]),
        ) as stream:
            async for event in stream:
                text += event.delta.text
                note(number, heard)
        note(number, ended)
        return text

    async def restart(two):
        await all_heard.wait()
        for server in (one, two):
            await asyncio.to_thread(server.kill)
            heard.clear()
            all_heard.clear()
            await all_heard.wait()
            await asyncio.to_thread(server.start)

    async def both(two):
        targets = [f"ipv4:{a.address},{b.address}" for a, b in ((one, two), (two, one))]
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(asyncio.timeout(LIMIT_S))
            clients = [
                await stack.enter_async_context(AsyncClient(target, options=NO_PROXY))
                for target in targets
            ]
            async with asyncio.TaskGroup() as group:
                group.create_task(restart(two))
                reads = [group.create_task(read(clients[i % 2], i)) for i in range(num_streams)]
            texts = [task.result() for task in reads]
            numbers = range(num_streams)
            wholes = await asyncio.gather(*[read(clients[i % 2], i) for i in numbers])
            assert texts == wholes
            assert len(set(texts)) == num_streams

    with Restarted() as two:
        runner().run(both(two))
    breaks = sum(broken.values())
    with capsys.disabled():
        print(f"\n{num_streams} streams, {breaks} breaks: every answer is whole", end="")
    assert len(broken) == num_streams
    assert breaks >= 1.4 * num_streams  # about half of the streams break twice


# ---- connections that are cut, and clients that attach


@pytest.fixture(scope="module")
def server():
    """Yield a server whose streams are ahead of their clients by at most 20 messages."""
    with fake(**SETTINGS | {"engine": {"stream_buffer": 20, "stall_timeout_s": 0.5}}) as one:
        yield one


def begun(line, num_events=12, **fields):
    """Begin a stream, cut its connection after ``num_events``, and return the events that the
    client has."""
    request = asked(output={"token_ids": True}, **{"resume_window": {"seconds": 30}} | fields)
    with Client(line.address, resume_s=0) as client:
        stream = client.generate(request, timeout=LIMIT_S)
        events = [next(stream) for _ in range(num_events)]
        line.cut()
        with pytest.raises(Unavailable):
            events += stream
    return events


def attach_request(events, n=1):
    """Return the Attach request of a client that has these events of a stream."""
    received = [{"tokens": 0, "finished": False} for _ in range(n)]
    for event in events:
        received[event.delta.choice]["tokens"] += len(event.delta.token_ids)
        if event.HasField("finished"):
            received[event.finished.choice]["finished"] = True
    started = events[0].started
    return messages.AttachRequest(
        request_id=started.request_id, attach_token=started.attach_token, received=received
    )


def ids_of(events, choice=0):
    """Return the token ids of a choice."""
    return [i for e in events if e.delta.choice == choice for i in e.delta.token_ids]


def totals(server):
    """Return the server's figures."""
    return stats(server.channel)


def waiting(server):
    """Return how many streams wait for their clients."""
    return totals(server).detached


@pytest.mark.parametrize("away_s", [0.0, 1.5])
def test_a_stream_whose_connection_was_cut_goes_on_and_nothing_is_computed_twice(server, away_s):
    """The client is away for longer than the stall timeout in one case.

    Red if the loss of a connection ends its request (`TextStream.leave`).
    """
    fields = {"n": 2, "resume_window": {"seconds": 30}}
    with Client(server.address, resume_s=0) as client, proxy(server.address) as line:
        request = asked(output={"token_ids": True}, n=2)
        whole = list(client.generate(request, timeout=LIMIT_S))
        before = totals(server)
        events = begun(line, **fields)
        wait_until(lambda: waiting(server) == 1, 10, "the loss")
        said = client.control.explain(
            messages.ExplainRequest(request_id=events[0].started.request_id), timeout=9
        )
        assert "its client, which lost its connection and has" in said.waiting_for
        threading.Event().wait(away_s)
        rest = list(client.attach(attach_request(events, 2), timeout=LIMIT_S))
        after = totals(server)
    assert rest[0].started.request_id == events[0].started.request_id
    for choice in (0, 1):
        assert ids_of([*events, *rest], choice) == ids_of(whole, choice)
    ends = [event.finished.usage for event in rest if event.HasField("finished")]
    assert [(usage.completion_tokens, usage.resumed_tokens) for usage in ends] == [
        (NUM_TOKENS, 0)
    ] * 2
    assert after.completion_tokens_total - before.completion_tokens_total == 2 * NUM_TOKENS
    assert after.prompt_tokens_total - before.prompt_tokens_total == 2
    assert (waiting(server), after.preemptions) == (0, before.preemptions)
    wait_idle(server.channel)


def test_a_client_may_attach_before_its_loss_is_known_and_more_than_once(server):
    """The earlier Attach call ends without cancelling the request."""
    with Client(server.address, resume_s=0) as client:
        request = asked(output={"token_ids": True}, resume_window={"seconds": 30})
        first = client.generate(request, timeout=LIMIT_S)
        events = [next(first) for _ in range(9)]
        second = client.attach(attach_request(events), timeout=LIMIT_S)
        events += [next(second) for _ in range(7)]
        with pytest.raises(Cancelled, match="taken up the stream by another call"):
            list(first)
        events += list(client.attach(attach_request(events), timeout=LIMIT_S))
        with pytest.raises(Cancelled):
            list(second)
        assert ids_of(events) == ids_of(client.generate(request, timeout=LIMIT_S))
    wait_idle(server.channel)


def test_a_cancel_and_an_abort_end_a_request_with_a_window_at_once(server):
    with Client(server.address, resume_s=0) as client, proxy(server.address) as line:
        with client.generate(asked(resume_window={"seconds": 30}), timeout=LIMIT_S) as stream:
            next(stream)
        wait_idle(server.channel)
        assert waiting(server) == 0
        events = begun(line, request_id="cut")
        wait_until(lambda: waiting(server) == 1, 10, "the loss")
        client.control.abort(messages.AbortRequest(request_ids=["cut"]), timeout=9)
        wait_idle(server.channel)
        with pytest.raises(Aborted):
            list(client.attach(attach_request(events), timeout=LIMIT_S))
        assert waiting(server) == 0


def test_after_the_window_nothing_is_left(server):
    with Client(server.address) as client, proxy(server.address) as line:
        events = begun(line, resume_window={"nanos": 300_000_000})
        wait_until(lambda: waiting(server) == 1, 10, "the loss")
        wait_idle(server.channel)
        assert waiting(server) == 0
        with pytest.raises(NotFound):
            list(client.attach(attach_request(events), timeout=LIMIT_S))


def test_an_answer_that_ended_meanwhile_is_kept_for_its_window(server):
    with Client(server.address) as client, proxy(server.address) as line:
        events = begun(line, 3, num_tokens=12)
        wait_idle(server.channel)
        rest = list(client.attach(attach_request(events), timeout=LIMIT_S))
    assert len(ids_of([*events, *rest])) == 12
    assert rest[-1].finished.usage.completion_tokens == 12


def test_nobody_else_gets_a_stream(tmp_path):
    """Another attach token and another holder's key get the same error; a stream that waits counts
    as one of its key's requests."""
    keys = {"ann": "a" * 20, "ben": "b" * 20}
    file = tmp_path / "keys"
    file.write_text("".join(f"{name} {key} max_requests=1\n" for name, key in keys.items()))
    with (
        fake(**SETTINGS, server={"api_key_file": str(file)}) as server,
        proxy(server.address) as line,
        Client(line.address, api_key=keys["ann"], resume_s=0) as cut,
        Client(server.address, api_key=keys["ann"], resume_s=0) as ann,
        Client(server.address, api_key=keys["ben"], resume_s=0) as ben,
    ):
        request = asked(output={"token_ids": True}, resume_window={"seconds": 30})
        stream = cut.generate(request, timeout=LIMIT_S)
        events = [next(stream) for _ in range(5)]
        line.cut()
        with pytest.raises(Unavailable):
            events += stream
        asking = attach_request(events)
        wrong = messages.AttachRequest()
        wrong.CopyFrom(asking)
        wrong.attach_token = "x" * len(asking.attach_token)
        said = set()
        for client, one in ((ben, asking), (ann, wrong)):
            with pytest.raises(NotFound) as caught:
                list(client.attach(one, timeout=LIMIT_S))
            said.add(str(caught.value))
        assert len(said) == 1

        def is_full():
            with pytest.raises(ResourceExhausted):
                ann.generate(asked(), timeout=LIMIT_S).text()
            return True

        wait_until(is_full, 10, "the seat")
        events += list(ann.attach(asking, timeout=LIMIT_S))
        assert len(ids_of(events)) == NUM_TOKENS
        assert ann.generate(asked(num_tokens=2), timeout=LIMIT_S).text()  # its one request is free


def test_a_client_attaches_by_itself(server):
    """Red if `Resumption` only continues streams: a continuation computes the prompt again."""
    before = totals(server)
    with proxy(server.address) as line, Client(line.address) as client:
        request = asked(resume_window={"seconds": 30})
        with client.generate(request, timeout=LIMIT_S) as stream:
            events = [next(stream) for _ in range(12)]
            line.cut()
            events += stream
    assert events[-1].finished.usage.completion_tokens == NUM_TOKENS
    assert events[-1].finished.usage.resumed_tokens == 0
    assert totals(server).prompt_tokens_total - before.prompt_tokens_total == 2
    assert "".join(e.delta.text for e in events).count("<") == NUM_TOKENS


@pytest.mark.parametrize("is_known", [False, True])
def test_an_end_that_was_lost_on_its_way_is_kept(server, is_known):
    """The server has written the whole answer, and the client has five messages of it.

    Red if written messages count as received (`wait_received`), or if a client can attach only to a
    stream whose loss the server knows.
    """
    held = proxy(server.address, HoldingProxy)
    with held as line, Client(line.address, resume_s=0) as client:
        line.hold_after(5)
        request = asked(num_tokens=12, output={"token_ids": True}, resume_window={"seconds": 30})
        stream = client.generate(request, timeout=LIMIT_S)
        events = [next(stream) for _ in range(5)]
        wait_until(lambda: not totals(server).running, 10, "the answer's end")
        if is_known:
            line.cut()
            wait_until(lambda: waiting(server) == 1, 10, "the loss")
        with Client(server.address) as other:
            rest = list(other.attach(attach_request(events), timeout=LIMIT_S))
            assert len(ids_of([*events, *rest])) == 12
            with pytest.raises(NotFound):  # the client has every event already
                list(other.attach(attach_request(events), timeout=LIMIT_S))
        assert waiting(server) == 0


@pytest.mark.parametrize(
    ("received", "field"),
    [
        ([{"tokens": 5}, {"tokens": 1}], "received"),
        ([{"tokens": 100_000}], "received[0].tokens"),
        ([{"tokens": 2, "finished": True}], "received[0].finished"),
        ("", "request_id"),
        ("", "attach_token"),
    ],
)
def test_what_cannot_have_been_received_is_refused_and_the_stream_waits_on(server, received, field):
    with Client(server.address) as client, proxy(server.address) as line:
        events = begun(line)
        wrong = attach_request(events)
        if received:
            del wrong.received[:]
            wrong.received.extend([messages.ReceivedChoice(**one) for one in received])
        else:
            wrong.ClearField(field)
        with pytest.raises(InvalidArgument) as caught:
            list(client.attach(wrong, timeout=LIMIT_S))
        assert [violation.field for violation in caught.value.violations] == [field]
        rest = list(client.attach(attach_request(events), timeout=LIMIT_S))
        assert len(ids_of([*events, *rest])) == NUM_TOKENS


def test_a_request_that_its_client_cancelled_cannot_be_attached_to(server):
    with Client(server.address, resume_s=0) as client:
        request = asked(output={"token_ids": True}, resume_window={"seconds": 30})
        with client.generate(request, timeout=LIMIT_S) as stream:
            events = [next(stream) for _ in range(5)]
        wait_idle(server.channel)
        with pytest.raises(NotFound):
            list(client.attach(attach_request(events), timeout=LIMIT_S))


def test_a_drain_gives_up_the_streams_that_wait():
    """No client could attach to them, as a draining server takes no connections.

    Red if a drain waits for their resume windows.
    """
    with fake(**SETTINGS | {"engine": {"stream_buffer": 20}}) as server:
        with proxy(server.address) as line:
            begun(line)
            wait_until(lambda: waiting(server) == 1, 10, "the loss")
            with RawClient(server.address) as connected, Client(server.address) as client:
                connected.ask(GET_STATS)
                client.control.drain(messages.DrainRequest(timeout={"seconds": 60}), timeout=20)
                told = messages.GetStatsResponse.FromString(connected.ask(GET_STATS))
        assert told.totals.detached == 0


def test_lost_streams_cost_another_client_nothing_and_none_of_them_is_lost():
    """Red if the core does not know which streams are lost: another client then waits for a seat
    until they have ended, and they hold the KV blocks."""
    settings = {**SETTINGS, "engine": {"max_num_seqs": 4}}
    with fake(**settings) as server, Client(server.address) as other:

        def seconds():
            began = time.monotonic()
            assert other.generate(asked(900, num_tokens=40), timeout=LIMIT_S).text()
            return time.monotonic() - began

        alone = min(seconds() for _ in range(3))
        streams, window = [], {"seconds": 60}
        with proxy(server.address) as line, Client(line.address, resume_s=0) as hoarder:
            for number in range(60):
                request = asked(number, 100, output={"token_ids": True}, resume_window=window)
                streams.append(hoarder.generate(request, timeout=LIMIT_S))
            begun = [[next(stream)] for stream in streams]
            line.cut()
            for events, stream in zip(begun, streams, strict=True):
                with pytest.raises(Unavailable):
                    events += stream
        wait_until(lambda: waiting(server) == 60, 10, "the losses")
        assert min(seconds() for _ in range(3)) < 2 * alone
        now = totals(server)
        assert now.total_blocks - now.free_blocks <= 0.1 * now.total_blocks
        assert now.waiting == 0
        for events in (begun[0], begun[59]):
            events += other.attach(attach_request(events), timeout=LIMIT_S)
            assert len(ids_of(events)) == 100
        ids = [one[0].started.request_id for one in begun]
        other.control.abort(messages.AbortRequest(request_ids=ids), timeout=9)
        wait_idle(server.channel)


def test_a_client_attaches_again_and_again_beside_forty_streams():
    """A loop with many events delivers them after the next step has begun. The old fault: a client
    that attached between a step's commit and its delivery broke the count of its stream's slots."""
    prompt = {"ids": [5, 9]}
    slow = {"script": {"step_s": 0.002}, "runner": {"max_model_len": 4096, "num_blocks": 8192}}
    with fake(**slow) as server, Client(server.address, resume_s=0) as client:
        long = {"max_tokens": 4000}
        others = [
            client.generate(GenerateRequest(token_ids={"ids": [5, 20 + i]}, sampling=long))
            for i in range(40)
        ]
        for other in others:
            threading.Thread(target=read_until_cancelled, args=[other], daemon=True).start()
        request = GenerateRequest(
            token_ids=prompt,
            sampling=long,
            output={"token_ids": True},
            resume_window={"seconds": 60},
        )
        call = client.generate(request)
        started = next(call).started
        got = []
        for _ in range(60):
            for event in call:
                got += event.delta.token_ids
                if len(event.delta.token_ids) and len(got) % 3 == 0:
                    break
            former = call
            call = client.attach(
                messages.AttachRequest(
                    request_id=started.request_id,
                    attach_token=started.attach_token,
                    received=[{"tokens": len(got)}],
                )
            )
            assert next(call).started.request_id == started.request_id
            former.cancel()
        call.cancel()
        for other in others:
            other.cancel()
        whole = GenerateRequest(
            token_ids=prompt, sampling={"max_tokens": len(got)}, output={"token_ids": True}
        )
        assert [i for event in client.generate(whole) for i in event.delta.token_ids] == got


def read_until_cancelled(call):
    """Read a stream until somebody cancels it."""
    with contextlib.suppress(CallError):
        for _ in call:
            pass
