// A team of threads that computes a step together: the thread that calls, and helpers of its own.
//
// Rule 1: nobody waits for a thread that has nothing in hand. A loop is over when all of its tasks are
// done, and whoever runs takes the next task. A helper that the system does not schedule is waited for
// only while it is inside a task. Rule 2: nobody spins without an end. A thread that waits in vain
// spins less the next time, and sleeps.
//
// Every member runs the same code, a sequence of loops. Each loop is a phase, whose number all members
// count alike. A late member finds the phases before the current one to be over and passes them. So
// how many loops there are may not depend on what a loop computes; how many tasks one has may not
// either. Between two loops, a member only reads what no loop writes.
#pragma once

#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstdint>
#include <new>

#include "simd_amx.h"

namespace triolet {

// Spins before a sleep. SPINS_MOST take about 0.2 ms on Zen 3, longer than tasks of a loop differ.
constexpr int SPINS_MOST = 10000, SPINS_LEAST = 50;

// A number that threads wait for to change. It is the upper half of ``value``, as futexes have 32 bits.
struct alignas(64) Signal {
    std::atomic<uint64_t> value{0};
    std::atomic<uint32_t> sleepers{0};

    static uint32_t upper(uint64_t of) { return (uint32_t)(of >> 32); }
    uint32_t get() const { return upper(value.load()); }

    // Changes the number, sets the lower half to 0, and wakes everybody who sleeps.
    void set(uint32_t to) {
        value.store((uint64_t)to << 32);
        if (sleepers.load()) futex(FUTEX_WAKE_PRIVATE, INT_MAX);
    }

    // Changes the number if it is ``from``, and wakes nobody. Returns whether it was ``from``.
    bool replace(uint32_t from, uint32_t to) {
        uint64_t before = (uint64_t)from << 32;
        return value.compare_exchange_strong(before, (uint64_t)to << 32);
    }

    // Waits while the number is ``old``. ``spins`` is how often to look at it before sleeping.
    void wait_while(uint32_t old, int &spins) {
        for (int i = 0; i < spins; i++) {
            if (upper(value.load(std::memory_order_acquire)) != old) {
                const int more = spins + spins / 2 + 1;
                if (i) spins = more < SPINS_MOST ? more : SPINS_MOST;
                return;
            }
            spin();
        }
        spins = spins / 4 > SPINS_LEAST ? spins / 4 : SPINS_LEAST;
        sleepers.fetch_add(1);
        while (get() == old) futex(FUTEX_WAIT_PRIVATE, old);
        sleepers.fetch_sub(1);
    }

private:
    void futex(int what, uint32_t number) {
        static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the upper half comes second");
        syscall(SYS_futex, (uint32_t *)&value + 1, what, number, nullptr, nullptr, 0);
    }
};

class Team;

// What a thread knows of the team that it is a member of.
struct Member {
    Team *team = nullptr;  // null: the thread computes alone
    int index = 0, count = 1;
    uint32_t phase = 0;
    int spins = SPINS_MOST;
};

static thread_local Member member;

static inline int member_index() { return member.index; }
static inline int num_members() { return member.count; }

class Team {
    enum Place : uint32_t { AWAY, INSIDE, WAITING };
    struct Expelled {};  // thrown in a helper whose step has ended while it waited

    struct Helper {
        Signal ticket;  // odd: there is a step, which the helper may join
        Signal place;
        Team *team = nullptr;
        int index = 0;
    };

    struct Job {
        void (*call)(void *);
        void *body;
        int count;
        uint32_t phase;
    };

    static constexpr int HELPERS_MOST = 1023;
    Signal phase_;  // the number of the current phase; the lower half counts its tasks that are taken
    alignas(64) std::atomic<uint32_t> done_{0};  // how many tasks of the current phase are done
    Job job_{};
    Helper *helpers_[HELPERS_MOST];
    int num_helpers_ = 0;
    Team *next_ = nullptr;  // in the list of teams that nobody uses

    static inline pthread_mutex_t lock_ = PTHREAD_MUTEX_INITIALIZER;
    static inline Team *free_ = nullptr;

    // Teams are never freed: their helpers wait until the process ends.
    static Team *acquire() {
        pthread_mutex_lock(&lock_);
        Team *found = free_;
        if (found) free_ = found->next_;
        pthread_mutex_unlock(&lock_);
        return found ? found : new (std::nothrow) Team;
    }

    static void release(Team *team) {
        pthread_mutex_lock(&lock_);
        team->next_ = free_;
        free_ = team;
        pthread_mutex_unlock(&lock_);
    }

    static void *live(void *given) {
        Helper &own = *(Helper *)given;
        uint32_t seen = 0;
        int spins = SPINS_LEAST;
        for (;;) {
            own.ticket.wait_while(seen, spins);
            seen = own.ticket.get();
            if (seen % 2 == 0) continue;
            own.place.set(INSIDE);
            // The step may have ended meanwhile. Its caller sets the ticket before it looks here.
            if (own.ticket.get() == seen) own.team->join(own);
            own.place.set(AWAY);
        }
        return nullptr;
    }

    void join(Helper &own) {
        const Job job = job_;
        member.team = this;
        member.index = own.index;
        member.count = job.count;
        member.phase = job.phase;
        Tiles tiles;
        try {
            job.call(job.body);
        } catch (const Expelled &) {
        }
    }

    // Starts helpers until there are ``wanted``; fewer if the system has no thread left.
    void hire(int wanted) {
        sigset_t all, before;
        if (wanted > HELPERS_MOST) wanted = HELPERS_MOST;
        if (num_helpers_ >= wanted) return;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);  // helpers take no signals
        while (num_helpers_ < wanted) {
            Helper *helper = new (std::nothrow) Helper;
            if (!helper) break;
            helper->team = this;
            helper->index = num_helpers_ + 1;
            pthread_t thread;
            if (pthread_create(&thread, nullptr, live, helper)) {
                delete helper;
                break;
            }
            pthread_detach(thread);
            helpers_[num_helpers_++] = helper;
        }
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
    }

    // Ends the step for a helper, so that it touches nothing of it any more.
    void part_from(Helper &helper) {
        helper.ticket.set(helper.ticket.get() + 1);
        while (helper.place.get() != AWAY && !helper.place.replace(WAITING, AWAY))
            helper.place.wait_while(INSIDE, member.spins);
    }

    // Waits for the end of a phase. A helper may be expelled meanwhile.
    void wait_for(uint32_t phase) {
        if (phase_.get() != phase) return;
        if (!member.index) {
            phase_.wait_while(phase, member.spins);
            return;
        }
        Signal &place = helpers_[member.index - 1]->place;
        place.set(WAITING);
        phase_.wait_while(phase, member.spins);
        if (!place.replace(WAITING, INSIDE)) throw Expelled();
    }

public:
    // Calls ``body`` in ``count`` threads, of which this is one. Returns when all of its loops are over.
    template <class Body>
    static void run(int count, Body body) {
        Team *team = count > 1 ? acquire() : nullptr;
        member = Member{team, 0, count > 1 ? count : 1, 0, member.spins};
        Tiles tiles;
        if (!team) {
            body();
            return;
        }
        team->hire(count - 1);
        member.phase = team->phase_.get();
        team->job_ = Job{[](void *own) { (*(Body *)own)(); }, &body, count, member.phase};
        const int helpers = count - 1 < team->num_helpers_ ? count - 1 : team->num_helpers_;
        for (int i = 0; i < helpers; i++) {
            Signal &ticket = team->helpers_[i]->ticket;
            ticket.set(ticket.get() + 1);
        }
        body();
        for (int i = 0; i < helpers; i++) team->part_from(*team->helpers_[i]);
        release(team);
        member = Member{nullptr, 0, 1, 0, member.spins};
    }

    // Divides the tasks 0 to ``count`` - 1 among the members of the team, which all call this: calls
    // ``each(task)`` for the tasks that this member takes, and returns when all tasks are done. With
    // ``is_for_caller``, only the thread that called the step takes tasks.
    template <class Each>
    void share(uint32_t count, bool is_for_caller, Each each) {
        const uint32_t phase = member.phase++, tasks = count ? count : 1;
        const bool takes = !is_for_caller || !member.index;
        std::atomic<uint64_t> &taken = phase_.value;
        uint64_t seen = taken.load(std::memory_order_acquire);
        uint32_t own = 0;
        while (takes && Signal::upper(seen) == phase && (uint32_t)seen < tasks) {
            if (!taken.compare_exchange_weak(seen, seen + 1)) continue;
            if (count) each((uint32_t)seen);
            own++;
            seen = taken.load(std::memory_order_acquire);
        }
        if (own && done_.fetch_add(own) + own == tasks) {
            done_.store(0, std::memory_order_relaxed);
            phase_.set(phase + 1);
            return;
        }
        wait_for(phase);
    }
};

// Calls ``each(i)`` for every i from 0 to ``count``, ``at_once`` of them in one task. Called by all
// members of a team, which divide the tasks among them; returns when all are done.
template <class Each>
static inline void share_tasks(long count, long at_once, Each each) {
    if (!member.team) {
        for (long i = 0; i < count; i++) each(i);
        return;
    }
    member.team->share((uint32_t)((count + at_once - 1) / at_once), false, [&](uint32_t task) {
        const long begin = task * at_once, end = begin + at_once < count ? begin + at_once : count;
        for (long i = begin; i < end; i++) each(i);
    });
}

// Divides many tasks that take equally long: each member takes about two runs of adjacent tasks.
template <class Each>
static inline void share_evenly(long count, Each each) {
    const long parts = 2 * num_members();
    share_tasks(count, (count + parts - 1) / parts + !count, each);
}

// Called by all members of a team. Has one of them call ``run``; returns when that is done.
template <class Run>
static inline void run_once(Run run) {
    share_tasks(1, 1, [&](long) { run(); });
}

// Called by all members of a team. Has the thread that called the step call ``run``, as `run_once`.
template <class Run>
static inline void run_in_caller(Run run) {
    if (!member.team) {
        run();
        return;
    }
    member.team->share(1, true, [&](uint32_t) { run(); });
}

}  // namespace triolet
