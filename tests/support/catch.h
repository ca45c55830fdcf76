// Catch2, 2.13 or 3, and the few macros that the tests share. Include it instead of Catch's own headers.
//
//   TEST_CASE("...") { if (!test_python()) DDP_SKIP("no Python"); CHECK(1 + 1 == 2); }
//   run_ranks(2, [](int rank) { DDP_CHECK(rank < 2); });      // in a rank: throws instead of counting
#pragma once

// c10 defines a CHECK of its own. Its header comes first, so that Catch's is the one that stays.
#include <c10/util/Logging.h>
#undef CHECK

#if __has_include(<catch2/catch_all.hpp>)
#include <catch2/catch_all.hpp>
#else
#include <catch2/catch.hpp>
#endif

#include <cstdio>
#include <stdexcept>
#include <string>

namespace ddp::test {

#if __has_include(<catch2/catch_all.hpp>)
using Catch::Approx;
using Catch::Matchers::ContainsSubstring;
#else
using Catch::Detail::Approx;
inline auto ContainsSubstring(const std::string& text) { return Catch::Matchers::Contains(text); }
#endif

/// The message of the exception of type E that `call` throws. Another exception passes through; none is an error.
template <class E, class Call>
std::string message_of(Call&& call) {
  try {
    call();
  } catch (const E& e) {
    return e.what();
  }
  throw std::runtime_error("nothing was thrown");
}

[[noreturn]] inline void check_failed(const char* file, int line, const std::string& what) {
  throw std::runtime_error(std::string(file) + ":" + std::to_string(line) + ": " + what);
}

}  // namespace ddp::test

/// Ends the test case as skipped. CTest finds the line (SKIP_REGULAR_EXPRESSION).
#define DDP_SKIP(reason)                                         \
  do {                                                           \
    std::printf("SKIPPED: %s\n", ::std::string(reason).c_str()); \
    std::fflush(stdout);                                         \
    return;                                                      \
  } while (false)

/// An assertion that works in a forked rank: throws with place and text.
#define DDP_CHECK(...)                                                                                         \
  do {                                                                                                         \
    if (!(__VA_ARGS__)) ::ddp::test::check_failed(__FILE__, __LINE__, "DDP_CHECK(" #__VA_ARGS__ ") is false"); \
  } while (false)
