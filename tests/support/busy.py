"""Schedulers on machines whose steps take as long as their rows need."""

from collections import Counter

from tests.support.core_driver import Driver, make_request

DECODE_S, ROW_S, TOKEN_S = 0.008, 0.0008, 0.0007  # of a small model on two cores


class Busy:
    """A scheduler on a machine whose steps take as long as their rows need."""

    def __init__(self, **config):
        fields = {"num_blocks": 400, "max_model_len": 400, "max_num_seqs": 16}
        fields |= {"max_num_batched_tokens": 80, "max_queued_requests": 1000}
        self.driver = Driver(**fields | config)
        self.count = 0
        self.tokens = Counter()  # sampled, by holder
        self.charged = {}  # for the last step of `step`, by holder, for its weight
        self._prepare, self.driver.scheduler.prepare = self.driver.scheduler.prepare, self._watched

    def ask(self, holder, *, prompt=8, max_tokens=300, weight=1, first=None, **fields):
        """Submit a request of a holder, whose prompt begins with ``first`` or with a new token."""
        self.count += 1
        name = f"r{self.count}"
        first = 1000 + self.count if first is None else first
        self.driver.submit(
            make_request(
                name,
                [first, *range(1, prompt)],
                max_tokens=max_tokens,
                arrival=self.driver.now,
                holder=holder,
                weight=weight,
                **fields,
            ),
            buffer=100_000,
        )
        return name

    def _watched(self, now):
        """Prepare a plan, which may be dropped and so must not change what holders had."""
        before = self.counters()
        self._prepare(now)
        assert self.counters() == before

    def step(self):
        """Compute one step, and return by holder the number of its rows; None without a step."""
        if self.driver.begin_step() is None:
            return None
        core, self.charged = self.driver.scheduler, {}
        if core._step.is_shared:
            self.charged = {x.holder: price / x.weight for x, price in core._charged.items()}
        return self.end_step()

    def end_step(self):
        """Compute the step in flight, and return by holder the number of its rows."""
        plan = self.driver.in_flight
        lives = self.driver.scheduler._ledger.requests.values()
        owner = {seq.sequence_id: x.request.holder for x in lives for seq in x.sequences}
        chunks = [row.count for row in plan.rows if row.count > 1]
        seconds = TOKEN_S * sum(chunks)
        if len(chunks) < len(plan.rows):
            seconds += DECODE_S + ROW_S * (len(plan.rows) - len(chunks))
        rows = {}
        for row in plan.rows:
            name = owner[row.sequence]
            rows[name] = rows.get(name, 0) + 1
            self.tokens[name] += row.logits.samples
        self.driver.now += seconds
        self.driver.end_step()
        self.driver.scheduler.check()
        return rows

    def run(self, steps):
        """Compute so many steps, and return by holder in how many of them it had rows."""
        seen = {}
        for _ in range(steps):
            for name in self.step() or ():
                seen[name] = seen.get(name, 0) + 1
        return seen

    def counters(self):
        """Return each holder's counter."""
        return {x.holder: x.counter for x in self.driver.scheduler._ledger.shares.in_order()}


class Replicas:
    """Replicas of one model, each a `Busy`."""

    def __init__(self, count, **config):
        self.all = [Busy(**config) for _ in range(count)]
        shares = []
        for one in self.all:
            one.driver.scheduler.shares.join(shares)

    def step(self):
        """Compute the step that begins next, and return its replica's index and the number of its
        rows by holder; None without a step."""
        index = min(range(len(self.all)), key=lambda at: self.all[at].driver.now)
        rows = self.all[index].step()
        if rows is None:
            self.all[index].driver.now += 0.01
        return index, rows

    def run(self, seconds):
        """Compute for so long, and return for each replica what each holder was charged."""
        until = max(one.driver.now for one in self.all) + seconds
        charged = [Counter() for _ in self.all]
        while min(one.driver.now for one in self.all) < until:
            index, rows = self.step()
            charged[index].update(self.all[index].charged if rows else {})
        return charged
