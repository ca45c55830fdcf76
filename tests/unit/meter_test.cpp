#include "ddp/meter.h"

#include <torch/torch.h>

#include <cmath>
#include <thread>

#include "ddp/error.h"
#include "support/catch.h"

using ddp::test::Approx;

TEST_CASE("the mean is weighted, over tensors and doubles alike") {
  ddp::Meter meter;
  ddp::ProcessGroup alone;
  CHECK(std::isnan(meter.compute(alone)));
  meter.update(1.0, 3);
  meter.update(torch::full({}, 5.0), 1);
  CHECK(meter.local() == Approx(2.0));
  meter.update(torch::full({1, 1}, 8, torch::kLong), 2);
  CHECK(meter.compute(alone) == Approx(4.0));
  meter.update(std::nan(""), 0);  // a batch without tokens
  meter.update(torch::full({}, std::nan("")), 0);
  CHECK(meter.compute(alone) == Approx(4.0));
  meter.reset();
  CHECK(std::isnan(meter.local()));
}

TEST_CASE("the sum is kept in double and without the graph") {
  ddp::Meter meter;
  auto weight = torch::ones({}, torch::requires_grad());
  for (int i = 0; i < 1000; ++i) meter.update(weight * 0.1f);
  CHECK(meter.local() == Approx(static_cast<double>(0.1f)).epsilon(1e-12));  // in float it is off by 1e-6
  CHECK(weight.use_count() == 1);
}

TEST_CASE("a meter refuses what is no number") {
  ddp::Meter meter;
  CHECK_THROWS_AS(meter.update(torch::ones({2})), ddp::ConfigError);
  CHECK_THROWS_AS(meter.update(torch::Tensor()), ddp::ConfigError);
  CHECK_THROWS_AS(meter.update(1.0, -1), ddp::ConfigError);
  CHECK_THROWS_AS(meter.update(1.0, std::nan("")), ddp::ConfigError);
}

TEST_CASE("throughput counts from construction and from reset") {
  ddp::Throughput rate;
  rate.add(1000);
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  double first = rate.per_second(ddp::ProcessGroup());
  CHECK(first < 1000 / 0.05);
  CHECK(first > 100);
  rate.reset();
  CHECK(rate.items() == 0);
  CHECK(rate.per_second() == 0);
}
