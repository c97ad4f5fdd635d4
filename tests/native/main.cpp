// Runs the core's tests. Random ones draw from one seed, which is printed first; KVPAGER_SEED repeats it.
#define DOCTEST_CONFIG_IMPLEMENT
#include <doctest/doctest.h>

#include <cstdio>

#include "support.h"

int main(int count, char** arguments) {
    std::printf("KVPAGER_SEED=%llu\n", static_cast<unsigned long long>(kvpager::test_seed()));
    std::fflush(stdout);
    return doctest::Context(count, arguments).run();
}
