"""Run a golden script: commands to a scheduler with a fake runner, and what they print.

A script is comments and cases. A case is its commands, ``----``, and the expected lines up to an
empty one, as in etcd raft's interaction tests. The commands, one per line:

- ``config KEY=VALUE…``: make a new scheduler with these fields of `SchedulerConfig`. Plans are
  prepared ahead only with ``prepared_plans=yes``, so that a script shows one step at a time.
- ``submit NAME prompt=1..8,50 max=3 [n=2] [priority=1] [buffer=4] [arrival=0] [deadline=1]
  [salt=x] [bypass=yes]``
- ``plan``, ``done``: begin a step, end it. ``step``: do both, and let every reader take everything;
  ``step unread``: the readers take nothing. ``run``: step until nothing is left to compute.
- ``fail oom``, ``fail error``: the step in flight raises. ``done fail=3``: the row of sequence 3
  fails in the step.
- ``left NAME``, ``came NAME``: the client loses its connection, or is back.
- ``read NAME [COUNT]``, ``cancel NAME REASON``, ``tick SECONDS``, ``pause MODE``, ``resume``,
  ``reset``.
- ``state``: print every live sequence, the waiting queue, and the counts of the ledger.
"""

from engine.core.common.events import Cancel, Pause, PauseMode, Refused, Resume
from engine.core.common.types import EndReason, RequestId, SequenceId
from engine.core.text.types import ClientCame, ClientLeft, ResetPrefixCache, Sampling
from tests.support.core_driver import Driver, make_request


def parse(text):
    """Return the script as a list of strings (kept as they are) and (commands, expected) pairs."""
    parts, commands, expected = [], [], None
    for line in [*text.splitlines(), ""]:
        if expected is not None:
            if line:
                expected.append(line)
                continue
            parts.append((commands, expected))
            commands, expected = [], None
        elif line == "----":
            expected = []
        elif commands and not line:
            raise ValueError(f"no ---- after {commands}")
        elif line.startswith("#"):
            parts.append(line)
        elif line:
            commands.append(line)
            continue
        if not line:
            parts.append("")
    return parts


def run_script(text):
    """Return the script with its present output in the place of the expected lines."""
    interpreter, lines = Interpreter(), []
    for part in parse(text):
        if isinstance(part, str):
            lines.append(part)
            continue
        commands, _expected = part
        lines += [*commands, "----"]
        for command in commands:
            lines += interpreter.run(command) or ["ok"]
    return "\n".join(lines).rstrip("\n") + "\n"


class Interpreter:
    """A driver and its commands; each command returns the lines that it prints."""

    def __init__(self):
        self.driver = Driver()
        self._shows_credit = False

    def run(self, command):
        """Run one line of a script, and return the lines that it prints."""
        verb, *words = command.split()
        names = [word for word in words if "=" not in word]
        options = dict(word.split("=", 1) for word in words if "=" in word)
        before = len(self.driver.log)
        said = getattr(self, f"do_{verb}")(*names, **options) or []
        if verb not in ("step", "run"):
            said = said + [_event(event) for event in self.driver.log[before:]]
        self.driver.scheduler.check()
        self.driver.check_tokens()
        return said

    def do_config(self, **fields):
        fields = {"prefix_cache": "yes", "prepared_plans": "no", **fields}
        self.driver = Driver(**{name: _value(name, text) for name, text in fields.items()})

    def do_submit(self, name, *, prompt, max, buffer=None, **fields):
        driver = self.driver
        self._shows_credit |= buffer is not None
        request = make_request(
            name,
            _tokens(prompt),
            max_tokens=int(max),
            arrival=float(fields.get("arrival", driver.now)),
            n=int(fields.get("n", 1)),
            priority=int(fields.get("priority", 0)),
            deadline=float(fields["deadline"]) if "deadline" in fields else None,
            cache_salt=fields.get("salt", ""),
            bypass_prefix_cache=fields.get("bypass") == "yes",
            sampling=Sampling(temperature=0.0, seed=7),
        )
        driver.submit(request, buffer=int(buffer or 1000))

    # ---- steps

    def do_plan(self):
        before = len(self.driver.log)
        plan = self.driver.begin_step()
        events = [_event(event) for event in self.driver.log[before:]]
        del self.driver.log[before:]
        return events + (_plan(plan) if plan is not None else ["nothing to compute"])

    def do_done(self, fail=None):
        script = self.driver.runner.script
        if fail is not None:
            script.row_faults = {SequenceId(int(fail)): (0, "sample")}
        self.driver.now += 0.01
        self.driver.end_step()
        script.row_faults = {}

    def do_step(self, how="read"):
        said = self.do_plan()
        if self.driver.in_flight is None:
            return said
        before = len(self.driver.log)
        self.do_done()
        said += [_event(event) for event in self.driver.log[before:]]
        if how == "read":
            said += self._read_all()
        return said

    def do_run(self):
        said = []
        while (now := self.do_step())[-1] != "nothing to compute":
            said += now
        return said

    def do_fail(self, kind):
        error = MemoryError("scripted") if kind == "oom" else RuntimeError("scripted")
        self.driver.runner.script.plan_fault = lambda plan: error
        event = self.driver.end_step()
        self.driver.runner.script.plan_fault = None
        return [event.journal_line()]

    # ---- readers and operators

    def do_read(self, name, count=None):
        self.driver.read(name, None if count is None else int(count))

    def _read_all(self):
        before = len(self.driver.log)
        for name in self.driver.requests:
            self.driver.read(name)
        return [_event(event) for event in self.driver.log[before:]]

    def do_left(self, name):
        self.driver.apply(ClientLeft(RequestId(name)))

    def do_came(self, name):
        self.driver.apply(ClientCame(RequestId(name)))

    def do_cancel(self, name, reason):
        event = Cancel(RequestId(name), EndReason(reason))
        self.driver.apply(event)

    def do_tick(self, seconds):
        self.driver.tick(float(seconds))

    def do_pause(self, mode):
        self.driver.apply(Pause(PauseMode(mode)))

    def do_resume(self):
        self.driver.apply(Resume())

    def do_reset(self):
        self.driver.apply(ResetPrefixCache())

    # ---- state

    def do_state(self):
        ledger = self.driver.scheduler._ledger
        lines = [self._sequence(seq) for seq in ledger.live_sequences()]
        if waiting := ledger.waiting.items:
            lines.append("line: " + " ".join(seq.request_id for seq in waiting))
        stats = self.driver.scheduler.statistics()
        wakeup = self.driver.scheduler.next_wakeup(self.driver.now)
        lines.append(
            f"{stats.free_blocks} of {stats.total_blocks} blocks free, "
            f"{stats.cached_blocks} cached, {ledger.num_seats} seats, "
            f"{stats.queued_tokens} tokens queued"
            + (f", wakes at {wakeup:.2f}" if wakeup is not None else "")
        )
        return lines

    def _sequence(self, seq):
        flags = " attached" * seq.is_attached + " in-step" * seq.in_step
        credit = ""
        if self._shows_credit:
            credit = f" slots {seq.credit.filled}+{seq.credit.reserved}/{seq.credit.capacity}"
        return (
            f"{seq.request_id}/{seq.choice} is {seq.sequence_id}: {seq.state.value}{flags} "
            f"{seq.num_computed}/{seq.num_tokens} in {seq.blocks}{credit}"
        )


def _plan(plan):
    """Return the plan's journal line, then lines of its tables, states, forks, copies and
    releases."""
    lines = [plan.journal_line()]
    for row in plan.rows:
        if row.blocks is not None:
            lines.append(f"  table {row.sequence}: keep {row.blocks.keep} + {[*row.blocks.append]}")
        if row.state is not None:
            lines.append(f"  {_state(row)}")
        lines += [f"  fork {row.sequence} → {c.sequence}: {[*c.blocks]}" for c in row.children]
    if plan.copies:
        lines.append("  copy " + " ".join(f"{source}→{target}" for source, target in plan.copies))
    if plan.released:
        lines.append("  released " + " ".join(map(str, plan.released)))
    return lines


def _state(row):
    slot, source, snapshot = row.state
    said = f"state {row.sequence}: in slot {slot}"
    said += f", from {source}" * (source is not None)
    return said + f", snapshot in {snapshot}" * (snapshot is not None)


def _event(event):
    text = event.journal_line()
    retry = event.error.retry_after_s if isinstance(event, Refused) else None
    return text if retry is None else f"{text} retry after {retry:.2f} s"


def _value(name, text):
    """Return the value of a configuration field from its text."""
    if text in ("yes", "no"):
        return text == "yes"
    return float(text) if name.endswith("_s") else int(text)


def _tokens(text):
    """Return token ids from their text: ``1..4,9`` is 1 2 3 4 9."""
    tokens = []
    for part in text.split(","):
        first, _, last = part.partition("..")
        tokens += range(int(first), int(last or first) + 1)
    return tokens
