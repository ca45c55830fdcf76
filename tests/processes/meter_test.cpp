// Meters over real ranks.
#include "ddp/meter.h"

#include <torch/torch.h>

#include <cmath>
#include <thread>

#include "support/catch.h"
#include "support/spawn.h"

namespace {
using namespace ddp::test;
}

TEST_CASE("the mean is weighted over ranks, and the same on each") {
  run_ranks(4, [](int rank) {
    auto group = ddp::ProcessGroup::from_env({.timeout = 8s});
    ddp::Meter meter;
    DDP_CHECK(std::isnan(meter.compute(group)));
    // Values 0, 1, 2, 3 with weights 1, 2, 3, 4: (0 + 2 + 6 + 12) / 10. Half of the ranks use tensors.
    if (rank % 2) {
      meter.update(torch::full({}, rank), rank + 1);
    } else {
      meter.update(rank, rank + 1);
    }
    DDP_CHECK(meter.compute(group) == 2.0);
    DDP_CHECK(meter.compute(group) == 2.0);  // reading changes nothing
    DDP_CHECK(meter.local() == rank);
    meter.reset();
    if (rank == 3) meter.update(7.0);  // the others have nothing to say
    DDP_CHECK(meter.compute(group) == 7.0);
  });
}

TEST_CASE("throughput is the sum of the ranks' rates") {
  run_ranks(2, [](int rank) {
    auto group = ddp::ProcessGroup::from_env({.timeout = 8s});
    ddp::Throughput rate;
    rate.add(rank == 0 ? 1000 : 3000);
    std::this_thread::sleep_for(200ms);
    double all = rate.per_second(group);
    DDP_CHECK(all <= 4000 / 0.2);
    DDP_CHECK(all > 4000 / 2.0);
  });
}
