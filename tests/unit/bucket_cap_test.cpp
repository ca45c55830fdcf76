#include "bucket_cap.h"

#include "support/catch.h"

using ddp::detail::best_bucket_mb;

TEST_CASE("the best bucket is the geometric mean of the gradients and of what travels in one latency") {
  constexpr int64_t kMiB = 1 << 20;
  // 100 MiB of gradients; in 1 ms 4 MiB travel: sqrt(100 * 4).
  CHECK(best_bucket_mb(100 * kMiB, {.latency_s = 1e-3, .bytes_per_s = 4e3 * kMiB}) == Approx(20));
  // No other size is better under S/c * latency + c / rate.
  const auto exposed = [](double mib) { return 100 / mib * 1e-3 + mib / 4e3; };
  for (const double other : {1.0, 5.0, 19.0, 21.0, 40.0, 100.0}) CHECK(exposed(20) < exposed(other));
}

TEST_CASE("the best bucket stays between 1 and 100 MiB") {
  CHECK(best_bucket_mb(1, {.latency_s = 1e-6, .bytes_per_s = 1e9}) == 1);
  CHECK(best_bucket_mb(int64_t{1} << 40, {.latency_s = 1, .bytes_per_s = 1e12}) == 100);
}
