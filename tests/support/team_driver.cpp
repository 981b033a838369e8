// Runs steps of teams with counts that change from step to step, and compares with one thread's
// results. Some members sleep inside of tasks or between loops, as if the system did not schedule
// them. Arguments: a seed, the number of steps, and the number of threads that run steps at once.
// Prints how many threads there are at the end.
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "team.h"

using namespace triolet;

static const int MOST = 6, CELLS = 97;

struct Caller {
    unsigned seed;
    long steps;
    bool is_wrong = false;

    unsigned draw() {
        seed = seed * 1664525u + 1013904223u;
        return seed >> 8;
    }
};

static unsigned mixed(unsigned a, unsigned b) {
    a = (a ^ b * 2654435761u) * 2246822519u;
    return a ^ a >> 15;
}

static void *call(void *given) {
    Caller &own = *(Caller *)given;
    for (long step = 0; step < own.steps; step++) {
        const int count = 1 + own.draw() % MOST;
        const unsigned salt = own.draw();
        const long loops = 1 + own.draw() % 20;
        std::vector<unsigned> cells(CELLS, 1), expected(CELLS, 1);
        unsigned in_caller = 0, once = 0;
        const pthread_t caller = pthread_self();
        Team::run(count, [&] {
            for (long k = 0; k < loops; k++) {
                const unsigned chance = mixed(mixed(salt, k), member_index());
                if (chance % 50 == 0) usleep(chance % 300);
                const long length = (salt + k) % (CELLS + 1), at_once = 1 + (salt + k) % 4;
                auto change = [&](long i) {
                    const unsigned slow = mixed(chance, i);
                    if (slow % 2000 == 0) usleep(slow % 400);
                    cells[i] = cells[i] * 3 + (unsigned)k;
                };
                if (k % 3) share_tasks(length, at_once, change);
                else share_evenly(length, change);
                if (k % 4 == 0) run_once([&] { once += cells[0]; });
                if (k % 5 == 0) run_in_caller([&] {
                    in_caller += pthread_equal(caller, pthread_self()) ? 1 : 1000000;
                });
            }
        });
        unsigned expected_once = 0;
        for (long k = 0; k < loops; k++) {
            for (long i = 0; i < (long)((salt + k) % (CELLS + 1)); i++)
                expected[i] = expected[i] * 3 + (unsigned)k;
            if (k % 4 == 0) expected_once += expected[0];
        }
        if (cells != expected || once != expected_once || in_caller != (loops + 4) / 5)
            own.is_wrong = true;
    }
    return nullptr;
}

int main(int argc, char **argv) {
    if (argc != 4) return 2;
    std::vector<Caller> callers;
    for (long i = 0; i < atol(argv[3]); i++)
        callers.push_back({(unsigned)(atol(argv[1]) + i), atol(argv[2])});
    std::vector<pthread_t> threads(callers.size());
    for (size_t i = 0; i < callers.size(); i++)
        pthread_create(&threads[i], nullptr, call, &callers[i]);
    bool is_wrong = false;
    for (size_t i = 0; i < callers.size(); i++) {
        pthread_join(threads[i], nullptr);
        is_wrong |= callers[i].is_wrong;
    }
    FILE *status = fopen("/proc/self/status", "r");
    char line[256];
    while (status && fgets(line, sizeof line, status))
        if (std::string(line).rfind("Threads:", 0) == 0) fputs(line + 8, stdout);
    return is_wrong;
}
